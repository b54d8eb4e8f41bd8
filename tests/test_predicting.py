"""`mptify predict`: the classes that a ticket sees in pictures."""

import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import mptify
from mptify.cli import app
from mptify.models import conv2
from mptify.training import prediction
from tests.nets import Plain

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
NOTES = {
    "labels": list("abcdefg"),
    "input": {"shape": [3, 32, 32], "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.25]},
}


def run(*arguments):
    return CliRunner().invoke(app, ["predict", *map(str, arguments)])


@pytest.fixture
def picture(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def ticket_file(path, bits):
    ticketed = mptify.transform(conv2(num_classes=7), bits=bits, prune=0.5).eval()
    mptify.save(ticketed, path, "mptify:conv2", arguments={"num_classes": 7}, notes=NOTES)
    return path


@pytest.fixture
def ticket(tmp_path):
    return ticket_file(tmp_path / "a.ticket", "1/1")


@pytest.mark.parametrize("runtime", [[], ["--runtime", "packed"], ["--runtime", "float"]])
def test_binary_tickets_predict_in_either_runtime(ticket, picture, runtime):
    """Which classes is a matter of the last bit: a fresh binary network is all thresholds."""
    result = run(ticket, picture, "--json", *runtime)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(set(found["labels"]) & set("abcdefg")) == 5
    assert sorted(found["chances"], reverse=True) == found["chances"]


def test_the_likeliest_classes_come_first(picture, tmp_path):
    ticket = ticket_file(tmp_path / "a.ticket", "1/32")
    result = run(ticket, picture, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    pixels = torch.from_numpy(np.array(Image.open(picture))).permute(2, 0, 1).float() / 255
    mean, deviation = (torch.tensor(NOTES["input"][key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        chances = mptify.load(ticket)(((pixels - mean) / deviation)[None]).softmax(1)[0]
    best = chances.topk(5)
    assert found["labels"] == ["abcdefg"[i] for i in best.indices]
    assert found["chances"] == pytest.approx(best.values.tolist(), rel=1e-3)
    assert found["ms"] > 0


def test_a_person_reads_percents(ticket, picture):
    output = run(ticket, picture, picture, "--top", "2").output
    assert output.count("a.png") == 2
    assert output.count(" %  ") == 4


@pytest.mark.parametrize(("slow", "chosen"), [(3, 1), (1, 3)])
def test_as_many_threads_as_are_fastest(slow, chosen, monkeypatch):
    """Threads that wait for a core of others make a network slower, not faster."""
    clock = itertools.count()
    monkeypatch.setattr(prediction.time, "perf_counter", lambda: next(clock))

    def network(image):
        for _ in range(9 if torch.get_num_threads() == slow else 1):
            next(clock)

    torch.set_num_threads(3)
    assert prediction._fastest(network, None) == chosen
    assert torch.get_num_threads() == 3


def test_the_callers_threads_are_the_callers(ticket, picture):
    torch.set_num_threads(3)
    for _ in prediction.predict(ticket, [picture, picture], threads=2):
        assert torch.get_num_threads() == 3


def test_of_a_folder_the_images_are_asked_for(ticket, tmp_path):
    assert f"{tmp_path}: is a folder; name its images: {tmp_path}/*." in str(
        run(ticket, tmp_path).exception
    )


def test_what_can_not_be_read_is_told_first(ticket, picture, tmp_path):
    (tmp_path / "b.png").write_text("no picture")
    result = run(ticket, picture, tmp_path / "b.png")
    assert "b.png: this image can't be read" in str(result.exception)
    assert not result.stdout
    mptify.save(mptify.transform(Plain(), bits="1/32"), tmp_path / "c.ticket")
    assert "there are 'float' and 'packed'" in str(
        run(ticket, picture, "--runtime", "fast").exception
    )
    assert "no registry knows" in str(run(tmp_path / "c.ticket", picture).exception)
