"""Sweeps and their figures: every run once, whatever happens to the others."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mptify.cli import app
from mptify.config import make_recipe
from mptify.errors import BadConfig, MptifyError
from mptify.report.plots import Curve, Point, curves_of, figure_of
from mptify.tools import sweep as sweeping
from mptify.tools.sweep import read_results, run_sweep
from mptify.tools.sweep_grid import cells_of, find_sweep, sweep_names

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
SMALL = {
    "set": {
        "model": "mptify:conv2_x{width}",
        "data": {"source": "digits", "train_images": 100, "val_images": 50},
        "epochs": 1,
    },
    "grid": {"width": [0.05, 0.1], "ticket.prune": [0.5, 0.8]},
    "lines": [{"name": "MPT-1/32"}, {"name": "dense", "set": {"method": "dense"}, "axes": "width"}],
    "seeds": [3, 4],
    "figure": {"x": "ticket.prune", "panel": "width"},
}


def written(folder, name="a.yaml", **changes):
    path = folder / name
    path.write_text(yaml.safe_dump({**SMALL, **changes}, sort_keys=False))
    return str(path)


def pretend(monkeypatch, failing=()):
    """Searches that end at once, each run better than the one before; the names of those that were run."""
    ran = []

    def search(cell, folder, threads, device, alive):
        ran.append(cell.name)
        if cell.name in failing:
            return "the disk is full"
        run = sweeping.Run(folder / "runs" / cell.name)
        if not run.recipe.exists():
            run = sweeping.Run.begin(run.folder, sweeping.to_yaml(cell.recipe))
        run.write_metrics([{"val_accuracy": 0.5 + len(ran) / 100, "val_loss": 1.0, "seconds": 2.0}])
        run.write_summary({})
        return ""

    monkeypatch.setattr(sweeping, "_search", search)
    monkeypatch.setattr(sweeping, "read", lambda path: type("Ticket", (), {"kept": 1, "count": 4}))
    return ran


def test_every_line_varies_over_its_axes_with_every_seed(tmp_path):
    cells = cells_of(find_sweep(written(tmp_path)), {})
    assert len(cells) == 2 * (2 * 2 + 2)
    assert [cell.name for cell in cells[:2]] == [
        "mpt-1-32_width0.05_prune0.5_seed3",
        "mpt-1-32_width0.05_prune0.8_seed3",
    ]
    one = cells[1].recipe
    assert (one.model, one.ticket.prune, one.seed, one.ticket.seed, one.baseline) == (
        "mptify:conv2_x0.05",
        0.8,
        3,
        3,
        None,
    )
    dense = [cell for cell in cells if cell.line == "dense"]
    assert {cell.recipe.method for cell in dense} == {"dense"}
    assert all(cell.place["ticket.prune"] is None for cell in dense)
    assert {
        cell.recipe.epochs for cell in cells_of(find_sweep(written(tmp_path)), {"epochs": 7})
    } == {7}


@pytest.mark.parametrize("name", sweep_names())
def test_the_sweeps_that_come_with_mptify_can_be_run(name):
    sweep = find_sweep(name)
    cells = cells_of(sweep, {})
    assert len({cell.name for cell in cells}) == len(cells)
    assert sweep.figure is not None
    assert f"{len(cells)} runs" in sweep.about["what"]
    assert sweep.seeds == (0, 1, 2)


def test_runs_that_fail_leave_the_others_alone_and_are_tried_again(tmp_path, monkeypatch):
    sweep, out = find_sweep(written(tmp_path)), tmp_path / "out"
    cells = cells_of(sweep, {})
    broken = "mpt-1-32_width0.1_prune0.8_seed3"
    ran = pretend(monkeypatch, [broken])
    told = []
    rows = run_sweep(
        sweep, cells, out, on_run_end=lambda cell, row: told.append((cell.name, row["state"]))
    )
    assert ran == [cell.name for cell in cells]
    assert told == [(name, "failed" if name == broken else "done") for name in ran]
    assert [row["run"] for row in rows if row["state"] != "done"] == [broken]
    with (out / "results.csv").open() as file:
        stored = {row["run"]: row for row in csv.DictReader(file)}
    assert (stored[broken]["state"], stored[broken]["error"]) == ("failed", "the disk is full")
    assert (stored[cells[0].name]["top1"], stored[cells[0].name]["kept"]) == ("51.0", "1")
    ran = pretend(monkeypatch)
    assert {row["state"] for row in run_sweep(sweep, cells, out)} == {"done"}
    assert ran == [broken]


def test_a_folder_with_other_runs_is_refused_before_anything_runs(tmp_path, monkeypatch):
    sweep, out = find_sweep(written(tmp_path)), tmp_path / "out"
    pretend(monkeypatch)
    run_sweep(sweep, cells_of(sweep, {}), out)
    ran = pretend(monkeypatch)
    with pytest.raises(MptifyError, match=r"started with another epochs.* Choose another --out"):
        run_sweep(sweep, cells_of(sweep, {"epochs": 2}), out)
    with pytest.raises(MptifyError, match="is not empty, and a sweep needs an empty folder"):
        run_sweep(sweep, cells_of(sweep, {}), tmp_path)
    assert not ran


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lines": [{"name": "a"}, {"name": "a"}]}, "two lines have the name 'a'"),
        ({"grids": {}}, "no setting 'grids'; did you mean 'grid'"),
        ({"grid": {"width": [1, 1]}}, "grid.width: should be a list of distinct values"),
        (
            {"figure": {"x": "depth"}},
            "figure: the grid has no axis 'depth'; its axes are width, ticket.prune",
        ),
        ({"lines": [{"name": "a", "axes": ["depth"]}]}, "the grid has no axis 'depth'"),
        ({"lines": []}, "lines"),
    ],
)
def test_a_wrong_sweep_is_one_sentence_that_names_the_file(changes, sentence, tmp_path):
    with pytest.raises(BadConfig, match=sentence) as caught:
        find_sweep(written(tmp_path, "wrong.yaml", **changes))
    assert "wrong.yaml: " in str(caught.value)


def test_wrong_settings_are_told_before_anything_runs(tmp_path):
    with pytest.raises(
        BadConfig, match="needs the axis 'width', but these runs do not vary along it"
    ):
        cells_of(find_sweep(written(tmp_path, lines=[{"name": "a", "axes": "ticket.prune"}])), {})
    with pytest.raises(
        BadConfig, match=r"mpt-1-32_width0\.05_prune0\.5_seed3: There is no setting 'epoch'"
    ):
        cells_of(find_sweep(written(tmp_path)), {"epoch": 1})
    with pytest.raises(BadConfig, match="did you mean 'depth_small'"):
        find_sweep("depht_small")


def test_means_and_bars_are_those_of_the_seeds(tmp_path, monkeypatch):
    sweep, out = find_sweep(written(tmp_path)), tmp_path / "out"
    pretend(monkeypatch)
    run_sweep(sweep, cells_of(sweep, {}), out)
    rows, figure, axes = read_results(out)
    assert axes == ["width", "ticket.prune"]
    curves = curves_of(rows, axes, figure.x, figure.panel)
    assert [(curve.panel, curve.label) for curve in curves] == [
        ("width 0.05", "MPT-1/32"), ("width 0.05", "dense"), ("width 0.1", "MPT-1/32"), ("width 0.1", "dense"),
    ]  # fmt: skip
    first, last = curves[0].points  # runs 1 and 7, and 2 and 8
    assert (first.x, first.low, first.high, first.seeds) == (0.5, 51.0, 57.0, 2)
    assert first.mean == pytest.approx(54.0)
    assert (last.x, last.low, last.high) == (0.8, 52.0, 58.0)
    assert [point.x for point in curves[1].points] == [None]
    labels = [curve.label for curve in curves_of(rows, axes, "width", None)]
    assert labels == ["MPT-1/32, 50 % pruned", "MPT-1/32, 80 % pruned", "dense"]


def test_a_figure_is_drawn_from_what_is_done(tmp_path, monkeypatch):
    sweep, out = find_sweep(written(tmp_path)), tmp_path / "out"
    pretend(monkeypatch, ["dense_width0.1_seed4"])
    run_sweep(sweep, cells_of(sweep, {}), out)
    result = CliRunner().invoke(app, ["plot", str(out)])
    assert result.exit_code == 0, result.output
    assert "1 of 12 runs are not done yet" in result.output
    assert (out / "figure.png").read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in (out / "figure.svg").read_bytes()
    before = (out / "figure.svg").read_bytes()
    CliRunner().invoke(app, ["plot", str(out)])
    assert len((out / "figure.svg").read_bytes()) == len(before)
    alone = CliRunner().invoke(
        app, ["plot", str(out / "results.csv"), "--x", "width", "--out", str(tmp_path / "a.pdf")]
    )
    assert alone.exit_code == 0
    assert (tmp_path / "a.pdf").read_bytes()[:4] == b"%PDF"


def test_a_figure_shows_its_whole_title_and_marks_what_was_measured():
    points = tuple(Point(float(depth), 40.0, 39.0, 41.0, 3) for depth in (2, 4, 6, 8))
    title = "Conv-N, a quarter as wide, 80 % pruned, 5,000 images of CIFAR-10, 8 epochs"
    figure = figure_of([Curve("", "MPT-1/32", points)], "depth", title)
    figure.canvas.draw()
    extent = figure._suptitle.get_window_extent()
    assert extent.x0 >= 0
    assert extent.x1 <= figure.bbox.width
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["2", "4", "6", "8"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing"], "there is no such file"),
        (["table.csv"], "is not a table of a sweep's results; it has no column 'line'"),
        (["results.csv", "--x", "depth"], "have no axis 'depth'; there are width"),
        (["results.csv"], "Which axis is x? Choose --x from"),
        (["results.csv", "--x", "width"], "None of the 1 runs is done yet"),
        (["results.csv", "--x", "width", "--out", "a.gif"], "ends in .png"),
    ],
)
def test_what_cannot_be_drawn_is_told(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("table.csv").write_text("a,b\n1,2\n")
    Path("results.csv").write_text("run,line,width,seed,state,top1\na,b,1,0,waiting,\n")
    result = CliRunner().invoke(app, ["plot", *arguments])
    assert isinstance(result.exception, MptifyError)
    assert sentence in str(result.exception)


def test_a_sweep_that_is_stopped_stops_its_runs(tmp_path):
    """They save, and nobody searches there any more."""
    path = written(
        tmp_path,
        grid={"width": [0.05]},
        lines=[{"name": "MPT-1/32", "set": {"epochs": 100000}}],
        seeds=[0],
        figure={"x": "width"},
    )
    command = [
        sys.executable,
        "-m",
        "mptify",
        "sweep",
        path,
        "--out",
        str(tmp_path / "out"),
        "--threads",
        "1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = sweeping.Run(tmp_path / "out/runs/mpt-1-32_width0.05_seed0")
    while len(run.read_metrics()) < 2:
        assert process.poll() is None
        time.sleep(0.2)
    process.terminate()
    assert process.wait(timeout=120) == 143
    run.lock()  # raises if another process still has it
    run.unlock()
    assert run.read_checkpoint() is not None
    assert not run.has_summary


def test_a_sweep_runs_for_real_goes_on_and_is_not_run_twice(tmp_path):
    """Two runs at a time, in processes of their own; one of them can't find its images."""
    lines = [{"name": "MPT-1/32"}, {"name": "lost", "set": {"data": "arrays:nowhere.npz"}}]
    path = written(tmp_path, grid={"width": [0.05]}, lines=lines, seeds=[0], figure={"x": "width"})
    command = ["sweep", path, "--out", str(tmp_path / "out"), "--jobs", "2", "--threads", "1"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, MptifyError)
    assert "1 of 2 runs failed" in str(result.exception)
    assert "nowhere.npz" in str(result.exception)
    found = {row["run"]: row for row in read_results(tmp_path / "out")[0]}
    row = found["mpt-1-32_width0.05_seed0"]
    assert (row["state"], row["epochs"]) == ("done", "1")
    assert int(row["kept"]) / int(row["weights"]) == pytest.approx(0.2, abs=0.01)
    run = tmp_path / "out/runs/mpt-1-32_width0.05_seed0"
    assert float(row["top1"]) == pytest.approx(
        100 * json.loads((run / "metrics.jsonl").read_text())["val_accuracy"], abs=1e-3
    )
    assert (
        make_recipe(yaml.safe_load((run / "recipe.yaml").read_text())).model == "mptify:conv2_x0.05"
    )
    when = (run / "last.ticket").stat().st_mtime_ns
    assert (
        found["lost_width0.05_seed0"]["error"]
        == "arrays:nowhere.npz: there is no file 'nowhere.npz'."
    )
    again = CliRunner().invoke(app, command)
    assert "1 of 2 runs failed" in str(again.exception)
    assert (run / "last.ticket").stat().st_mtime_ns == when
