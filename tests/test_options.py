"""Options that are generated from a config."""

from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from mptify.cli import app
from mptify.cli.options import with_options_of
from mptify.config import TicketConfig
from mptify.errors import BadConfig


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
def make(word: Annotated[str, typer.Argument()], settings: dict[str, Any], out: Annotated[str, typer.Option()] = "a") -> None:
    seen.append((word, settings, out))


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ([], {}),
        (["--size", "5", "--kind", "square"], {"size": 5, "kind": "square"}),
        (["--names", "a", "--names", "b"], {"names": ("a", "b")}),
        (["--shares", "layer.*=0.5", "--shares", "a=b=1"], {"shares": {"layer.*": 0.5, "a=b": 1.0}}),
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
    assert str(result.exception) == f"--shares {text!r}: write PATTERN=VALUE, for instance 'layer1.*=0.5'."


def test_convert_takes_every_setting_of_a_ticket():
    command = typer.main.get_command(app).commands["convert"]
    options = {parameter.name: parameter for parameter in command.params}
    assert set(TicketConfig.model_fields) < set(options)
    assert options["prune"].default == TicketConfig().prune
