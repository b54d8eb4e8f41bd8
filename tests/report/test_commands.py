"""The commands on a report's page lead to the same recipe and the same ticket."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mptify
from mptify.cli import app
from mptify.cli.search_recipe import recipe_from_options
from mptify.config import make_recipe
from mptify.report.commands import convert_command, search_command

NARROW = "mptify:conv2_x0.25"


@pytest.mark.parametrize(
    "settings",
    [
        {"ticket": {"bits": "1/1"}, "lr": 1e-05, "precision": "bf16", "trackers": ["tensorboard"]},
        {
            "method": "edgepopup",
            "optimizer": "sgd",
            "nesterov": True,
            "clip": 0.5,
            "data": {"source": "arrays:my file.npz", "flip": True},
        },
        {
            "ticket": {
                "prune": 0.8,
                "prune_overrides": {"layer1.*": 0.25, "*'$(ls)": 0.5},
                "include": ["a b", "c"],
            },
            "checkpoint_steps": 3,
        },
        {"baseline": {}, "epochs": 2, "ticket": {"prune": 0.7, "bn": "insert"}},
        {"baseline": {"epochs": 3, "lr": 0.1}, "lr": 0.03, "start": "on/last.ticket", "decays": []},
    ],
)
def test_any_recipe_comes_back_from_its_command(settings):
    recipe = make_recipe({"model": "mptify:conv4", "data": "digits", **settings})
    assert as_searched(search_command(recipe, Path("a b"))) == recipe


def as_words(command):
    """What a shell makes of it, without the name of the program."""
    return shlex.split(command.replace("\\\n", ""))[1:]


def as_searched(command):
    """The recipe that `mptify search` would make of its own command line."""
    words = as_words(command)[1:]
    options = [
        (words[place], words[place + 1])
        for place in range(1, len(words))
        if words[place] in ("--set", "--data")
    ]
    changes = [text for name, text in options if name == "--set"]
    baseline = True if "--baseline" in words else None
    return recipe_from_options(words[0], None, dict(options)["--data"], {}, changes, baseline)


def test_the_convert_command_makes_the_same_ticket(tmp_path):
    options = [
        "--bits",
        "1/1",
        "--prune",
        "0.75",
        "--prune-overrides",
        "classifier.*=0.5",
        "--residual",
        "real",
        "--seed",
        "3",
        "--learn-bn",
    ]
    file = tmp_path / "cut.ticket"
    sizes = ["--num-classes", "7", "--in-chans", "1", "--input-size", "8"]
    CliRunner().invoke(
        app, ["convert", NARROW, *options, *sizes, "--out", str(file), "--standalone", "--float16"]
    )
    CliRunner().invoke(app, as_words(convert_command(mptify.read(file), tmp_path / "again.ticket")))
    assert mptify.read(tmp_path / "again.ticket") == mptify.read(file)
