"""Writes one HTML page of a run or of a ticket file; the page loads nothing from elsewhere."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

from mptify.errors import MptifyError
from mptify.files import check_writable, write_whole
from mptify.recipe_files import to_yaml
from mptify.report.collect import ReportData, collect_report
from mptify.report.commands import command_steps
from mptify.report.confusion import (
    ConfusionMatrix,
    classes_context,
    measure_confusion,
    require_device,
)
from mptify.report.layers import layers_context, masks_context, size_context
from mptify.report.overview import (
    curves_context,
    facts_of,
    place_name,
    tiles_of,
    title_of,
    versions,
)
from mptify.report.templating import render

__all__ = ["render_page", "write_report"]

_GENERATOR = "mptify report"  # in a meta element, by which a page of ours is known again
_NO_IMAGES = "There is no confusion matrix: no images were run for this page (--no-data)."


def write_report(
    place: str | Path,
    out: str | Path | None = None,
    *,
    with_data: bool = True,
    most_images: int | None = None,
    batch: int = 256,
    device: str = "cpu",
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write the page of a run's folder or of a ticket file.

    Args:
        place: The folder of a run, or a ticket file.
        out: The page; RUN/report.html, or FILE's name with .html, unless given.
        with_data: Run the validation images that the recipe names, for the confusion matrix.
            Where they can't be opened, the page says so.
        most_images: Run at most so many images.
        batch: Images per step.
        device: Where to run them.
        tick: Called with the number of images done, and of all images.

    Returns:
        Where the page is.

    Raises:
        MptifyError: `place` is not a run or a ticket, or another file would be overwritten.
    """
    place = Path(place)
    default = place / "report.html" if place.is_dir() else place.with_suffix(".html")
    target = Path(out) if out is not None else default
    data = collect_report(place)
    _require_ours(target)
    matrix: ConfusionMatrix | str = _NO_IMAGES
    if with_data:
        require_device(device)
        try:
            matrix = measure_confusion(
                data, most=most_images, batch=batch, device=device, tick=tick
            )
        except MptifyError as error:
            matrix = f"There is no confusion matrix. {error}"
    write_whole(target, render_page(data, matrix))
    return target


def render_page(data: ReportData, matrix: ConfusionMatrix | str) -> str:
    """The page's HTML; in place of a matrix, a sentence says why there is none."""
    file, recipe = data.file, data.recipe
    sections = {"searched": "Recipe" if recipe is not None else "Ticket", "curves": "Curves"}
    sections["classes"] = "Classes"
    if file is not None:
        sections |= {"layers": "Layers", "masks": "Masks", "size": "Size"}
    sections["again"] = "Commands"
    return render(
        "page.html.j2",
        generator=_GENERATOR,
        title=title_of(data),
        place=place_name(data.place),
        sections=sections,
        tiles=tiles_of(data),
        facts=facts_of(data),
        recipe=to_yaml(recipe) if recipe is not None else None,
        is_dense=data.is_dense,
        warnings=data.curve.warnings if data.curve is not None else [],
        curves=curves_context(data),
        classes=matrix if isinstance(matrix, str) else classes_context(matrix, data.accuracy),
        layers=layers_context(file) if file is not None else None,
        masks=masks_context(file) if file is not None else None,
        size=size_context(file) if file is not None else None,
        commands=command_steps(data),
        date=datetime.date.today().isoformat(),
        versions=versions(),
    )


def _require_ours(target: Path) -> None:
    """Raise, before any work, where the page can't be written or another file would be lost."""
    check_writable(target)
    if target.exists():
        with target.open("rb") as file:
            beginning = file.read(1000)
        if f'<meta name="generator" content="{_GENERATOR}">'.encode() not in beginning:
            raise MptifyError(
                f"{target} exists and is not an mptify report; remove it first, "
                "or name another file with --out."
            )
