"""`mptify plot`: a sweep's results as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["plot"]


def plot(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER|CSV", help="A sweep's folder, or its results.csv.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The picture, .png, .svg or .pdf. Without it: figure.png and figure.svg beside the results."
        ),
    ] = None,
    x: Annotated[
        str | None,
        typer.Option(help="The axis along which lines go; as the sweep says unless given."),
    ] = None,
    panel: Annotated[
        str | None, typer.Option(help="The axis that has a panel for each of its values.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="What stands above it.")] = None,
) -> None:
    """Draw the results of a sweep: the mean of the seeds, with bars to the lowest and the highest."""
    from mptify.cli.console import console
    from mptify.errors import MptifyError
    from mptify.report.plots import curves_of, draw_figure
    from mptify.tools.sweep import read_results

    rows, figure, axes = read_results(results)
    along = x or (figure.x if figure else None)
    if along is None:
        raise MptifyError(f"Along which axis? --x takes one of {', '.join(axes)}.")
    if out is not None and out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise MptifyError(f"{out}: a picture ends in .png, .svg or .pdf.")
    curves = curves_of(rows, axes, along, panel or (figure.panel if figure else None))
    beside = results if results.is_dir() else results.parent
    paths = [out] if out is not None else [beside / "figure.png", beside / "figure.svg"]
    draw_figure(
        curves, along, title if title is not None else figure.title if figure else "", paths
    )
    left = sum(row["state"] != "done" for row in rows)
    more = f"; {left} of {len(rows)} runs are not done yet" if left else ""
    console().print(f"{' and '.join(map(str, paths))}{more}", markup=False)
