"""The recipes that come with mptify: they say what the paper prints, and each runs."""

import json
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mptify.cli import app
from mptify.cli.recipes_run import recipe_info, recipe_table
from mptify.config import make_recipe
from mptify.errors import BadConfig
from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.nn.layers import Ticketed
from mptify.recipe_files import find_recipe, recipe_names, recipe_text, with_settings
from mptify.surgery.trainable import parameter_kinds
from mptify.training import Callback, loop, search
from mptify.training.methods import base
from mptify.training.schedule import learning_rate
from mptify.training.setup import architecture_of, build_network
from mptify.training.sources import load_data

PAPERS = [name for name in recipe_names() if name != "digits"]


def recipe(name, *changes):
    settings, origin = find_recipe(name)
    return make_recipe(with_settings(settings, changes), origin)


# -- what the paper prints -------------------------------------------------------------------------------------------------

SGD, ADAM = "sgd", "adam"
PRINTED = {  # tables 5, 6 and 7: optimizer, learning rate, momentum, weight decay, batch, epochs
    **{f"conv{depth}_mpt_1_32": (SGD, 0.1, 0.9, 1e-4, 128, 250) for depth in (2, 4, 6, 8)},
    **{f"conv{depth}_mpt_1_1": (ADAM, 0.1, None, 1e-4, 128, 250) for depth in (2, 4, 6, 8)},
    **{
        f"conv{depth}_dense": (ADAM, 0.0003, None, None, 60, 100) for depth in (2, 4, 6, 8)
    },  # appendix A.1, in words
    "resnet18_mpt_1_32": (SGD, 0.1, 0.9, 5e-4, 256, 250),
    "resnet18_mpt_1_32_bn": (SGD, 0.1, 0.9, 5e-4, 256, 250),
    "vgg_small_mpt_1_1": (ADAM, 3.63e-3, None, 17.335, 128, 600),
    "vgg_small_mpt_1_1_bn": (ADAM, 3.63e-3, None, 1e-4, 128, 600),
    "wrn50_mpt_1_32": (SGD, 0.256, 0.875, 3.051757812e-5, 256, 120),
    "wrn50_mpt_1_32_bn": (SGD, 0.256, 0.875, 3.051757812e-5, 256, 120),
    "wrn34_mpt_1_1": (ADAM, 2.56e-4, None, 3.051757812e-5, 256, 250),
    "wrn34_mpt_1_1_bn": (ADAM, 2.56e-4, None, 3.051757812e-5, 256, 250),
}
TOP1 = {  # tables 1 to 4 and 8: top-1, parameters, fraction pruned
    "resnet18_dense": (93.02, "11.2 M", None), "resnet18_mpt_1_32": (94.66, "2.2 M", 0.8), "resnet18_mpt_1_32_bn": (94.8, "2.2 M", 0.8),
    "vgg_small_dense": (93.6, "4.6 M", None), "vgg_small_mpt_1_1": (88.52, "1.44 M", 0.75), "vgg_small_mpt_1_1_bn": (91.9, "1.44 M", 0.75),
    "vgg_small_mpt_1_32": (91.48, "0.23 M", 0.95), "resnet34_dense": (73.27, "21.8 M", None), "wrn50_mpt_1_32": (72.67, "13.7 M", 0.8),
    "wrn50_mpt_1_32_bn": (74.03, "13.7 M", 0.8), "wrn34_mpt_1_1": (45.06, "19.3 M", 0.6), "wrn34_mpt_1_1_bn": (52.07, "19.3 M", 0.6),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_a_recipe_has_the_values_of_appendix_a(name):
    optimizer, lr, momentum, decay, batch, epochs = PRINTED[name]
    found = recipe(name)
    assert (found.optimizer, found.lr, found.batch, found.epochs) == (optimizer, lr, batch, epochs)
    assert found.momentum == (0.9 if momentum is None else momentum)
    assert found.weight_decay == (decay or 0.0)
    assert found.schedule == "cosine"


@pytest.mark.parametrize("name", TOP1)
def test_a_recipe_names_the_papers_figures(name):
    top1, parameters, prune = TOP1[name]
    found = recipe(name)
    assert (found.about["top1"], found.about["parameters"]) == (top1, parameters)
    assert prune is None or found.ticket.prune == prune


def test_no_row_of_the_tables_is_missing_and_none_is_invented():
    assert {name for name in PAPERS if recipe(name).about["top1"] is not None} == set(TOP1)
    assert set(PAPERS) == set(TOP1) | set(PRINTED)


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipes_name_says_what_is_in_it(name):
    found = recipe(name)
    network, _, mode = name.partition("_mpt_") if "_mpt_" in name else name.rpartition("_")
    assert (found.method == "dense") == (mode == "dense")
    assert found.ticket.learn_bn == name.endswith("_bn")
    assert mode == "dense" or found.ticket.bits.replace("/", "_") == mode.removesuffix("_bn")
    assert network.replace("wrn", "wide_resnet") in found.model


@pytest.mark.parametrize("name", PAPERS)
def test_what_holds_for_all_of_them(name):
    """Section A.2: warm-up, label smoothing and signed constants are ImageNet's; and nothing here is our own invention."""
    found = recipe(name)
    imagenet = found.data.source == "imagenet"
    ticket = found.method != "dense"
    assert found.warmup == (5 if imagenet and ticket else 0)
    assert found.label_smoothing == (0.1 if imagenet and ticket else 0)
    assert found.ticket.init == (
        "signed_constant"
        if imagenet and ticket and found.ticket.bits == "1/32"
        else "kaiming_normal"
    )
    assert (found.data.crop, found.data.flip, found.data.size) == (
        (0, False, 224) if imagenet else (4, True, None)
    )
    if ticket and found.optimizer == "adam":
        assert (found.relative, found.decays) == (False, ())
    budget = found.about["budget"]
    assert budget["images"] == (1_281_167 if imagenet else 50_000)
    assert (budget["epochs"], budget["steps"]) == (
        found.epochs,
        found.epochs * -(-budget["images"] // found.batch),
    )


def test_an_odd_value_has_a_comment():
    line = next(
        line
        for line in recipe_text("vgg_small_mpt_1_1").splitlines()
        if line.startswith("weight_decay")
    )
    assert "this is what the paper prints" in line


# -- each of them runs -----------------------------------------------------------------------------------------------------


class Enough(Exception):
    """Two steps were made."""


class TwoSteps(Callback):
    def on_step_end(self, search, metrics):
        if search.step == 2:
            raise Enough


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Where fake images for a recipe are: some in an .npz file, some as files in folders, as ImageNet has them."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("fake")
    random = np.random.default_rng(0)
    pixels, labels = random.integers(0, 256, (8, 16, 16, 3), dtype=np.uint8), np.arange(8) % 4
    np.savez(folder / "images.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    for split in ("train", "val"):
        for number in range(4):
            place = folder / "imagenet" / split / f"class{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(
                place / f"{number}.png"
            )
    return {
        "cifar10": f"arrays:{folder / 'images.npz'}",
        "imagenet": f"imagenet:{folder / 'imagenet'}",
    }


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_runs_two_steps_and_what_it_says_arrives(name, places, monkeypatch):
    """The recipe as it is, on fewer and smaller images: its network is built, its optimizer moves what should move."""
    asked = recipe(name)
    small = (
        ["batch=2", "data.size=64", "data.workers=0"]
        if asked.data.source == "imagenet"
        else ["batch=4"]
    )
    found = recipe(name, f"data.source={places[asked.data.source]}", *small)
    train, val = load_data(found.data)
    assert (train.crop, train.flip) == (asked.data.crop, asked.data.flip)
    with (
        InitMode("constant") if asked.method != "dense" else nullcontext()
    ):  # surgery draws weights of its own
        network = build_network(architecture_of(registry.resolve(found.model), train), found)

    seen = {"smoothing": set()}
    make_optimizer, loss_of = loop.make_optimizer, base.loss_of

    def watched_optimizer(model, config):
        seen["model"], seen["optimizer"] = model, make_optimizer(model, config)
        seen["before"] = {
            key: value.detach().clone()
            for key, value in model.named_parameters()
            if value.requires_grad
        }
        return seen["optimizer"]

    def watched_loss(output, labels, smoothing):
        seen["smoothing"].add(smoothing)
        return loss_of(output, labels, smoothing)

    monkeypatch.setattr(loop, "make_optimizer", watched_optimizer)
    monkeypatch.setattr(base, "loss_of", watched_loss)
    with pytest.raises(Enough):
        search(network, train, val, found, callbacks=[TwoSteps()])

    model, optimizer, kinds = seen["model"], seen["optimizer"], parameter_kinds(seen["model"])
    _require_settings(asked, found, optimizer, model, kinds, len(train))
    assert seen["smoothing"] == {asked.label_smoothing}
    moved = {
        key
        for key, before in seen["before"].items()
        if not torch.equal(model.get_parameter(key).detach(), before)
    }
    learned = (
        {"dense", "norm", "other"}
        if asked.method == "dense"
        else {"scores", *(["norm"] if asked.ticket.learn_bn else [])}
    )
    assert {kinds[key] for key in moved} == learned - {
        kind for kind in learned if kind not in kinds.values()
    }
    main = "dense" if asked.method == "dense" else "scores"
    assert all(key in moved for key, kind in kinds.items() if kind == main)
    for layer in model.modules():
        if isinstance(layer, Ticketed):
            assert layer.kept == layer.count - round(layer.count * asked.ticket.prune)


def _require_settings(asked, found, optimizer, model, kinds, images):
    assert isinstance(optimizer, torch.optim.SGD if asked.optimizer == "sgd" else torch.optim.Adam)
    assert optimizer.defaults["lr"] == asked.lr
    last = learning_rate(asked, 1.5 / (images / found.batch))
    kind_of = {id(parameter): kinds[key] for key, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(last)
        assert (
            group["momentum"] if asked.optimizer == "sgd" else group["betas"][0]
        ) == asked.momentum
        for parameter in group["params"]:
            kind = kind_of[id(parameter)]
            kind = "bias" if kind == "dense" and parameter.dim() <= 1 else kind
            assert group["weight_decay"] == (asked.weight_decay if kind in asked.decays else 0.0)


# -- mptify recipes --------------------------------------------------------------------------------------------------------


def test_the_list_has_every_recipe_with_the_papers_figure():
    listed = json.loads(_run("--json").stdout)
    assert [facts["name"] for facts in listed] == recipe_names()
    found = next(facts for facts in listed if facts["name"] == "vgg_small_mpt_1_1_bn")
    assert (found["model"], found["bits"], found["prune"], found["learn_bn"]) == (
        "mptify:vgg_small_x1.25",
        "1/1",
        0.75,
        True,
    )
    assert (found["about"]["top1"], found["about"]["reproduces"]) == (91.9, ["table 2", "table 9"])
    lines = _run().output.splitlines()
    assert lines[0].split() == ["recipe", "network", "bits", "pruned", "reproduces", "top-1"]
    assert (
        next(line for line in lines if line.startswith("resnet34_dense")).split("  ")[-1].strip()
        == "73.27"
    )


@pytest.mark.parametrize("width", [50, 60, 79, 80, 100])
def test_the_list_fits_a_terminal(width):
    from rich.console import Console

    out = Console(width=width, color_system=None)
    with out.capture() as capture:
        out.print(recipe_table([recipe_info(name, recipe(name)) for name in recipe_names()], width))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert max(map(len, lines)) <= width
    for name in recipe_names():
        assert any(name in line for line in lines)
    assert len(lines) <= len(recipe_names()) + 2  # a heading, and one recipe that has more to say
    assert "…" not in capture.get()


def test_one_recipe_is_printed_as_it_is_with_its_command(tmp_path):
    printed = _run("wrn34_mpt_1_1").output
    assert printed.startswith(recipe_text("wrn34_mpt_1_1").rstrip())
    assert (
        printed.splitlines()[-1] == "# mptify search --recipe wrn34_mpt_1_1 --data imagenet:FOLDER"
    )
    (tmp_path / "mine.yaml").write_text(printed)
    assert make_recipe(*find_recipe(str(tmp_path / "mine.yaml"))) == recipe("wrn34_mpt_1_1")
    assert json.loads(_run("conv4_mpt_1_1", "--json").stdout)["settings"]["lr"] == 0.1
    assert _run("digits").output.splitlines()[-1] == "# mptify search --recipe digits"


def test_a_wrong_name_is_told_in_one_sentence_with_the_nearest():
    result = _run("vgg_smal_dense")
    assert isinstance(result.exception, BadConfig)
    assert (
        str(result.exception)
        == "There is no recipe 'vgg_smal_dense'; did you mean 'vgg_small_dense'?"
    )
    assert str(_run("qqqq").exception) == "There is no recipe 'qqqq'; `mptify recipes` lists them."


def test_the_list_is_plain_in_a_pipe():
    result = subprocess.run(
        [sys.executable, "-m", "mptify", "recipes"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert len(result.stdout.splitlines()) == 1 + len(recipe_names())


def _run(*arguments):
    return CliRunner().invoke(app, ["recipes", *arguments])
