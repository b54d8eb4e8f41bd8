"""Two real processes, started as a user would: they see each image once, hold the same masks, and find the same ticket."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

import mptify

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long


def launch(processes, *arguments, how=("--multi_gpu",), script="tests/training/two.py"):
    start = [sys.executable]
    if processes > 1:
        start += [
            "-m",
            "accelerate.commands.launch",
            *how,
            "--num_processes",
            str(processes),
            "--num_machines",
            "1",
        ]
        start += [
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            "--main_process_port",
            str(_free_port()),
        ]
    command = [
        *start,
        *(["-m", "mptify"] if script is None else [str(ROOT / script)]),
        *map(str, arguments),
    ]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    for processes in (1, 2):
        (folder / str(processes)).mkdir()
        result = launch(processes, folder / str(processes), "search")
        assert result.returncode == 0, result.stderr[-3000:]
        assert result.stdout.count("finished=True") == processes
    return folder


def rows(folder):
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_ranks_hold_the_same_masks(runs):
    first, second = (np.load(runs / f"2/masks{rank}.npz") for rank in (0, 1))
    assert first.files
    for name in first.files:
        assert np.array_equal(first[name], second[name])


def test_two_processes_find_what_one_finds(runs):
    """The same images in each step; sums come in another order, so a few weights at the threshold may differ."""
    one, two = (mptify.read(runs / str(processes) / "run/last.ticket") for processes in (1, 2))
    for name, layer in one.layers.items():
        assert (layer.mask == two.layers[name].mask).mean() > 0.995
    for single, double in zip(rows(runs / "1"), rows(runs / "2"), strict=True):
        assert double["loss"] == pytest.approx(single["loss"], rel=0.02)
        assert double["val_accuracy"] == pytest.approx(single["val_accuracy"], abs=0.03)


def test_a_process_whose_scores_were_tampered_with_is_named(tmp_path):
    result = launch(2, tmp_path, "tamper")
    assert result.returncode != 0
    assert "Process 1 holds other masks than process 0 in 1 layers, first in 4" in result.stdout


def test_processes_stop_together_and_go_on_to_the_same_bytes(runs, tmp_path):
    stopped = launch(2, tmp_path, "stop")
    assert stopped.returncode == 0, stopped.stderr[-3000:]
    assert stopped.stdout.count("finished=False") == 2
    resumed = launch(2, tmp_path, "resume")
    assert resumed.stdout.count("finished=True") == 2, resumed.stderr[-3000:]
    assert (tmp_path / "run/last.ticket").read_bytes() == (runs / "2/run/last.ticket").read_bytes()


def test_statistics_are_the_same_in_all_processes_and_timed_checkpoints_hang_none(tmp_path):
    result = launch(2, tmp_path, "norm")
    assert result.returncode == 0, result.stderr[-3000:]
    first, second = (np.load(tmp_path / f"masks{rank}.npz") for rank in (0, 1))
    assert "1.running_mean" in first.files
    assert any("input_quantizer" in name for name in first.files)
    for name in first.files:
        assert np.array_equal(first[name], second[name])


def test_the_command_line_starts_all_processes_and_speaks_once(tmp_path):
    """`accelerate launch --cpu --num_processes 2` itself starts one."""
    arguments = [
        "search",
        "--out",
        tmp_path / "run",
        "--set",
        "epochs=1",
        "--set",
        "trackers=[tensorboard]",
        "--no-baseline",
    ]
    result = launch(2, *arguments, how=["--cpu"], script=None)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stderr.count("2 processes") == 1
    assert result.stderr.count("biprop   1/1") == 1
    assert result.stdout.count("accuracy") == 1
    again = launch(2, *arguments, how=["--cpu"], script=None)
    assert again.returncode != 0
    assert again.stderr.count("already holds a finished run") == 1


def torchrun(*arguments, **environment):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(_free_port()),
    ]
    plain = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    environment = plain | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=300,
    )


def test_plain_torchrun_searches_as_accelerate_does(tmp_path):
    """One search of two processes: the same bytes, and everything said once."""
    settings = ["--set", "epochs=2", "--set", "data.train_images=300"]
    found = torchrun("-m", "mptify", "search", "--out", tmp_path / "torchrun", *settings)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stderr.count("2 processes") == 1
    assert found.stderr.count("biprop   1/2") == 1
    assert found.stdout.count("accuracy") == 1
    other = launch(2, "search", "--out", tmp_path / "accelerate", *settings, script=None)
    assert other.returncode == 0, other.stderr[-3000:]
    for name in ("last.ticket", "best.ticket", "baseline/last.safetensors"):
        assert (tmp_path / "torchrun" / name).read_bytes() == (
            tmp_path / "accelerate" / name
        ).read_bytes()


def test_plain_torchrun_runs_a_script_of_ones_own(tmp_path):
    found = torchrun(ROOT / "tests/training/two.py", tmp_path, "search")
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.count("finished=True") == 2
    first, second = (np.load(tmp_path / f"masks{rank}.npz") for rank in (0, 1))
    assert all(np.array_equal(first[name], second[name]) for name in first.files)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_process_that_outlives_another_says_how_to_go_on(tmp_path, launcher, victim):
    """In one sentence, and without a traceback of its own."""
    run = tmp_path / "a run"
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(_free_port()),
    ]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if launcher == "accelerate":
        start = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--cpu",
            "--num_processes",
            "2",
            "--num_machines",
            "1",
        ]
        start += [
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            "--main_process_port",
            str(_free_port()),
        ]
    command = [
        *start,
        "-m",
        "mptify",
        "search",
        "--out",
        str(run),
        "--no-baseline",
        "--set",
        "epochs=2000",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    for line in process.stderr:
        if "2/2000" in line:
            break
    workers = [
        one
        for one in psutil.Process(process.pid).children(recursive=True)
        if "RANK" in one.environ()
    ]
    (found,) = [one for one in workers if one.environ()["RANK"] == str(victim)]
    found.kill()
    _, errors = process.communicate(timeout=100)
    assert process.returncode != 0
    name = "mptify (process 1)" if victim == 0 else "mptify"
    said = "Another process of this search has ended, and this one can't continue without it."
    how = (
        "torchrun --nproc-per-node 2"
        if launcher == "torchrun"
        else "accelerate launch --cpu --num_processes 2"
    )
    sentence = f"{name}: {said} `{how} -m mptify search --resume --out '{run}'` resumes from the last checkpoint.\n"
    assert sentence in errors
    before = errors[: errors.index(sentence)]
    assert "Traceback" not in before
    assert "gloo" not in errors
    assert "[rank" not in errors


def test_a_script_that_the_launcher_left_alone_is_told_so(tmp_path):
    result = launch(2, tmp_path, "search", how=["--cpu"])
    assert result.returncode != 0
    assert (
        "`accelerate launch --cpu` starts one process, however many it is asked for"
        in result.stdout
    )
