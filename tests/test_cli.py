"""The command line as a person meets it: good runs, bad arguments, pipes."""

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

import mptify
from mptify.cli import app
from mptify.models import conv2

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def shell(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "mptify", *arguments], capture_output=True, text=True, **options
    )


def test_convert_prints_every_layer_and_the_totals():
    result = run("convert", "resnet18", "--bits", "1/1", "--prune", "0.75")
    assert result.exit_code == 0
    assert "layer4.1.conv2" in result.output
    assert "589,824" in result.output
    assert "11,678,912 of 11,678,912" in result.output
    assert "pooled features" in result.output
    assert "using torchvision's; timm:resnet18 is timm's" in result.output


def test_convert_speaks_json():
    result = run(
        "convert",
        "timm:resnet10t",
        "--json",
        "--num-classes",
        "7",
        "--in-chans",
        "1",
        "--exclude",
        "fc",
    )
    report = json.loads(result.stdout)
    assert report["model"] == "timm:resnet10t"
    assert report["layers"][0]["shape"][1] == 1
    assert report["left_dense"] == [["fc", 7 * 512, "asked: excluded"]]


def test_convert_takes_other_channels_for_torchvision_too():
    report = json.loads(run("convert", "squeezenet1_1", "--json", "--in-chans", "4").stdout)
    assert report["layers"][0]["shape"] == [64, 4, 3, 3]


def test_convert_draws_a_picture(tmp_path):
    picture = tmp_path / "surgery.svg"
    assert run("convert", "squeezenet1_1", "--bits", "1/1", "--graph", str(picture)).exit_code == 0
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet81"], "There is no model 'resnet81'; the nearest names are resnet"),
        (["timm:resnet19"], "There is no model 'timm:resnet19'; the nearest names are timm:resnet"),
        (["hub:resnet18"], "'hub' is not a source of models"),
        (["resnet18", "--prune", "1.5"], "prune=1.5: should be less than 1"),
        (["resnet18", "--bits", "2/2"], "bits='2/2'"),
        (
            ["resnet18", "--exclude", "layer9*"],
            "exclude='layer9*' matches no layer of this model; it has layer",
        ),
        (["resnet18", "--num-classes", "0"], "num_classes=0: at least 1 is needed"),
        (["resnet18", "--graph", "/nowhere/at/all.svg"], "the folder /nowhere/at does not exist"),
        (["resnet18", "--prune-overrides", "layer1"], "write PATTERN=VALUE"),
        (["timm:vit_tiny_patch16_224", "--input-size", "100", "--prune", "2"], "prune=2"),
    ],
)
def test_bad_input_is_told_in_one_sentence(arguments, message):
    result = run("convert", *arguments)
    assert isinstance(result.exception, mptify.MptifyError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_the_sentence_goes_to_stderr_with_exit_code_1_and_leaves_nothing(tmp_path):
    picture = tmp_path / "out.svg"
    result = shell("convert", "resnet18", "--prune", "1.5", "--graph", str(picture))
    assert result.returncode == 1
    assert result.stderr.startswith("mptify: prune=1.5")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_before_the_work(tmp_path):
    result = run("convert", "resnet18", "--graph", str(tmp_path))
    assert "is a folder" in str(result.exception)
    result = run(
        "zoo",
        "--filter",
        "torchvision:alexnet",
        "--rows",
        str(tmp_path / "rows.jsonl"),
        "--table",
        "/nowhere/table.md",
    )
    assert "the folder /nowhere does not exist" in str(result.exception)
    assert not (tmp_path / "rows.jsonl").exists()


def test_output_can_be_cut_by_a_pipe():
    result = subprocess.run(
        f"{sys.executable} -m mptify zoo --list | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert result.stdout == "torchvision:alexnet\n"
    assert "Traceback" not in result.stderr


def test_importing_mptify_imports_neither_timm_nor_accelerate():
    code = "import mptify, sys; print([m for m in ('timm', 'accelerate', 'torchvision') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "[]\n"
    )


@pytest.mark.long
def test_the_zoo_sweeps_goes_on_and_writes_its_table(tmp_path):
    rows, table = tmp_path / "rows.jsonl", tmp_path / "table.md"
    options = ["--rows", str(rows), "--table", str(table), "--jobs", "1"]
    first = shell("zoo", "--filter", "timm:test_vit2", *options)
    assert first.returncode == 0, first.stderr
    with rows.open("a") as file:
        file.write('{"model": "timm:test_vit3", "par')  # a sweep killed while it wrote
    second = shell("zoo", "--filter", "timm:test_vit[23]", *options)
    assert second.returncode == 0, second.stderr
    assert "test_vit2:" not in second.stdout
    assert (
        "2 of 2 convert in both modes, 2 pass every check, 2 were run; 100.0000 %" in second.stdout
    )
    assert "| timm:test_vit3 |" in table.read_text()


@pytest.mark.parametrize("width", [44, 50, 70, 90, 120])
def test_a_conversions_table_keeps_names_and_numbers_whole(width):
    out = Console(width=width, file=io.StringIO())
    out.print(mptify.summary(mptify.transform(conv2(), prune=0.8)))
    text = out.file.getvalue()
    assert "classifier.1" in text
    assert "838,861" in text
    assert max(map(len, text.splitlines())) <= width


def test_the_zoo_says_what_it_needs():
    assert "Choose models: --all" in str(run("zoo").exception)
    assert "matches no model" in str(run("zoo", "--filter", "nothing*").exception)


def test_help_and_version():
    assert run("--version").output.strip() == mptify.__version__
    assert "--prune" in run("convert", "--help").output
    assert "--filter" in run("zoo", "--help").output
    assert "--rounds" in run("bench", "surgery", "--help").output


def commands_below(command, path=()):
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands_below(below, (*path, name))


@pytest.mark.parametrize("path", [*commands_below(get_command(app))], ids=" ".join)
def test_h_is_help_for_every_command(path):
    found = run(*path, "-h")
    assert found.exit_code == 0
    assert f"Usage: {' '.join(('mptify', *path))} " in found.output


def test_the_bench_measures_ratios():
    result = run(
        "bench",
        "surgery",
        "--rounds",
        "1",
        "--batch",
        "2",
        "--no-commands",
        "--json",
        "--threads",
        "1",
    )
    figures = json.loads(result.stdout)
    assert [step["bits"] for step in figures["steps"]] == ["1/32", "1/1"]
    assert all(step["ratio"] > 0 for step in figures["steps"])
