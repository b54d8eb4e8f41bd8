"""`mptify report RUN_OR_FILE`: write an HTML report of a run or a ticket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    run_or_file: Annotated[
        Path, typer.Argument(metavar="RUN_OR_FILE", help="The folder of a run, or a ticket file.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write; RUN/report.html, or FILE with the extension .html, by default."
        ),
    ] = None,
    data: Annotated[
        bool,
        typer.Option(
            "--data/--no-data",
            help="Evaluate the recipe's validation images to show which classes are confused.",
        ),
    ] = True,
    images: Annotated[
        int | None, typer.Option(min=1, help="The most validation images to evaluate.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images per step.")] = 256,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads for torch.")] = None,
) -> None:
    """Write a self-contained HTML page about a search and its ticket.

    It shows the settings, training curves, classes, layers, masks and sizes, and the commands that
    reproduce them.
    """
    import torch
    from rich.progress import Progress

    from mptify.cli.console import console
    from mptify.report import write_report

    if threads is not None:
        torch.set_num_threads(threads)
    screen = console()
    with Progress(console=screen, disable=not screen.is_terminal, transient=True) as progress:
        task = progress.add_task("evaluating images", total=None, visible=False)

        def tick(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=True)

        target = write_report(
            run_or_file,
            out,
            with_data=data,
            most_images=images,
            batch=batch,
            device=device,
            tick=tick,
        )
    typer.echo(f"report: {target} ({target.stat().st_size:,} bytes)")
