"""`mptify predict FILE IMAGE...`: classify images with a ticket."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["predict"]


def predict(
    file: Annotated[Path, typer.Argument(help="A ticket file of a named network.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to print.")] = 5,
    runtime: Annotated[
        str | None, typer.Option(help="float or packed; packed by default for 1/1 tickets.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads; by default all or one, whichever is faster now."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one line per image.")
    ] = False,
) -> None:
    """Print the most likely classes of images, their probabilities, and the time per image."""
    from mptify.training.prediction import predict as predictions

    for prediction in predictions(file, images, top=top, runtime=runtime, threads=threads):
        if as_json:
            typer.echo(json.dumps(asdict(prediction) | {"path": str(prediction.path)}))
            continue
        typer.echo(f"{prediction.path}  {prediction.ms:.1f} ms")
        for label, chance in zip(prediction.labels, prediction.chances, strict=True):
            typer.echo(f"  {100 * chance:5.1f} %  {label}")
