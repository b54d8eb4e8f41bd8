"""`mptify export FILE`: write a ticket for other programs."""

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
            help="onnx; dense, a state dict for the original network; or packed, a program for "
            "mptify."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; FILE with another extension by default.")
    ] = None,
) -> None:
    """Write a ticket for other programs, after comparing its outputs with the ticket's.

    `dense` is a safetensors file for the torchvision or timm network of a 1/32 ticket; it needs no
    mptify. `onnx` accepts any batch size. `packed` is for 1/1 tickets: a larger file, but one that
    is mapped into memory and loads at once.
    """
    from mptify.export import export as export_ticket

    exported = export_ticket(file, to, out)
    typer.echo(
        f"{exported.path}: {exported.size / 1e6:,.2f} MB; outputs differ from the ticket's by "
        f"{exported.difference:.1e} of the largest"
    )
