"""`mptify eval FILE`: measure a ticket's accuracy on labelled images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["evaluate"]


def evaluate(
    file: Annotated[Path, typer.Argument(help="A ticket file.")],
    data: Annotated[
        str | None,
        typer.Option(help="The source of the images; that of the ticket's search by default."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting of the data: size=192, val_images=1000.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images per step.")] = 256,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads for torch.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure top-1, top-5, loss and throughput on the validation images of a data set.

    Classes are matched by name, so a folder may hold only some of the ticket's classes.
    """
    from mptify.cli.evaluate_run import run_evaluate

    run_evaluate(
        file, data, changes or [], batch=batch, device=device, threads=threads, as_json=as_json
    )
