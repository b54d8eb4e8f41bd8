"""Which classes are told apart: a confusion matrix of few classes, the most confused pairs of many."""

from __future__ import annotations

from typing import Any

import numpy as np

from mptify.report.charts import Columns, columns, in_percent
from mptify.report.confusion import Judged
from mptify.report.markup import Markup, scrolling, table, tag

__all__ = ["classes_section"]

MOST_IN_MATRIX, MOST_PAIRS, MOST_LISTED = 30, 25, 10


def classes_section(judged: Judged | str, noted: float | None) -> Markup:
    """The figures and who is taken for whom; or, in a sentence, why there are none. `noted` is the accuracy that the search found."""
    heading = tag("h2", "Classes")
    if isinstance(judged, str):
        return tag("section", heading, tag("p", judged), id="classes")
    figures = judged.figures
    words = (
        f"The network as it is now, on {figures.images:,} validation images of {judged.source}: {figures.in_words(judged.classes)}. "
        f"{_compared(figures.top1, noted)}"
    )
    shown = _matrix(judged) if judged.classes <= MOST_IN_MATRIX else _many(judged)
    return tag("section", heading, tag("p", words), shown, id="classes")


def _compared(top1: float, noted: float | None) -> str:
    if noted is None or abs(top1 - noted) < 5e-7:
        return ""
    return f"The search noted {100 * noted:.2f} %: these are other images, or another machine rounds otherwise."


# -- few classes -----------------------------------------------------------------------------------------------------------


def _matrix(judged: Judged) -> Markup:
    counts, shares = judged.counts, judged.by_class
    short = all(len(judged.name(label)) <= 4 for label in range(judged.classes))
    heads = [judged.name(label) if short else str(label) for label in range(judged.classes)]
    rows = []
    for label in range(judged.classes):
        name = heads[label] if short or not judged.names else f"{judged.name(label)} {label}"
        cells = [_cell(int(count), int(counts[label].sum()), label == taken) for taken, count in enumerate(counts[label])]
        beside = tag("td", _share(shares[label]), class_="share")
        rows.append(tag("tr", tag("th", name, scope="row", title=judged.name(label)), *cells, beside))
    head = tag("tr", *(tag("th", one, scope="col") for one in ("is", *heads, "right")))
    words = (
        "Rows are the classes that images have, columns those that they were taken for. Blue is right, orange is wrong; the deeper, the "
        "more of the row’s images. The last column is the share of the class that was recognized."
    )
    matrix = tag("table", tag("thead", head), tag("tbody", *rows), class_="confusion")
    return tag("div", tag("p", words), scrolling("Confusion matrix", matrix), _pairs(judged, 5))


def _cell(count: int, total: int, right: bool) -> Markup:
    if not count:
        return tag("td", "·", class_="none")
    share = count / total
    depth = 0.2 + 0.75 * share
    return tag("td", count, class_=f"{'right' if right else 'wrong'}{' deep' if depth > 0.55 else ''}", style=f"--share:{depth:.2f}")


def _share(value: float) -> str:
    return "–" if np.isnan(value) else f"{100 * value:.1f} %"


# -- many classes ----------------------------------------------------------------------------------------------------------


def _many(judged: Judged) -> Markup:
    shares = judged.by_class
    known = [int(label) for label in np.argsort(shares, kind="stable") if not np.isnan(shares[label])]
    step = -(-len(known) // 300)  # more columns than that no chart can show
    drawn = columns(
        "Accuracy by class, worst first" + (f" (every {step}th)" if step > 1 else ""),
        Columns([judged.name(label) for label in known[::step]], [float(shares[label]) for label in known[::step]]),
        in_percent,
        across="class, by rank",
    )
    listed = [(judged.name(label), _share(shares[label])) for label in known]
    ends = tag(
        "div",
        scrolling("Worst classes", table(["recognized least", "right"], listed[:MOST_LISTED])),
        scrolling("Best classes", table(["recognized best", "right"], listed[: -MOST_LISTED - 1 : -1])),
        class_="charts",
    )
    return tag("div", tag("div", drawn, class_="charts"), _pairs(judged, MOST_PAIRS), ends)


def _pairs(judged: Judged, most: int) -> Markup:
    """Who is most often taken for whom."""
    confused = judged.confused
    if not confused:
        return tag("p", "No image was taken for one of another class.")
    totals = np.bincount(judged.true, minlength=judged.classes)
    rows: list[tuple[Any, ...]] = [
        (judged.name(true), judged.name(taken), f"{count:,}", _share(count / totals[true])) for true, taken, count in confused[:most]
    ]
    words = f"The most confused pairs, {len(rows)} of {len(confused):,}"
    return tag("div", tag("h3", words), scrolling(words, table(["is", "taken for", "images", "of its class"], rows, words=(0, 1))))
