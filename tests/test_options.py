"""Options that are generated from a config."""

from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from mptify.cli import app
from mptify.cli.options import with_options_of
from mptify.config import Recipe, TicketConfig, make_recipe
from mptify.errors import BadConfig
from mptify.recipe_files import find_recipe
from tests.helpers.cli import works


class Toy(BaseModel):
    size: int = Field(3, description="How large.")
    kind: Literal["round", "square"] = Field("round", description="Which shape.")
    names: tuple[str, ...] = Field((), description="Names.")
    shares: dict[str, float] = Field(default_factory=dict, description="Shares.")
    loud: bool = Field(False, description="Whether it is loud.")
    fast: bool = Field(True, description="Whether it is fast.")


seen: list[Any] = []
toy = typer.Typer()


@toy.command()
@with_options_of(Toy, before="out")
def make(
    word: Annotated[str, typer.Argument()],
    settings: dict[str, Any],
    out: Annotated[str, typer.Option()] = "a",
) -> None:
    seen.append((word, settings, out))


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ([], {}),
        (["--size", "5", "--kind", "square"], {"size": 5, "kind": "square"}),
        (["--names", "a", "--names", "b"], {"names": ("a", "b")}),
        (
            ["--shares", "layer.*=0.5", "--shares", "a=b=1"],
            {"shares": {"layer.*": 0.5, "a=b": 1.0}},
        ),
        (["--loud", "--no-fast"], {"loud": True, "fast": False}),
    ],
)
def test_every_field_is_an_option(options, changed):
    seen.clear()
    result = CliRunner().invoke(toy, ["hello", *options, "--out", "b"])
    assert result.exit_code == 0, result.output
    assert seen == [("hello", Toy().model_dump() | changed, "b")]


@pytest.mark.parametrize("text", ["layer", "=0.5", "layer=much"])
def test_a_pair_that_is_none_is_one_sentence(text):
    result = CliRunner().invoke(toy, ["hello", "--shares", text])
    assert isinstance(result.exception, BadConfig)
    assert (
        str(result.exception) == f"--shares {text!r}: write PATTERN=VALUE, such as 'layer1.*=0.5'."
    )


def test_convert_takes_every_setting_of_a_ticket():
    command = typer.main.get_command(app).commands["convert"]
    options = {parameter.name: parameter for parameter in command.params}
    assert set(TicketConfig.model_fields) < set(options)
    assert options["prune"].default == TicketConfig().prune


given: list[Any] = []
some = typer.Typer()


@some.command()
@with_options_of(Toy, before="out", only_given=True, without=("kind",), into="changes")
def change(changes: dict[str, Any], out: Annotated[str, typer.Option()] = "a") -> None:
    given.append((changes, out))


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ([], {}),
        (["--size", "3"], {"size": 3}),
        (["--no-fast", "--loud"], {"fast": False, "loud": True}),
        (["--no-loud", "--names", "a"], {"loud": False, "names": ("a",)}),
    ],
)
def test_options_may_be_told_apart_from_defaults(options, changes):
    given.clear()
    result = CliRunner().invoke(some, options)
    assert result.exit_code == 0, result.output
    assert given == [(changes, "a")]
    assert CliRunner().invoke(some, ["--kind", "round"]).exit_code == 2


def test_search_takes_the_settings_of_a_recipe_and_of_its_ticket(tmp_path):
    options = typer.main.get_command(app).commands["search"].params
    names = {parameter.name for parameter in options}
    own = set(Recipe.model_fields) - {"ticket", "data", "model", "start", "about"}
    assert own | set(TicketConfig.model_fields) <= names
    small = ("--epochs", "1", "--warmup", "0", "--prune", "0.9", "--no-baseline", "--learn-bn")
    works("search", *small, "--set", "model=mptify:conv2_x0.25", "--out", tmp_path / "run")
    recipe = make_recipe(find_recipe(str(tmp_path / "run/recipe.yaml"))[0])
    assert (recipe.epochs, recipe.ticket.prune, recipe.ticket.learn_bn) == (1, 0.9, True)
    assert recipe.batch == make_recipe(find_recipe("digits")[0]).batch
