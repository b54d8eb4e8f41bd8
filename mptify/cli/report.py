"""`mptify report RUN_OR_FILE`: one HTML page of a run or of a ticket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    place: Annotated[
        Path, typer.Argument(metavar="RUN_OR_FILE", help="The folder of a run, or a ticket file.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Write it here; RUN/report.html, or FILE with .html, unless given."),
    ] = None,
    data: Annotated[
        bool,
        typer.Option(
            "--data/--no-data",
            help="Run the validation images that the recipe names, to show which classes are confused.",
        ),
    ] = True,
    images: Annotated[
        int | None, typer.Option(min=1, help="Run at most so many validation images.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images per step.")] = 256,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads for torch.")] = None,
) -> None:
    """Write one self-contained HTML page: what was searched, curves, classes, layers, masks, sizes, and the commands to do it again."""
    from rich.progress import Progress

    from mptify.cli.console import console
    from mptify.report import write_report

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    out_console = console()
    with Progress(
        console=out_console, disable=not out_console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task("running images", total=None, visible=False)
        target = write_report(
            place, out, with_data=data, most_images=images, batch=batch, device=device,
            tick=lambda done, total: progress.update(task, completed=done, total=total, visible=True),
        )  # fmt: skip
    typer.echo(f"report: {target} ({target.stat().st_size:,} bytes)")
