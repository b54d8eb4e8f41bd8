"""A ticket's classes are those of its names, wherever and in whatever order a data folder has them."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import mptify
from mptify.errors import BadData
from mptify.report.collect import collect_report
from mptify.report.confusion import measure_confusion
from mptify.ticket.state import write
from mptify.training.data import Images
from mptify.training.labels import with_labels_of
from tests.helpers.cli import run, works

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)  # fmt: skip
COLOURS = {
    "blue": (20, 20, 230),
    "green": (20, 220, 20),
    "red": (230, 20, 20),
    "white": (240, 240, 240),
}


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Photos of four colours, and a run that tells them apart."""
    folder = tmp_path_factory.mktemp("colours")
    rng = np.random.default_rng(0)
    for part, (label, colour) in itertools.product(("train", "val"), COLOURS.items()):
        (folder / "photos" / part / label).mkdir(parents=True)
        for number in range(12):
            pixels = np.clip(np.array(colour) + rng.integers(-20, 20, (16, 16, 3)), 0, 255).astype(
                np.uint8
            )
            Image.fromarray(pixels).save(folder / "photos" / part / label / f"{number}.png")
    settings = [
        f"--set={one}"
        for one in ("data.size=16", "data.workers=0", "epochs=12", "batch=8", "threads=1")
    ]
    works(
        "search",
        "mptify:conv2",
        "--data",
        f"imagefolder:{folder / 'photos'}",
        *settings,
        "--out",
        folder / "run",
    )
    assert mptify.read(folder / "run/last.ticket").notes["accuracy"] > 0.9
    return folder


@pytest.fixture
def photos(searched, tmp_path):
    """A copy to change, in the place where the run left them."""
    shutil.copytree(searched / "photos", tmp_path / "photos")
    shutil.copytree(searched / "run", tmp_path / "run")
    for name in ("recipe.yaml",):
        path = tmp_path / "run" / name
        path.write_text(path.read_text().replace(str(searched), str(tmp_path)))
    return tmp_path


def top1(folder, *more):
    data = f"imagefolder:{folder / 'photos'}"
    found = works("eval", folder / "run/last.ticket", "--data", data, "--json", *more)
    return json.loads(found.output)["top1"]


def test_some_of_the_classes_are_counted_as_what_they_are(photos):
    whole = top1(photos)
    for part in ("train", "val"):
        shutil.rmtree(photos / "photos" / part / "blue")
        shutil.rmtree(photos / "photos" / part / "green")
    assert top1(photos) > 0.8
    assert whole > 0.9


def test_the_same_holds_for_a_data_set_of_timm(photos):
    shutil.rmtree(photos / "photos/val/blue")
    found = works(
        "eval", photos / "run/last.ticket", "--data", f"timm:folder:{photos / 'photos'}", "--json"
    )
    assert json.loads(found.output)["top1"] > 0.8


def test_a_class_that_the_ticket_does_not_know_is_named(photos):
    for old, new in (("blue", "ultramarine"), ("red", "zinnober")):
        (photos / "photos/val" / old).rename(photos / "photos/val" / new)
    shutil.rmtree(photos / "photos/train")
    result = run("eval", photos / "run/last.ticket", "--data", f"imagefolder:{photos / 'photos'}")
    assert isinstance(result.exception, BadData)
    assert "'ultramarine', 'zinnober'" in str(result.exception)
    assert "'blue', 'green', 'red', 'white'" in str(result.exception)
    assert "\n" not in str(result.exception)


def test_the_report_matches_names_too(photos):
    shutil.rmtree(photos / "photos/val/blue")
    matrix = measure_confusion(collect_report(photos / "run"))
    assert matrix.evaluation.top1 > 0.8
    assert matrix.names == tuple(COLOURS)
    assert set(matrix.labels) == {1, 2, 3}
    (photos / "photos/val/red").rename(photos / "photos/val/rouge")
    with pytest.raises(BadData, match="'rouge'"):
        measure_confusion(collect_report(photos / "run"))


def test_without_names_the_classes_are_counted(photos):
    path = photos / "run/last.ticket"
    ticket = mptify.read(path)
    del ticket.notes["labels"]
    write(ticket, path)
    assert top1(photos) > 0.9
    shutil.rmtree(photos / "photos/val/blue")
    result = run("eval", path, "--data", f"imagefolder:{photos / 'photos'}")
    assert "has 3 classes, and the network tells 4 apart" in str(result.exception)


# -- the matching itself ---------------------------------------------------------------------------------------------------


def images(names, labels, classes=None):
    pixels = torch.zeros(len(labels), 1, 4, 4, dtype=torch.uint8)
    return Images(
        torch.tensor(labels),
        classes or len(names),
        pixels,
        mean=(0.0,),
        std=(1.0,),
        names=tuple(names),
    )


def test_another_order_is_put_right():
    found = with_labels_of(
        images(["b", "c", "a"], [0, 1, 2, 0]), {"labels": ["a", "b", "c", "d"]}, 4
    )
    assert found.labels.tolist() == [1, 2, 0, 1]
    assert (found.classes, found.names) == (4, ("a", "b", "c", "d"))


def test_labels_without_names_are_taken_for_the_tickets_numbers():
    given = images([], [0, 1, 2], 3)
    assert with_labels_of(given, {"labels": ["a", "b", "c", "d"]}, 4).labels.tolist() == [0, 1, 2]
    with pytest.raises(BadData, match="has 3 classes, and the network tells 2 apart"):
        with_labels_of(given, {"labels": ["a", "b"]}, 2)


def test_a_name_that_stands_for_two_classes_is_refused_unless_the_order_is_the_same():
    twice = ["crane", "crane", "dog"]
    assert with_labels_of(images(twice, [0, 1, 2]), {"labels": twice}, 3).labels.tolist() == [
        0,
        1,
        2,
    ]
    with pytest.raises(BadData, match="'crane' is the name of two"):
        with_labels_of(images(["dog", "crane"], [0, 1]), {"labels": twice}, 3)


@pytest.mark.parametrize("labels", [None, "abc", [], [1, None], ["a", "b", "c", "d", "e"]])
def test_notes_that_name_no_classes_are_passed_over(labels):
    assert with_labels_of(images(["a", "b"], [0, 1]), {"labels": labels}, 2).labels.tolist() == [
        0,
        1,
    ]
    with pytest.raises(BadData, match="the network tells 3 apart"):
        with_labels_of(images(["a", "b"], [0, 1]), {"labels": labels}, 3)
