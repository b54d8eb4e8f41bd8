"""Charts: lines over epochs, columns over layers, and bars of parts.

All are 340 units wide, about a phone's width, so their text stays legible there and when two
stand side by side. The page's style sheet colours them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mptify.report.svg import Shape, circle, group, path, rect, text

__all__ = ["Chart", "Columns", "Line", "column_chart", "in_short", "line_chart", "parts_chart"]

_WIDTH, _HEIGHT = 340, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 34
_MOST_POINTS, _MOST_DOTS = 400, 40

Points = Sequence[tuple[float, float]]
Format = Callable[[float], str]
Legend = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Chart:
    """Shapes to draw, under a title and a legend of (name, style); `label` says it in words."""

    title: str
    label: str
    shapes: list[Shape]
    legend: Legend = ()
    width: int = _WIDTH
    height: int = _HEIGHT


@dataclass(frozen=True)
class Line:
    """A curve: its name in the legend, points by rising x, and the CSS class that colours it."""

    name: str
    points: Points
    style: str


@dataclass(frozen=True)
class Columns:
    """One column per name, from 0; `ranges` are drawn as whiskers, `marks` as short strokes."""

    names: Sequence[str]
    values: Sequence[float]
    ranges: Sequence[tuple[float, float]] = ()
    marks: Sequence[float] = ()


def in_short(value: float) -> str:
    for unit, name in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{name}"
    return _number(value)


def _number(value: float) -> str:
    return f"{value:.4g}"


# -- lines -----------------------------------------------------------------------------------


def line_chart(title: str, lines: Sequence[Line], say: Format = _number) -> Chart | None:
    """Lines over epochs, without values that are not finite; None if there are no others."""
    lines = [Line(one.name, kept, one.style) for one in lines if (kept := _finite(one.points))]
    if not lines:
        return None
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    first, last = min(xs), max(xs)
    ticks = _ticks(min(ys), max(ys))
    down = _scale(ticks)

    def right(x: float) -> float:
        share = (x - first) / (last - first) if last > first else 0.5
        return _LEFT + 8 + share * (_WIDTH - _LEFT - _RIGHT - 16)

    below = [(right(x), _number(x)) for x in _whole_ticks(first, last)]
    shapes = _axes(ticks, down, say, below, "epoch")
    for line in lines:
        points = [(right(x), down(y)) for x, y in line.points]
        corners = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        shapes.append(path(f"M{corners}", class_=f"line {line.style}"))
        if len(points) <= _MOST_DOTS:
            for (epoch, value), (x, y) in zip(line.points, points, strict=True):
                words = f"{line.name}, epoch {_number(epoch)}: {say(value)}"
                shapes.append(circle(x, y, 2.4, words, class_=f"dot {line.style}"))
    said = [f"{one.name} from {say(one.points[0][1])} to {say(one.points[-1][1])}" for one in lines]
    legend = [(line.name, f"stroke {line.style}") for line in lines] if len(lines) > 1 else []
    return Chart(title, f"{title} over epoch: {'; '.join(said)}", shapes, legend)


def _finite(points: Points) -> Points:
    """What can be drawn, thinned out where there are more points than a chart can show."""
    kept = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    step = -(-len(kept) // _MOST_POINTS)
    return kept if step <= 1 else [*kept[:-1:step], kept[-1]]


# -- columns ---------------------------------------------------------------------------------


def column_chart(
    title: str,
    columns: Columns,
    say: Format = _number,
    *,
    across: str = "layer",
    legend: Legend = (),
) -> Chart:
    """Columns numbered from 1; a tooltip names each. The legend's last entry names the marks."""
    highest = [*columns.values, *(high for _, high in columns.ranges), *columns.marks]
    ticks = _ticks(0.0, max(highest, default=1.0))
    down = _scale(ticks)
    count = len(columns.values)
    step = (_WIDTH - _LEFT - _RIGHT) / max(count, 1)
    width = min(0.7 * step, 26)
    below = [(_LEFT + (tick - 0.5) * step, f"{tick:.0f}") for tick in _whole_ticks(1, count)]
    shapes = _axes(ticks, down, say, below, across)
    for place, (name, value) in enumerate(zip(columns.names, columns.values, strict=True)):
        middle, height = _LEFT + (place + 0.5) * step, max(down(0) - down(value), 0.0)
        words = [f"{place + 1}. {name}: {say(value)}"]
        drawn = [rect(middle - width / 2, down(value), width, height, class_="column")]
        if columns.ranges:
            low, high = columns.ranges[place]
            words.append(f"from {say(low)} to {say(high)}")
            drawn.append(path(f"M{middle:.1f} {down(low):.1f}V{down(high):.1f}", class_="whisker"))
        if columns.marks:
            mark, reach = columns.marks[place], max(width / 2 + 1.5, 1.5)
            words.append(f"{legend[-1][0]} {say(mark)}")
            stroke = f"M{middle - reach:.1f} {down(mark):.1f}h{2 * reach:.1f}"
            drawn.append(path(stroke, class_="mark"))
        shapes.append(group(drawn, "; ".join(words)))
    low, high = min(columns.values, default=0.0), max(columns.values, default=0.0)
    label = f"{title}, one column per {across}: from {say(low)} to {say(high)}"
    return Chart(title, label, shapes, legend)


# -- parts -----------------------------------------------------------------------------------


def parts_chart(bars: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], say: Format) -> Chart:
    """Bars to one scale: the name of each, and its parts as (name, size, CSS class)."""
    totals = [sum(size for _, size, _ in parts) for _, parts in bars]
    names = [f"{name}: {say(total)}" for (name, _), total in zip(bars, totals, strict=True)]
    shapes: list[Shape] = []
    for place, (_, parts) in enumerate(bars):
        top, left = 14 + 40 * place, 0.0
        shapes.append(text(names[place], 0, top - 4, class_="name"))
        for what, size, style in parts:
            width = size / (max(totals) or 1.0) * _WIDTH
            bar = rect(left, top, max(width - 0.6, 0.4), 14, class_=f"part {style}")
            shapes.append(group([bar], f"{what}: {say(size)}"))
            left += width
    label = f"Sizes to one scale: {'; '.join(names)}"
    return Chart("", label, shapes, height=40 * len(bars) - 6)


# -- axes ------------------------------------------------------------------------------------


def _axes(
    ticks: Sequence[float],
    down: Callable[[float], float],
    say: Format,
    below: list[tuple[float, str]],
    across: str,
) -> list[Shape]:
    shapes = [path(f"M{_LEFT} {down(tick):.1f}H{_WIDTH - _RIGHT}", class_="rule") for tick in ticks]
    for tick in ticks:
        y = down(tick) + 3.5
        shapes.append(text(say(tick), _LEFT - 6, y, class_="tick", text_anchor="end"))
    for x, words in below:
        y = _HEIGHT - _BOTTOM + 15
        shapes.append(text(words, x, y, class_="tick", text_anchor="middle"))
    middle = (_WIDTH + _LEFT - _RIGHT) / 2
    return [*shapes, text(across, middle, _HEIGHT - 4, class_="name", text_anchor="middle")]


def _scale(ticks: Sequence[float]) -> Callable[[float], float]:
    """From values to heights on the drawing."""
    low, high = ticks[0], ticks[-1]
    return lambda y: _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)


def _ticks(low: float, high: float, about: int = 4) -> list[float]:
    """A few round numbers from below the lowest value to above the highest."""
    span = high - low or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / about))
    step = next(unit * one for one in (1, 2, 2.5, 5, 10) if span / (unit * one) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, max(last, first + 1) + 1)]


def _whole_ticks(first: float, last: float, about: int = 8) -> list[float]:
    """All whole numbers from the first to the last if they are few, else round ones."""
    if last - first <= about:
        return [float(value) for value in range(round(first), round(last) + 1)]
    low, high, *_ = _ticks(first, last, about)
    step = max(1, round(high - low))
    inside = range(0, round(last) + 1, step)
    return [first, *(float(value) for value in inside if value - first > 0.6 * step)]
