"""`mptify diff A B`: how far two tickets of one network agree."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["diff"]


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A ticket file.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another, of the same network.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare the masks of two tickets, layer by layer. The exit code is 0 whether they differ or not."""
    from rich.table import Table
    from rich.text import Text

    from mptify.cli.console import console
    from mptify.surgery.model_summary import columns_for
    from mptify.ticket.state import read
    from mptify.ticket.summary import compare

    one, other = read(first), read(second)
    overlaps = compare(one, other)
    if as_json:
        typer.echo(
            json.dumps(
                {"equal": one == other, "layers": [asdict(overlap) for overlap in overlaps]},
                indent=1,
                ensure_ascii=False,
            )
        )
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    out = console()
    everything = ("layer", "A keeps", "B keeps", "both", "of A", "by chance", "gains")
    columns = columns_for(
        out.width, everything, {"gains": 90, "both": 70, "B keeps": 60, "by chance": 50}
    )
    for column in columns:
        table.add_column(
            column,
            justify="left" if column == "layer" else "right",
            no_wrap=column != "layer",
            overflow="fold",
        )
    for overlap in overlaps:
        cells: dict[str, Any] = {
            "layer": Text(overlap.name), "A keeps": f"{overlap.kept[0]:,}", "B keeps": f"{overlap.kept[1]:,}", "both": f"{overlap.both:,}",
            "of A": f"{100 * overlap.share:.2f} %", "by chance": f"{100 * overlap.chance:.2f} %",
            "gains": f"{overlap.gains[0]:.4g}, {overlap.gains[1]:.4g}",
        }  # fmt: skip
        table.add_row(*(cells[column] for column in columns))
    out.print(table)
    both, kept = sum(overlap.both for overlap in overlaps), one.kept
    same_seed = (
        "the same seed"
        if one.config.seed == other.config.seed
        else "different seeds, so that a weight in both may differ in sign"
    )
    verdict = (
        "The tickets are equal."
        if one == other
        else f"{100 * both / kept:.2f} % of A's survivors are B's too"
    )
    typer.echo(verdict if one == other else f"{verdict}; {same_seed}.")
