"""`mptify sweep`: run a grid of searches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["sweep"]


def sweep(
    name: Annotated[
        str | None, typer.Argument(metavar="[FILE|NAME]", help="A built-in sweep, or a YAML file.")
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
        Path | None, typer.Option(help="The folder of the sweep; runs/NAME by default.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; by default one per GPU, or one.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each run.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs without starting them.")
    ] = False,
) -> None:
    """Search every combination of a grid with every seed, and write results.csv.

    The same command again skips finished runs, resumes stopped ones and retries failed ones. A
    failed run does not stop the others. `mptify plot` plots the results. Without arguments, the
    command lists the built-in sweeps.
    """
    from mptify.cli.sweep_run import list_sweeps, run

    if name is None:
        list_sweeps()
    else:
        run(name, data, changes or [], out=out, jobs=jobs, threads=threads, dry_run=dry_run)
