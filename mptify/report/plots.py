"""Figures that matplotlib draws: results of a sweep, and times of packed programs.

A sweep is drawn as in the paper: the mean over seeds, with bars to the lowest and the highest.
"""

from __future__ import annotations

import io
import itertools
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mptify.errors import MptifyError
from mptify.files import write_whole

__all__ = [
    "Curve",
    "Point",
    "curves_of",
    "draw_accuracies",
    "draw_figure",
    "draw_prune_times",
    "figure_of",
]

# Told apart by most eyes.
_COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#762a83", "#b35806", "#01665e", "#c51b7d", "#4d4d4d")
_MARKS = "osD^vP*X"
_LETTERS = 11  # of a title, per inch
_MOST_TICKS, _CLOSEST = 8, 0.06  # the latter of the axis


@dataclass(frozen=True)
class Point:
    """One place of a sweep: mean, lowest and highest top-1 of its seeds."""

    x: float | str | None  # None where the line does not vary along x
    mean: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True)
class Curve:
    panel: str
    label: str
    points: tuple[Point, ...]


def curves_of(
    rows: Sequence[Mapping[str, Any]], axes: Sequence[str], x: str, panel: str | None
) -> list[Curve]:
    """The lines of a figure.

    There is one for each panel, line of the sweep, and value of the axes that are neither `x` nor
    `panel`.
    """
    for axis in (x, panel):
        if axis is not None and axis not in axes:
            raise MptifyError(
                f"The results have no axis {axis!r}; there are {', '.join(axes) or 'none'}."
            )
    done = [row for row in rows if row["state"] == "done"]
    if not done:
        raise MptifyError(f"None of the {len(rows)} runs is done yet: there is nothing to draw.")
    panels = list(dict.fromkeys(row[panel] for row in done if row[panel])) if panel else [""]
    others = [axis for axis in axes if axis not in (x, panel)]
    curves = []
    for one in panels:
        found: dict[str, dict[Any, list[float]]] = {}
        for row in done:
            if not panel or row[panel] in (one, ""):
                places = [named(axis, row[axis]) for axis in others if row[axis]]
                label = ", ".join([row["line"], *places])
                found.setdefault(label, {}).setdefault(_number(row[x]), []).append(_accuracy(row))
        for label, seeds in found.items():
            points = [
                Point(place, statistics.fmean(some), min(some), max(some), len(some))
                for place, some in sorted(seeds.items(), key=_order)
            ]
            curves.append(Curve(named(panel, one) if panel else "", label, tuple(points)))
    return curves


def _order(item: tuple[Any, Any]) -> tuple[bool, bool, Any]:
    """Numbers first, then no place, then names."""
    return isinstance(item[0], str), item[0] is None, item[0]


def _accuracy(row: Mapping[str, Any]) -> float:
    try:
        return float(row["top1"])
    except (TypeError, ValueError):
        raise MptifyError(
            f"Run {row['run']!r} is done, and its top1 is {row['top1']!r}, which is no number."
        ) from None


def draw_figure(curves: Sequence[Curve], x: str, title: str, paths: Sequence[Path]) -> None:
    """A file for each path, of the kind that its suffix says."""
    figure = figure_of(curves, x, title)
    for path in paths:
        _write(figure, path, dpi=150)


def draw_prune_times(
    prunes: Sequence[float],
    dense: float,
    packed: Mapping[str, Sequence[float]],
    name: str,
    path: Path,
) -> None:
    """Milliseconds against the pruned fraction.

    Args:
        prunes: The pruned fractions.
        dense: The time of the dense network.
        packed: For each bits, the times of the packed network at these fractions.
        name: The name of the network.
        path: The file to write.
    """
    figure, axes = _single()
    percent = [100 * rate for rate in prunes]
    for (bits, times), colour, mark in zip(packed.items(), _COLOURS, _MARKS):
        axes.plot(percent, times, f"{mark}-", color=colour, label=f"packed {bits} {name}")
    words = "the same network in float32 (torch)"
    axes.axhline(dense, color="#999999", linestyle="--", label=words)
    axes.set_xlabel("pruned, %")
    axes.set_ylabel("ms per image")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _write(figure, path, dpi=160)


def draw_accuracies(points: Sequence[tuple[str, float, float]], title: str, path: Path) -> None:
    """Accuracy against time: points of (label, milliseconds, top-1)."""
    figure, axes = _single()
    for number, (label, ms, top1) in enumerate(points):
        mark, colour = _MARKS[number % len(_MARKS)], _COLOURS[-1 - number % len(_COLOURS)]
        axes.plot(ms, top1, mark, color=colour, markersize=8, label=label)
    axes.set_xscale("log")
    ticks = [one for one in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if _spans(points, one)]
    axes.set_xticks(ticks, [f"{one:g}" for one in ticks])
    axes.minorticks_off()
    axes.margins(x=0.1, y=0.12)
    axes.legend(frameon=False, loc="lower right")
    axes.set_xlabel("ms per image, one thread")
    axes.set_ylabel("top-1, %")
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=10)
    _write(figure, path, dpi=160)


def _spans(points: Sequence[tuple[str, float, float]], ms: float) -> bool:
    """Whether a time is in the range of the points, or next to it."""
    times = [time for _, time, _ in points]
    return min(times) / 2 <= ms <= max(times) * 2


def _single() -> tuple[Any, Any]:
    """A figure of one panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _write(figure: Any, path: Path, dpi: int) -> None:
    buffer = io.BytesIO()
    kind = path.suffix.removeprefix(".").lower()
    metadata = {"Date": None} if kind == "svg" else None
    figure.savefig(buffer, dpi=dpi, format=kind, metadata=metadata)
    write_whole(path, buffer.getvalue())


def figure_of(curves: Sequence[Curve], x: str, title: str) -> Any:
    """Matplotlib's figure, one panel beside the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(curve.panel for curve in curves))
    labels = list(dict.fromkeys(curve.label for curve in curves))
    figure = Figure(figsize=(max(4.6, 2.9 * len(panels) + 0.8), 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    everywhere = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    scale = 100 if x.rpartition(".")[2] == "prune" else 1
    for axes, panel in zip(everywhere, panels, strict=True):
        for curve in (curve for curve in curves if curve.panel == panel):
            number = labels.index(curve.label)
            look: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)], "label": curve.label}
            if [point.x for point in curve.points] == [None]:  # the same whatever x is
                (point,) = curve.points
                axes.axhline(point.mean, linestyle="--", **look)
                axes.axhspan(point.low, point.high, color=look["color"], alpha=0.12, linewidth=0)
                continue
            xs = [one.x if isinstance(one.x, str) else scale * (one.x or 0) for one in curve.points]
            means = [point.mean for point in curve.points]
            below = [point.mean - point.low for point in curve.points]
            above = [point.high - point.mean for point in curve.points]
            look |= {"marker": _MARKS[number % len(_MARKS)], "markersize": 4, "linewidth": 1.4}
            axes.errorbar(xs, means, [below, above], capsize=3, **look)
        points = [point for curve in curves if curve.panel == panel for point in curve.points]
        at = sorted({scale * point.x for point in points if isinstance(point.x, float)})
        closest = min((right - left for left, right in itertools.pairwise(at)), default=0)
        if 1 < len(at) <= _MOST_TICKS and closest > _CLOSEST * (at[-1] - at[0]):
            axes.set_xticks(at, [f"{place:g}" for place in at])  # only where there are points
        axes.set_title(panel, fontsize=10)
        axes.set_xlabel(axis_title(x))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    everywhere[0].set_ylabel("top-1, %")
    handles: dict[str, Any] = {}
    for axes in everywhere:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": min(len(handles), 4)}
    figure.legend(handles.values(), handles.keys(), frameon=False, fontsize=9, **where)
    if title:
        figure.suptitle(textwrap.fill(title, int(_LETTERS * figure.get_figwidth())), fontsize=11)
    return figure


def axis_title(axis: str) -> str:
    """`ticket.prune` is `pruned, %`."""
    last = axis.rpartition(".")[2]
    return {"prune": "pruned, %", "model": "network"}.get(last, last.replace("_", " "))


def named(axis: str | None, value: str) -> str:
    """A place on an axis in words: `80 % pruned`, `conv4`."""
    last = (axis or "").rpartition(".")[2]
    if last == "prune":
        return f"{100 * float(value):g} % pruned"
    return value.rpartition(":")[2] if last == "model" else f"{axis_title(last)} {value}"


def _number(text: str) -> float | str | None:
    try:
        return float(text) if text else None
    except ValueError:
        return text.rpartition(":")[2]
