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
    activation_bits: Annotated[
        int | None, typer.Option(help="8 gives a 1/32 ticket 8-bit inputs, with --to packed.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="With --activation-bits: the source of the images to calibrate on; that of the "
            "ticket's search by default."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting of the data: size=192, val_images=500 (1000 by default).",
        ),
    ] = None,
) -> None:
    """Write a ticket for other programs, after comparing its outputs with the ticket's.

    `dense` is a safetensors file for the torchvision or timm network of a 1/32 ticket; it needs no
    mptify. `onnx` accepts any batch size. `packed` is a larger file than the ticket, but one that
    is mapped into memory and loads at once.

    With `--activation-bits 8`, the layers of a 1/32 ticket round their inputs to 8 bits, with
    ranges from validation images. The command prints what that costs on these images.
    """
    from mptify.cli.export_run import run_export

    run_export(file, to, out, activation_bits=activation_bits, source=data, changes=changes or [])
