"""`mptify inspect FILE`: show how a ticket was made and what its file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["inspect"]


def inspect(
    file: Annotated[Path, typer.Argument(help="A ticket file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the layers as CSV.")] = False,
    png: Annotated[
        Path | None, typer.Option(help="Write an image of the masks to this PNG file.")
    ] = None,
) -> None:
    """Show how a ticket was made and, layer by layer, its survivors and their bytes.

    The command does not build the network.
    """
    from mptify.cli.inspect_run import run_inspect

    run_inspect(file, as_json=as_json, as_csv=as_csv, png=png)
