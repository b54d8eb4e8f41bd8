"""Run a sweep: every search of a grid once, in one folder, and a table of their results.

sweep.yaml     the sweep
runs/NAME/     the folder of a run, as `mptify search` creates it
runs/NAME.log  the output of the run
results.csv    one row per run, rewritten after each run
"""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import yaml

from mptify.errors import MptifyError
from mptify.files import write_whole
from mptify.recipe_files import to_yaml
from mptify.ticket import read
from mptify.tools.sweep_grid import Cell, Figure, Sweep, find_sweep
from mptify.training.run_folder import Run

__all__ = ["read_results", "row_of", "run_sweep", "write_results"]

_RESULTS = ("state", "top1", "best", "loss", "kept", "weights", "epochs", "seconds", "error")


def run_sweep(
    sweep: Sweep,
    cells: list[Cell],
    folder: Path,
    jobs: int | None = None,
    threads: int | None = None,
    on_run_end: Callable[[Cell, dict[str, Any]], None] = lambda cell, row: None,
) -> list[dict[str, Any]]:
    """Run all cells that are not done yet.

    A run that was stopped resumes. A run that fails does not stop the others.

    Args:
        sweep: The sweep.
        cells: Its runs.
        folder: The folder of the sweep.
        jobs: Runs at a time; None runs one per GPU, or one.
        threads: Threads of each run.
        on_run_end: Called with the cell and the row of each run that ends.

    Returns:
        The rows of results.csv.

    Raises:
        MptifyError: The folder holds something else, or runs with other settings.
    """
    devices = torch.cuda.device_count()
    jobs = jobs or max(1, devices)
    _require_same(sweep, cells, folder)
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    write_whole(
        folder / "sweep.yaml",
        yaml.safe_dump(sweep.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
    )
    rows = {cell.name: row_of(cell, folder) for cell in cells}
    write_results(folder, list(rows.values()))
    waiting = [cell for cell in cells if rows[cell.name]["state"] != "done"]
    free = list(range(jobs))  # slots; each has its own GPU, if there are enough
    running: dict[Future[str], tuple[Cell, int]] = {}
    alive: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while waiting or running:
                while waiting and free:
                    cell, slot = waiting.pop(0), free.pop(0)
                    device = str(slot % devices) if devices else None
                    future = pool.submit(_search, cell, folder, threads, device, alive)
                    running[future] = cell, slot
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    cell, slot = running.pop(future)
                    free.append(slot)
                    rows[cell.name] = row_of(cell, folder, future.result())
                    write_results(folder, list(rows.values()))
                    on_run_end(cell, rows[cell.name])
        except BaseException:
            for process in list(alive):
                process.terminate()  # the run saves and can be resumed
            raise
    return list(rows.values())


def _search(
    cell: Cell,
    folder: Path,
    threads: int | None,
    device: str | None,
    alive: set[subprocess.Popen[bytes]],
) -> str:
    """Run one search in a new process, which is in `alive` while it runs.

    Returns:
        The last line that it printed if it failed, "" otherwise.
    """
    run, log, recipe = (folder / "runs" / f"{cell.name}{end}" for end in ("", ".log", ".yaml"))
    command = [sys.executable, "-m", "mptify", "search", "--out", str(run)]
    if (run / "recipe.yaml").exists():
        command.append("--resume")
    else:
        write_whole(recipe, to_yaml(cell.recipe))
        command += ["--recipe", str(recipe)]
    if threads is not None:
        command += ["--threads", str(threads)]
    with log.open("ab") as output:
        environment = os.environ | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        alive.add(process)
        try:
            code = process.wait()
        finally:
            alive.discard(process)
    recipe.unlink(missing_ok=True)
    if code == 0:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("mptify: ") if lines else f"ended with code {code}"


def _require_same(sweep: Sweep, cells: list[Cell], folder: Path) -> None:
    """Raise if the folder is not a sweep's, or holds runs of the same names with other settings."""
    if folder.exists() and not (folder / "sweep.yaml").exists() and any(folder.iterdir()):
        raise MptifyError(
            f"{folder} is not empty, and a sweep needs an empty folder; choose another --out."
        )
    for cell in cells:
        run = Run(folder / "runs" / cell.name)
        if run.recipe.exists():
            try:
                run.require_same(cell.recipe.model_dump(mode="json"))
            except MptifyError as error:
                raise MptifyError(f"{error} Choose another --out, or remove that folder.") from None


def row_of(cell: Cell, folder: Path, error: str = "") -> dict[str, Any]:
    """The row of a run in results.csv.

    Args:
        cell: The run.
        folder: The folder of the sweep.
        error: The error of the run, if it failed.

    Returns:
        Its place in the sweep, its state and its results so far.
    """
    row: dict[str, Any] = {
        "run": cell.name,
        "line": cell.line,
        **cell.place,
        "seed": cell.seed,
        **dict.fromkeys(_RESULTS),
    }
    run = Run(folder / "runs" / cell.name)
    metrics = run.read_metrics()
    if run.recipe.exists() and run.has_summary:
        state = "done"
    elif error:
        state = "failed"
    else:
        state = "begun" if metrics else "waiting"
    row |= {"state": state, "error": error or None, "epochs": len(metrics)}
    if metrics:
        row |= {
            "top1": round(100 * metrics[-1]["val_accuracy"], 4),
            "best": round(100 * max(one["val_accuracy"] for one in metrics), 4),
            "loss": round(metrics[-1]["val_loss"], 6),
            "seconds": round(sum(one["seconds"] for one in metrics), 1),
        }
    if state == "done" and not cell.recipe.trains_weights:
        ticket = read(run.ticket("last"))
        row |= {"kept": ticket.kept, "weights": ticket.count}
    return row


def write_results(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write results.csv."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / "results.csv", text.getvalue())


def read_results(path: Path) -> tuple[list[dict[str, str]], Figure | None, list[str]]:
    """Read the results of a sweep.

    Args:
        path: The folder of the sweep, or its results.csv.

    Returns:
        The rows, the figure of the sweep if sweep.yaml lies beside the file, and its axes.

    Raises:
        MptifyError: The file does not exist, or is not a table of results.
    """
    path = path / "results.csv" if path.is_dir() else path
    if not path.is_file():
        raise MptifyError(f"{path}: there is no such file; `mptify sweep` writes it.")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = list(rows[0]) if rows else []
    missing = [name for name in ("line", "seed", "state", "top1") if name not in columns]
    if missing:
        raise MptifyError(
            f"{path} is not a table of a sweep's results; it has no column {missing[0]!r}."
        )
    sweep = path.with_name("sweep.yaml")
    figure = find_sweep(str(sweep)).figure if sweep.is_file() else None
    return rows, figure, columns[columns.index("line") + 1 : columns.index("seed")]
