"""inspect, verify, diff, card and convert --out, as a person meets them."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest
import yaml
from typer.testing import CliRunner

import mptify
from mptify.cli import app
from mptify.errors import MptifyError
from mptify.ticket.card import model_card
from mptify.ticket.state import read_both
from mptify.ticket.ticket_summary import summarize

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


def run(*arguments):
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if isinstance(result.exception, MptifyError):
        return result
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tickets")
    for seed in (0, 1):
        run(
            "convert",
            "timm:test_vit",
            "--bits",
            "1/1",
            "--prune",
            "0.8",
            "--num-classes",
            "7",
            "--seed",
            seed,
            "--out",
            folder / f"{seed}.ticket",
        )
    return [folder / f"{seed}.ticket" for seed in (0, 1)]


def test_convert_writes_a_ticket_that_every_other_command_takes(files):
    ticket = mptify.read(files[0])
    assert str(ticket.architecture) == "timm:test_vit"
    assert ticket.architecture.arguments == {"num_classes": 7}
    assert mptify.load(files[0]).num_classes == 7


def test_what_is_learned_starts_as_the_network_starts_it_not_at_a_filler(tmp_path):
    """`convert` skips the initialisation of large weights that surgery draws anew; a file must not show that."""
    run("convert", "timm:vit_tiny_patch16_224", "--out", tmp_path / "a.ticket")
    position = mptify.read(tmp_path / "a.ticket").floats["pos_embed"]
    assert position.std() > 0.01


def test_float16_says_what_it_costs(tmp_path):
    result = run("convert", "timm:test_vit", "--float16", "--out", tmp_path / "half.ticket")
    share = float(re.search(r"outputs differ by ([\d.e-]+) %", result.output).group(1))
    assert 0 < share < 1


def test_inspect_shows_layers_and_how_the_ticket_was_made(files):
    output = run("inspect", files[0]).output
    assert "blocks.0.attn.qkv" in output
    assert "timm:test_vit, num_classes=7" in output
    assert "bits=1/1, prune=0.8, seed=0" in output
    assert re.search(r"masks +[\d,]+ bytes, +\d+\.\d\d % of", output)


def test_inspect_speaks_json_and_csv(files):
    summary = json.loads(run("inspect", files[0], "--json").stdout)
    assert summary["digest"] == mptify.read(files[0]).digest
    rows = list(csv.DictReader(io.StringIO(run("inspect", files[0], "--csv").stdout)))
    assert [row["name"] for row in rows] == [layer["name"] for layer in summary["layers"]]
    assert sum(int(row["kept"]) for row in rows) == summary["kept"]


def test_inspect_draws_the_masks(files, tmp_path):
    run("inspect", files[0], "--png", tmp_path / "masks.png")
    assert (tmp_path / "masks.png").read_bytes().startswith(b"\x89PNG")


def test_verify_says_the_same_twice(files):
    first = run("verify", files[0]).output
    assert mptify.read(files[0]).digest in first
    assert run("verify", files[0]).output == first
    assert run("verify", files[1]).output != first


def test_diff_finds_what_chance_leaves_in_common(files):
    overlaps = json.loads(run("diff", *files, "--json").stdout)
    assert not overlaps["equal"]
    assert all(abs(layer["share"] - 0.2) < 0.15 for layer in overlaps["layers"])
    assert "The tickets are equal." in run("diff", files[0], files[0]).output
    assert "different seeds" in run("diff", *files).output


def test_a_card_has_the_header_that_the_hub_reads(files, tmp_path):
    ticketed = mptify.load(files[0])
    mptify.save(
        ticketed,
        tmp_path / "a.ticket",
        "timm:test_vit",
        arguments={"num_classes": 7},
        notes={"data": "cifar10", "accuracy": 0.5},
    )
    run("card", tmp_path / "a.ticket", "--out", tmp_path / "README.md")
    _, header, page = (tmp_path / "README.md").read_text().split("---\n", 2)
    metadata = yaml.safe_load(header)
    assert metadata["library_name"] == "mptify"
    assert metadata["datasets"] == ["uoft-cs/cifar10"]
    assert metadata["model-index"][0]["results"][0]["metrics"] == [
        {"type": "accuracy", "value": 0.5}
    ]
    assert 'mptify.load("a.ticket")' in page
    assert "exists" in str(
        run("card", tmp_path / "a.ticket", "--out", tmp_path / "README.md").exception
    )


@pytest.mark.parametrize(
    ("architecture", "task"),
    [("timm:test_vit", "image-classification"), ("torchvision:fcn_resnet50", "image-segmentation"), ("torchvision:raft_small", None),
     ("torchvision:ssd300_vgg16", "object-detection"), ("torchvision:r3d_18", "video-classification"), (None, "image-classification")],
)  # fmt: skip
def test_a_card_names_the_task_as_the_hub_does(files, architecture, task):
    summary = replace(
        summarize(*read_both(files[0])),
        architecture=architecture,
        notes={"data": "cifar10", "accuracy": 0.5},
    )
    metadata = yaml.safe_load(model_card(summary, "a.ticket", "mit").split("---\n", 2)[1])
    assert metadata.get("pipeline_tag") == task
    assert ("model-index" in metadata) == (task is not None)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("imagefolder:photos", None), ("imagenet:/data/imagenette", None), ("digits", None), ("arrays:a.npz", None), ("photos/cats", None),
        ("timm:folder:photos", None), ("timm:torch/cifar10:data", None), (3, None),
        ("cifar10", "uoft-cs/cifar10"), ("cifar100:data", "uoft-cs/cifar100"),
        ("timm:hfds/timm/oxford-iiit-pet:data", "timm/oxford-iiit-pet"),
    ],
)  # fmt: skip
def test_a_card_invents_neither_a_licence_nor_a_data_set(files, tmp_path, source, expected):
    notes = {"data": source, "accuracy": 0.5}
    mptify.save(
        mptify.load(files[0]),
        tmp_path / "a.ticket",
        "timm:test_vit",
        arguments={"num_classes": 7},
        notes=notes,
    )
    metadata = yaml.safe_load(run("card", tmp_path / "a.ticket").stdout.split("---\n", 2)[1])
    assert "license" not in metadata
    assert metadata.get("datasets") == (None if expected is None else [expected])
    assert ("model-index" in metadata) == (
        expected is not None
    )  # the Hub wants the data set's id there
    if expected is not None:
        assert metadata["model-index"][0]["results"][0]["dataset"] == {
            "name": expected,
            "type": expected,
        }


def test_a_card_says_what_it_is_told(files, tmp_path):
    mptify.save(
        mptify.load(files[0]),
        tmp_path / "a.ticket",
        "timm:test_vit",
        arguments={"num_classes": 7},
        notes={"accuracy": 0.5},
    )
    text = run("card", tmp_path / "a.ticket", "--license", "mit", "--dataset", "me/photos").stdout
    metadata = yaml.safe_load(text.split("---\n", 2)[1])
    assert (metadata["license"], metadata["datasets"]) == ("mit", ["me/photos"])
    for options, words in (
        (["--license", ""], "--license"),
        (["--dataset", "imagefolder:photos"], "imagefolder:photos"),
    ):
        assert words in str(run("card", tmp_path / "a.ticket", *options).exception)


def test_inspect_counts_the_bytes_that_are_in_the_file(files):
    """Not those that this version would write."""
    ticket, data = read_both(files[0])
    summary = summarize(ticket, data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    first, last = header["masks"]["data_offsets"]
    assert summary.mask_bytes == last - first
    assert summary.file_bytes == len(data)
    assert [layer.coded_bytes for layer in summary.layers] == [
        row[-1] for row in json.loads(header["__metadata__"]["mptify"])["layers"]
    ]


@pytest.mark.parametrize("command", ["inspect", "verify", "card"])
def test_a_wrong_file_is_told_in_one_sentence(command, tmp_path):
    (tmp_path / "no.ticket").write_bytes(b"hello")
    assert "safetensors" in str(run(command, tmp_path / "no.ticket").exception)
    assert "can't be read" in str(run(command, tmp_path / "missing").exception)


def test_tickets_of_different_networks_are_not_compared(files, tmp_path):
    run("convert", "timm:test_resnet", "--out", tmp_path / "b.ticket")
    assert "no such layer" in str(run("diff", files[0], tmp_path / "b.ticket").exception)


def test_of_a_folder_its_ticket_is_named(files, tmp_path):
    assert "is a folder, not a ticket" in str(run("inspect", tmp_path).exception)
    (tmp_path / "best.ticket").write_bytes(files[0].read_bytes())
    assert f"its ticket is {tmp_path / 'best.ticket'}" in str(run("verify", tmp_path).exception)


def test_a_folder_that_can_not_be_written_is_told_before_the_work(tmp_path):
    result = run("convert", "timm:test_vit", "--out", tmp_path / "no" / "a.ticket")
    assert "does not exist" in str(result.exception)
