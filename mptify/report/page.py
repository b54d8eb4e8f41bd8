"""One HTML page of a run or of a ticket file, with everything in it: no address in it leads anywhere else."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from mptify.errors import MptifyError
from mptify.files import check_writable, write_whole
from mptify.report.classes import classes_section
from mptify.report.collect import Findings, gather
from mptify.report.confusion import Judged, judge, require_device
from mptify.report.layers import layers_section, masks_section, size_section
from mptify.report.markup import Markup, tag
from mptify.report.overview import (
    commands_section,
    curves_section,
    place_name,
    searched_section,
    tiles,
    title_of,
    versions,
)

__all__ = ["page_of", "write_report"]

_SIGN = '<meta name="generator" content="mptify report">'  # by which a page of ours is known again
_NOT_JUDGED = "No images were run for this page (--no-data), so nothing is said of single classes."


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
    """Write the page of a run's folder or of a ticket file, and return where it is: RUN/report.html, or FILE's name with .html.

    `with_data` runs the validation images that the recipe names, at most `most_images` of them, for the confusion matrix; where they
    can't be opened, the page says so. A file that is no such page is never overwritten. `tick` is told how many images are done.
    """
    place = Path(place)
    target = Path(out) if out is not None else place / "report.html" if place.is_dir() else place.with_suffix(".html")
    findings = gather(place)
    _require_ours(target)
    judged: Judged | str = _NOT_JUDGED
    if with_data:
        require_device(device)
        try:
            judged = judge(findings, most=most_images, batch=batch, device=device, tick=tick)
        except MptifyError as error:
            judged = f"Nothing can be said of single classes here. {error}"
    write_whole(target, page_of(findings, judged))
    return target


def page_of(findings: Findings, judged: Judged | str) -> str:
    """The page's text."""
    title = title_of(findings)
    cut = findings.cut
    sections = [
        ("searched", "Recipe" if findings.recipe is not None else "Ticket", searched_section(findings)),
        ("curves", "Curves", curves_section(findings)),
        ("classes", "Classes", classes_section(judged, findings.accuracy)),
    ]
    if cut is not None:
        inside = [("layers", "Layers", layers_section(cut)), ("masks", "Masks", masks_section(cut)), ("size", "Size", size_section(cut))]
        sections += inside
    sections.append(("again", "Commands", commands_section(findings)))
    links = tag("nav", tag("ul", *(tag("li", tag("a", name, href=f"#{key}")) for key, name, _ in sections)), aria_label="On this page")
    above = tag("p", f"mptify report of {place_name(findings.place)}", class_="above")
    header = tag("header", above, tag("h1", title.replace(" %", "\u00a0%")), tiles(findings), links)
    written = f"Written on {datetime.date.today().isoformat()} with {versions()}. This page holds all that it shows; it loads nothing."
    body = tag("body", header, tag("main", *(section for _, _, section in sections)), tag("footer", written))
    return f"{_head(title)}{body}</html>\n"


def _head(title: str) -> str:
    style = resources.files("mptify.report").joinpath("style.css").read_text(encoding="utf-8")
    parts: list[Any] = [
        tag("meta", charset="utf-8"), Markup(_SIGN), tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"), tag("title", title), tag("style", Markup(style)),
    ]  # fmt: skip
    return "<!DOCTYPE html>\n" + '<html lang="en">' + tag("head", *parts)


def _require_ours(target: Path) -> None:
    """Raise, before any work, where the page can't be written or something else would be lost."""
    check_writable(target)
    if target.exists():
        with target.open("rb") as file:
            beginning = file.read(1000)
        if _SIGN.encode() not in beginning:
            raise MptifyError(f"{target} exists and is no mptify report; remove it first, or name another file with --out.")
