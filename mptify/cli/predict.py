"""`mptify predict FILE IMAGE...`: what a ticket sees."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["predict"]


def predict(
    file: Annotated[Path, typer.Argument(help="A ticket file of a named network.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Pictures.")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to print.")] = 5,
    runtime: Annotated[
        str | None,
        typer.Option(help="float or packed; 1/1 tickets are packed unless told otherwise."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads; all or one unless given, as is faster at the moment."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print as JSON, one line per picture.")
    ] = False,
) -> None:
    """The likeliest classes of pictures, with their probabilities, and the time that each took."""
    from mptify.training.prediction import predict as predictions

    for found in predictions(file, images, top=top, runtime=runtime, threads=threads):
        if as_json:
            typer.echo(json.dumps(asdict(found) | {"path": str(found.path)}))
            continue
        typer.echo(f"{found.path}  {found.ms:.1f} ms")
        for label, chance in zip(found.labels, found.chances, strict=True):
            typer.echo(f"  {100 * chance:5.1f} %  {label}")
