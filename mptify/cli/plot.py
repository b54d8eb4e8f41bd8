"""`mptify plot`: plot the results of a sweep."""

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
            help="The file to write: .png, .svg or .pdf. By default, figure.png and figure.svg "
            "beside the results."
        ),
    ] = None,
    x: Annotated[
        str | None,
        typer.Option(help="The sweep's axis on the x-axis of the plot; the sweep's by default."),
    ] = None,
    panel: Annotated[
        str | None, typer.Option(help="The sweep's axis that gets a panel for each value.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="The title of the plot.")] = None,
) -> None:
    """Plot the results of a sweep: the mean over seeds, with bars from lowest to highest."""
    from mptify.cli.console import console
    from mptify.errors import MptifyError
    from mptify.report.plots import curves_of, draw_figure
    from mptify.tools.sweep import read_results

    rows, figure, axes = read_results(results)
    x = x or (figure.x if figure else None)
    if x is None:
        raise MptifyError(f"Which axis is x? Choose --x from {', '.join(axes)}.")
    if out is not None and out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise MptifyError(f"{out}: the name of a plot ends in .png, .svg or .pdf.")
    curves = curves_of(rows, axes, x, panel or (figure.panel if figure else None))
    folder = results if results.is_dir() else results.parent
    paths = [out] if out is not None else [folder / "figure.png", folder / "figure.svg"]
    if title is None:
        title = figure.title if figure else ""
    draw_figure(curves, x, title, paths)
    left = sum(row["state"] != "done" for row in rows)
    note = f"; {left} of {len(rows)} runs are not done yet" if left else ""
    console().print(f"{' and '.join(map(str, paths))}{note}", markup=False)
