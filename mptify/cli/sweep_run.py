"""What `mptify sweep` does with its options."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mptify.cli.console import console
from mptify.errors import MptifyError
from mptify.recipe_files import parse_changes
from mptify.tools.sweep import run_sweep
from mptify.tools.sweep_grid import Cell, cells_of, find_sweep, sweep_names

__all__ = ["list_sweeps", "run"]


def list_sweeps() -> None:
    """Print the built-in sweeps."""
    out = console()
    for name in sweep_names():
        out.print(f"{name:<24} {find_sweep(name).about.get('what', '')}", markup=False)


def run(
    name: str,
    data: str | None,
    changes: Sequence[str],
    *,
    out: Path | None,
    jobs: int | None,
    threads: int | None,
    dry_run: bool,
) -> None:
    """Run a sweep and print the accuracy of each run.

    Args:
        name: The name or the file of the sweep.
        data: The source of the images of all runs; None leaves it to the sweep.
        changes: Settings of all runs, such as `["epochs=5"]`.
        out: The folder of the sweep; None takes `runs/NAME`.
        jobs: Runs at a time; None runs one per GPU, or one.
        threads: Threads of each run.
        dry_run: Whether to list the runs only.

    Raises:
        MptifyError: A setting is wrong, or a run failed.
    """
    sweep = find_sweep(name)
    source = {} if data is None else {"data.source": data}
    cells = cells_of(sweep, parse_changes(changes) | source)
    if dry_run:
        for cell in cells:
            typer.echo(cell.name)
        return
    folder = out or Path("runs") / Path(name).stem
    # SIGTERM acts like Ctrl-C: `run_sweep` stops the runs, and they save.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with _Progress(len(cells)) as progress:
        rows = run_sweep(sweep, cells, folder, jobs, threads, progress.on_run_end)
    done = [row for row in rows if row["state"] == "done"]
    failed = [row for row in rows if row["state"] == "failed"]
    progress.print(f"{len(done)} of {len(rows)} runs are done: {folder / 'results.csv'}")
    if sweep.figure is not None and done:
        progress.print(f"`mptify plot {folder}` plots them.")
    if failed:
        raise MptifyError(
            f"{len(failed)} of {len(rows)} runs failed; the same command retries them. "
            f"The first is {failed[0]['run']}: {failed[0]['error']}"
        )


class _Progress:
    """A bar on a terminal, one line per run in a pipe."""

    def __init__(self, count: int):
        self.console = Console(stderr=True)
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task = self.bars.add_task("runs", total=count)

    def __enter__(self) -> _Progress:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def on_run_end(self, cell: Cell, row: dict[str, Any]) -> None:
        self.bars.advance(self.task)
        result = (
            f"{row['top1']:.2f} %" if row["state"] == "done" else f"{row['state']}: {row['error']}"
        )
        self.print(f"{cell.name}  {result}")

    def print(self, text: str) -> None:
        if self.console.is_terminal:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            typer.echo(text, err=True)
