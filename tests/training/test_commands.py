"""`mptify search` and `mptify eval`, as a person meets them."""

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from sklearn.datasets import load_digits

import mptify
from mptify.cli.console import Unwrapped, print_fields
from mptify.cli.inspect_run import layer_table
from mptify.cli.search_run import suggested_change
from mptify.config import make_recipe
from mptify.errors import MptifyError
from mptify.models import conv2
from mptify.recipe_files import find_recipe
from mptify.ticket.state import read_both
from mptify.ticket.ticket_summary import summarize
from mptify.training import sources
from mptify.training.evaluation import Evaluation
from tests.helpers.cli import run, works

QUICK = ["--set", "epochs=1", "--set", "data.train_images=200", "--no-baseline"]
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_arguments_a_ticket_and_its_baseline_are_found(here):
    output = works("search", "--set", "epochs=3").output
    assert re.search(r"accuracy +\d+\.\d\d % after the last epoch", output)
    assert re.search(r"dense +\d+\.\d\d % after the last epoch", output)
    assert re.search(r"kept +73,536 of 367,680 random weights", output)
    assert "mptify inspect runs/conv2-digits/last.ticket" in output
    ticket = mptify.read("runs/conv2-digits/last.ticket")
    assert str(ticket.architecture) == "mptify:conv2"
    assert ticket.notes["data"] == "digits"
    for command in ("inspect", "verify", "card"):
        works(command, "runs/conv2-digits/last.ticket")
    found = json.loads(works("eval", "runs/conv2-digits/last.ticket", "--json").output)
    assert found["top1"] == ticket.notes["accuracy"]
    assert found["images"] == 359
    assert re.search(
        r"top-1 \d+\.\d\d %, top-5 \d+\.\d\d %, loss",
        works("eval", "runs/conv2-digits/last.ticket").output,
    )


def test_a_second_run_takes_a_new_folder_and_a_named_one_is_left_alone(here):
    works("search", *QUICK)
    works("search", *QUICK)
    assert {path.name for path in (here / "runs").iterdir()} == {"conv2-digits", "conv2-digits-2"}
    result = run("search", *QUICK, "--out", "runs/conv2-digits")
    assert isinstance(result.exception, MptifyError)
    assert "already holds a finished run" in str(result.exception)


def test_a_search_goes_on_from_a_ticket(here):
    """With its survivors, its settings and its network."""
    works("search", *QUICK, "--set", "ticket.prune=0.7", "--set", "ticket.seed=4")
    first = mptify.read("runs/conv2-digits/last.ticket")
    works(
        "search",
        "runs/conv2-digits/last.ticket",
        "--data",
        "digits",
        *QUICK,
        "--set",
        "lr=1e-9",
        "--out",
        "on",
    )
    second = mptify.read("on/last.ticket")
    assert second.config == first.config
    for name, layer in first.layers.items():
        assert np.array_equal(layer.mask, second.layers[name].mask)
    assert second.notes["accuracy"] == pytest.approx(
        first.notes["accuracy"], abs=0.1
    )  # statistics come along too
    works("search", "--recipe", "on/recipe.yaml", "--out", "again")
    assert mptify.read("again/last.ticket").layers.keys() == first.layers.keys()


def test_a_ticket_of_one_threshold_is_gone_on_from(here):
    works("search", *QUICK, "--set", "ticket.scope=global")
    first = mptify.read("runs/conv2-digits/last.ticket")
    works("search", "runs/conv2-digits/last.ticket", *QUICK, "--set", "lr=1e-9", "--out", "on")
    for name, layer in mptify.read("on/last.ticket").layers.items():
        assert (layer.mask == first.layers[name].mask).mean() > 0.999


def test_eval_normalizes_as_the_search_did(here):
    works("search", *QUICK)
    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    held = np.random.RandomState(0).permutation(1797)[:359]
    np.savez(
        "dark.npz",
        x_train=pixels[:50] // 4,
        y_train=digits.target[:50],
        x_test=pixels[held],
        y_test=digits.target[held],
    )
    found = [
        works("eval", "runs/conv2-digits/last.ticket", "--json", *more).output
        for more in ([], ["--data", "arrays:dark.npz"])
    ]
    alone, other = (json.loads(text) for text in found)
    assert alone["top1"] == other["top1"]


def test_a_search_from_a_searched_ticket_takes_its_recipe(here):
    works("search", *QUICK, "--set", "batch=50")
    works("search", "runs/conv2-digits/last.ticket", "--out", "on")
    notes = mptify.read("on/last.ticket").notes["recipe"]
    assert (notes["batch"], notes["data"]["train_images"], notes["ticket"]["bn"]) == (
        50,
        200,
        "insert",
    )


def test_a_ticket_of_other_weights_is_not_gone_on_from(here):
    """A file holds the survivors of weights that no seed says, and not the others."""
    built = {"in_chans": 1, "input_size": 8}
    torch.manual_seed(5)  # the search builds its network from the ticket's seed
    mptify.save(
        mptify.transform(conv2(**built), init="keep"),
        "kept.ticket",
        "mptify:conv2",
        arguments=built,
    )
    assert "a search cannot continue from this ticket" in str(
        run("search", "kept.ticket", "--data", "digits", *QUICK).exception
    )


def test_what_the_network_saw_is_in_the_ticket(here):
    """Enough to use it without mptify's data: pixels from 0 to 1, less the mean, over the deviation."""
    works("search", *QUICK)
    ticket = mptify.read("runs/conv2-digits/last.ticket")
    seen = ticket.notes["input"]
    assert seen["shape"] == [1, 8, 8]
    digits = load_digits()
    held = np.random.RandomState(0).permutation(1797)[:359]
    pixels = torch.tensor(
        np.round(digits.images * (255 / 16))[held, None] / 255, dtype=torch.float32
    )
    model = mptify.load("runs/conv2-digits/last.ticket")
    right = (
        model((pixels - seen["mean"][0]) / seen["std"][0]).argmax(1).numpy() == digits.target[held]
    ).mean()
    assert right == pytest.approx(ticket.notes["accuracy"], abs=0.006)


def test_inspect_keeps_the_layers_names_in_a_narrow_terminal(here):
    works("search", *QUICK)
    summary = summarize(*read_both("runs/conv2-digits/last.ticket"))
    for width in (50, 60, 80, 100, 140):
        out = Console(width=width, file=io.StringIO())
        out.print(layer_table(summary, width))
        text = out.file.getvalue()
        assert "classifier.1" in text
        assert "13,107" in text


def test_inspect_says_what_a_person_wants_to_know_of_the_search(here):
    works("search", *QUICK)
    accuracy = mptify.read("runs/conv2-digits/last.ticket").notes["accuracy"]
    facts = dict(
        re.findall(
            r"^(\w+) +(.+)$", works("inspect", "runs/conv2-digits/last.ticket").output, re.MULTILINE
        )
    )
    assert facts["accuracy"] == f"{100 * accuracy:.2f} %"
    assert (
        facts["recipe"]
        == "epochs=1, threads=1, data.crop=1, data.train_images=200 (--json shows all)"
    )
    assert facts["input"].startswith('{"mean": [0.30')
    assert len(facts["input"]) < 70


def test_facts_wrap_where_words_end_and_commands_stay_whole():
    out = Console(width=40, file=io.StringIO(), force_terminal=True, color_system=None)
    path = "runs/a b/" + "a" * 50 + "/last.ticket"
    print_fields(
        out,
        [
            ("accuracy", "98 % after the last epoch, 99 % at best"),
            ("ticket", Unwrapped(path)),
            ("next", Unwrapped(f"mptify inspect {path} --json")),
        ],
    )
    assert out.file.getvalue().splitlines() == [
        "accuracy  98 % after the last epoch, 99",
        "          % at best",
        f"ticket    {path}",
        f"next      mptify inspect {path} --json",
    ]


def test_a_recipe_says_how_many_threads_unless_the_command_does(here, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    works("search", *QUICK)
    assert asked == [1]
    works("search", *QUICK, "--threads", 2, "--out", "two")
    assert asked == [1, 2]


def test_of_few_classes_there_is_no_top_five():
    assert "top-5" not in Evaluation(9, 0.5, 1.0, 0.1, 1.0).in_words(5)
    assert "top-5 100.00 %" in Evaluation(9, 0.5, 1.0, 0.1, 1.0).in_words(6)


def test_a_converted_ticket_is_searched_from_its_first_mask(here):
    works(
        "convert",
        "mptify:conv2",
        "--in-chans",
        1,
        "--input-size",
        8,
        "--prune",
        0.9,
        "--out",
        "first.ticket",
    )
    works("search", "first.ticket", "--data", "digits", *QUICK, "--out", "on")
    assert mptify.read("on/last.ticket").config.prune == 0.9


def test_a_folder_of_photos_makes_a_ticket_of_a_timm_model(here):
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            (here / "photos" / part / label).mkdir(parents=True)
            for number in range(4):
                Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(
                    here / f"photos/{part}/{label}/{number}.png"
                )
    settings = [
        "--set",
        "data.size=64",
        "--set",
        "data.workers=0",
        "--set",
        "epochs=1",
        "--set",
        "batch=4",
    ]
    works("search", "timm:test_resnet", "--data", "imagefolder:photos", *settings, "--out", "run")
    assert mptify.read("run/last.ticket").notes["labels"] == ["cat", "dog"]
    works("eval", "run/last.ticket")
    (here / "photos/train").rename(here / "elsewhere")  # only what is judged on is needed
    works("eval", "run/last.ticket", "--data", "imagefolder:photos", "--set", "val_images=3")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["search", "resnet81", "--data", "digits"], "There is no model 'resnet81'"),
        (["search", "none.ticket"], "none.ticket: there is no such file"),
        (
            ["search", "timm:zzzz", "--data", "digits"],
            "There is no model 'timm:zzzz'; `mptify zoo --list` shows all names",
        ),
        (["search", "epochs=6"], "epochs=6 is not a network; --set epochs=6 changes a setting"),
        (
            ["search", "--set", "epochs=two"],
            "unable to parse string as an integer. What it sets: Passes over the training data.",
        ),
        (["search", "--recipe", "digit"], "did you mean 'digits'?"),
        (["search", "--set", "lrr=1"], "digits: There is no setting 'lrr'; did you mean 'lr'?"),
        (["search", "--set", "ticket.prune=1"], "digits: ticket.prune=1: should be less than 1"),
        (["search", "--set", "lr"], "write key=value"),
        (["search", "--data", "digits"], "model is missing: which network?"),
        (["search", "resnet18"], "data is missing: which images?"),
        (["search", "--data", "imagefolder", "resnet18"], "which folder? Write imagefolder:FOLDER"),
        (["search", "--out", "."], "is not empty, and a run needs an empty folder"),
        (["search", "resnet18", "--data", "imagefolder:nowhere"], "there is no folder 'nowhere'"),
        (
            ["search", "resnet18", "--data", "digits", "--set", "ticket.exclude=layer9*"],
            "matches no layer of this model",
        ),
        (["search", "--resume"], "runs holds no unfinished run"),
        (
            ["search", "--resume", "--set", "lr=1"],
            "--resume takes all settings from the folder of the run; leave out all options but",
        ),
        (["search", "--resume", "--out", "nowhere"], "nowhere holds no run to resume"),
        (["search", "--set", "trackers=nothing"], "trackers='nothing': Accelerate knows "),
        (["search", "--set", "data.size=32"], "data.size is for images from files"),
        (["eval", "none.ticket"], "can't be read"),
        (
            ["search", "mptify:conv8", "--data", "digits"],
            "images of 8 pixels are too small for 4 max-pools",
        ),
        (["search", "--set", "compile=true", "--set", "prune_ramp=2"], "leave one of them out"),
    ],
)
def test_bad_input_is_told_in_one_sentence_and_leaves_nothing(arguments, words, here):
    (here / "something").write_text("of mine")
    result = run(*arguments)
    assert isinstance(result.exception, MptifyError), (result.output, result.exception)
    assert words in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not (here / "runs").exists()


def test_a_ticket_without_data_asks_for_it(here):
    works("convert", "timm:test_vit", "--out", "a.ticket")
    assert "does not say which data it was searched on; pass --data" in str(
        run("eval", "a.ticket").exception
    )
    assert "can't take images of 1×8×8" in str(
        run("eval", "a.ticket", "--data", "digits").exception
    )


def test_a_signal_to_all_of_a_searchs_processes_saves(here):
    """As `timeout` and schedulers send it: to those that read the images, too."""
    rng = np.random.default_rng(0)
    for part, label in itertools.product(("train", "val"), ("cat", "dog")):
        (here / "photos" / part / label).mkdir(parents=True)
        for number in range(20):
            Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(
                here / f"photos/{part}/{label}/{number}.png"
            )
    settings = [
        f"--set={one}" for one in ("data.size=16", "data.workers=2", "epochs=400", "batch=4")
    ]
    command = [
        sys.executable,
        "-m",
        "mptify",
        "search",
        "mptify:conv2",
        "--data",
        "imagefolder:photos",
        *settings,
        "--out",
        "run",
    ]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    for line in process.stderr:
        if "biprop" in line and "/400" in line:
            break
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "Stopped and saved." in errors
    assert errors.count("Stopping soon") == 1
    recipe = here / "run/recipe.yaml"
    (stopped,) = re.findall(r"epochs: 400\n", recipe.read_text())
    recipe.write_text(
        recipe.read_text().replace(
            stopped, f"epochs: {len((here / 'run/metrics.jsonl').read_text().splitlines()) + 1}\n"
        )
    )
    assert "resumes at epoch" in works("search", "--resume", "--out", "run").output


def test_a_folder_of_a_networks_name_does_not_hide_the_network(here):
    (here / "conv2").mkdir()
    works("search", "conv2", "--data", "digits", *QUICK, "--out", "run")
    assert str(mptify.read("run/last.ticket").architecture) == "mptify:conv2"
    assert "its ticket is run/best.ticket" in str(run("search", "./run").exception)


def test_a_folder_that_is_taken_is_told_before_anything_else(here, monkeypatch):
    works("search", *QUICK, "--out", "run")
    monkeypatch.setattr(sources, "load_data", None)
    again = run("search", *QUICK, "--out", "run")
    assert "run already holds a finished run" in str(again.exception)
    assert not again.output


@pytest.mark.parametrize(("again", "threads"), [([], 2), (["--threads", 3], 3)])
def test_the_threads_of_a_run_are_those_of_its_next_part_unless_given(
    again, threads, here, monkeypatch
):
    works("search", *QUICK, "--threads", 2, "--out", "run")
    (here / "run/summary.json").unlink()
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    works("search", "--resume", "--out", "run", *again)
    assert asked == [threads]


@pytest.mark.parametrize(("accuracy", "change"), [(0.9, "ticket.prune=0.95"), (0.15, "epochs=60")])
def test_more_is_pruned_next_if_classes_are_told_apart_and_else_it_searches_longer(
    accuracy, change
):
    assert suggested_change(make_recipe(*find_recipe("digits")), accuracy, 10) == change


def test_ctrl_c_saves_and_says_how_to_go_on(here):
    """In a process of its own, as a person would: interrupted, then resumed by the command that it prints."""
    command = [
        sys.executable,
        "-m",
        "mptify",
        "search",
        "--no-baseline",
        "--threads",
        "1",
        "--set",
        "epochs=400",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    for line in process.stderr:
        if "biprop" in line and "/400" in line:
            break
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.count("Stopping soon, then saving") == 1
    assert "Stopped and saved. `mptify search --resume --out runs/conv2-digits`" in errors
    (here / "runs/conv2-digits/recipe.yaml").write_text(
        (here / "runs/conv2-digits/recipe.yaml").read_text().replace("epochs: 400", "epochs: 4")
    )
    result = works("search", "--resume")
    assert "resumes at epoch" in result.output
    assert (
        "this run is finished" in works("search", "--resume", "--out", "runs/conv2-digits").output
    )
