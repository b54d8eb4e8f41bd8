"""`mptify verify FILE`: does a ticket say what it was written to say, and does it still run?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["verify"]


def verify(file: Annotated[Path, typer.Argument(help="A ticket file.")]) -> None:
    """Check a ticket's hashes, rebuild its network and run it on a fixed input.

    Two machines can compare what is printed. The sha256 of the ticket is the same everywhere; that of the logits only where
    floats are added up in the same order, which is why the logits themselves are printed beside it.
    """
    from mptify.report.verification import run_on_fixed_input
    from mptify.ticket.state import read

    ticket = read(file)
    typer.echo(
        f"ticket  sha256 {ticket.digest}  {len(ticket.layers)} layers, {ticket.kept:,} of {ticket.count:,} weights, as written"
    )
    if ticket.architecture is None:
        typer.echo(
            "logits  not run: the file names no network; mptify.load(path, model=...) loads it into yours"
        )
        return
    result = run_on_fixed_input(file)
    typer.echo(
        f"logits  sha256 {result.digest}  {ticket.architecture} on a fixed input of shape {'×'.join(map(str, result.shape))}"
    )
    typer.echo("logits  first  " + " ".join(f"{value:.4f}" for value in result.first))
