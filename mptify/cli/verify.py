"""`mptify verify FILE`: check that a ticket is intact and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["verify"]


def verify(file: Annotated[Path, typer.Argument(help="A ticket file.")]) -> None:
    """Check a ticket's hashes, rebuild its network and run it on a fixed input.

    Compare the output on two machines: the sha256 of the ticket is the same everywhere. The sha256
    of the logits is the same only where floats are added in the same order, so the first logits
    are printed too.
    """
    from mptify.report.verification import run_on_fixed_input
    from mptify.ticket.state import read

    ticket = read(file)
    typer.echo(
        f"ticket  sha256 {ticket.digest}  {len(ticket.layers)} layers, "
        f"{ticket.kept:,} of {ticket.count:,} weights, intact"
    )
    if ticket.architecture is None:
        typer.echo(
            "logits  not computed: the file names no network; "
            "mptify.load(path, model=...) loads the ticket into yours"
        )
        return
    result = run_on_fixed_input(file)
    shape = "×".join(map(str, result.shape))
    typer.echo(
        f"logits  sha256 {result.digest}  {ticket.architecture} on a fixed input of shape {shape}"
    )
    typer.echo("logits  first  " + " ".join(f"{value:.4f}" for value in result.first))
