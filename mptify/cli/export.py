"""`mptify export FILE`: a ticket for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["export"]


def export(
    file: Annotated[Path, typer.Argument(help="A ticket file of a named network.")],
    to: Annotated[
        str,
        typer.Option(
            help="onnx; dense, a state dict that the network itself loads; or packed, a program for mptify."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="What to write. Without it: FILE with another ending.")
    ] = None,
) -> None:
    """Write a ticket for other programs, and compare what these compute with it before the file is kept.

    `dense` is a safetensors file for the torchvision or timm network that a 1/32 ticket was cut from, and needs no mptify. `onnx` takes
    any number of images. `packed` is for 1/1 tickets: larger than they are, but mapped into memory and ready at once.
    """
    from mptify.export import export as write

    made = write(file, to, out)
    typer.echo(
        f"{made.path}: {made.size / 1e6:,.2f} MB; outputs differ from the ticket's by {made.difference:.1e} of the largest"
    )
