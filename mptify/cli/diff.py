"""`mptify diff A B`: compare two tickets of one network."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["diff"]


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A ticket file.")],
    second: Annotated[
        Path, typer.Argument(metavar="B", help="Another ticket of the same network.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare the masks of two tickets layer by layer.

    The exit code is 0 whether they differ or not.
    """
    from rich.text import Text

    from mptify.cli.console import console
    from mptify.cli.tables import Column, make_table
    from mptify.ticket.state import read
    from mptify.ticket.ticket_summary import compare

    one, other = read(first), read(second)
    overlaps = compare(one, other)
    if as_json:
        layers = [asdict(overlap) for overlap in overlaps]
        typer.echo(
            json.dumps({"equal": one == other, "layers": layers}, indent=1, ensure_ascii=False)
        )
        return
    columns = [
        Column("layer", lambda layer: Text(layer.name), left=True, wraps=True),
        Column("A keeps", lambda layer: f"{layer.kept[0]:,}"),
        Column("B keeps", lambda layer: f"{layer.kept[1]:,}", min_width=60),
        Column("both", lambda layer: f"{layer.both:,}", min_width=70),
        Column("of A", lambda layer: f"{100 * layer.share:.2f} %"),
        Column("by chance", lambda layer: f"{100 * layer.chance:.2f} %", min_width=50),
        Column("gains", lambda layer: f"{layer.gains[0]:.4g}, {layer.gains[1]:.4g}", min_width=90),
    ]
    out = console()
    out.print(make_table(columns, overlaps, width=out.width, header_style="bold"))
    if one == other:
        typer.echo("The tickets are equal.")
        return
    share = sum(overlap.both for overlap in overlaps) / one.kept
    seeds = (
        "the same seed"
        if one.config.seed == other.config.seed
        else "different seeds, so that a weight in both may differ in sign"
    )
    typer.echo(f"B keeps {100 * share:.2f} % of A's survivors; {seeds}.")
