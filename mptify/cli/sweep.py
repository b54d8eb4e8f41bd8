"""`mptify sweep`: a grid of searches."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["sweep"]


def sweep(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE|NAME]", help="A sweep that comes with mptify, or a YAML file."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="The images of all runs: cifar10:FOLDER, arrays:FILE.npz, ..."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting of all runs: epochs=5. May be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the sweep. Without it: one of its name below runs/."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time; as many as there are GPUs unless given, or one."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each run.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs, and do nothing.")
    ] = False,
) -> None:
    """Search every combination of a grid, with every seed, and write results.csv; `mptify plot` draws it.

    What is done is not done again, what was stopped goes on, and what fails leaves the others alone. Without arguments: the sweeps that
    come with mptify.
    """
    from mptify.cli.console import console
    from mptify.errors import MptifyError
    from mptify.recipe_files import parse_changes
    from mptify.tools.sweep import cells_of, find_sweep, run_sweep, sweep_names

    screen = console()
    if what is None:
        for name in sweep_names():
            screen.print(f"{name:<24} {find_sweep(name).about.get('what', '')}", markup=False)
        return
    asked = find_sweep(what)
    cells = cells_of(
        asked, parse_changes(changes or []) | ({} if data is None else {"data.source": data})
    )
    if dry_run:
        for cell in cells:
            typer.echo(cell.name)
        return
    folder = out or Path("runs") / Path(what).stem
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # as Ctrl-C does: the runs are stopped, and save
    with _Progress(len(cells)) as progress:
        rows = run_sweep(asked, cells, folder, jobs, threads, progress.tell)
    failed = [row for row in rows if row["state"] == "failed"]
    progress.say(
        f"{sum(row['state'] == 'done' for row in rows)} of {len(rows)} runs are done: {folder / 'results.csv'}"
    )
    if asked.figure is not None and any(row["state"] == "done" for row in rows):
        progress.say(f"`mptify plot {folder}` draws them.")
    if failed:
        first = f"{failed[0]['run']}: {failed[0]['error']}"
        raise MptifyError(
            f"{len(failed)} of {len(rows)} runs failed; the same command tries them again. The first, {first}"
        )


class _Progress:
    """A bar on a terminal, a line per run in a pipe."""

    def __init__(self, count: int):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
        )
        self.bars = Progress(
            *columns, console=self.console, disable=not self.console.is_terminal, transient=True
        )
        self.task: Any = None
        self.count = count

    def __enter__(self) -> _Progress:
        self.task = self.bars.add_task("runs", total=self.count)
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def tell(self, cell: Any, row: dict[str, Any]) -> None:
        self.bars.advance(self.task)
        came = (
            f"{row['top1']:.2f} %" if row["state"] == "done" else f"{row['state']}: {row['error']}"
        )
        self.say(f"{cell.name}  {came}")

    def say(self, text: str) -> None:
        if self.console.is_terminal:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            typer.echo(text, err=True)
