"""Charts as SVG: lines over epochs, columns over layers, one bar of parts. Colours are the page's, so they suit light and dark.

All are drawn 340 units wide, which is about a phone's width: shown there, or two in a row on a desk, their text stays legible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mptify.report.markup import Markup, joined, tag

__all__ = ["Columns", "Line", "columns", "in_percent", "in_short", "lines", "number", "parts_bar"]

_WIDTH, _HEIGHT = 340, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 34
_MOST_POINTS, _MOST_DOTS = 400, 40

Points = Sequence[tuple[float, float]]
Say = Callable[[float], str]


def in_percent(value: float) -> str:
    return f"{100 * value:.4g} %"


def in_short(value: float) -> str:
    return f"{value / 1e6:.4g} M" if abs(value) >= 1e6 else f"{value / 1e3:.4g} k" if abs(value) >= 1e3 else f"{value:.4g}"


def number(value: float) -> str:
    return f"{value:.4g}"


@dataclass(frozen=True)
class Line:
    """A curve: its name in the legend, points by rising x, and the class that colours it."""

    name: str
    points: Points
    style: str


@dataclass(frozen=True)
class Columns:
    """One column per name, each from 0; `ranges` are drawn as whiskers over them, `marks` as short strokes."""

    names: Sequence[str]
    values: Sequence[float]
    ranges: Sequence[tuple[float, float]] = ()
    marks: Sequence[float] = ()


# -- lines -----------------------------------------------------------------------------------------------------------------


def lines(title: str, curves: Sequence[Line], say: Say = number, *, across: str = "epoch") -> Markup:
    """Curves over a whole number such as the epoch. Values that are no numbers are left out."""
    curves = [Line(one.name, points, one.style) for one in curves if (points := _finite(one.points))]
    if not curves:
        return Markup("")
    xs = [x for one in curves for x, _ in one.points]
    ys = [y for one in curves for _, y in one.points]
    first, last = min(xs), max(xs)
    ticks = _ticks(min(ys), max(ys))

    def right(x: float) -> float:
        share = (x - first) / (last - first) if last > first else 0.5
        return _LEFT + 8 + share * (_WIDTH - _LEFT - _RIGHT - 16)

    down = _scale(ticks)
    drawn = [_value_axis(ticks, down, say), *(_below(right(x), number(x)) for x in _whole_ticks(first, last)), _title_below(across)]
    for one in curves:
        path = "L".join(f"{right(x):.1f} {down(y):.1f}" for x, y in one.points)
        drawn.append(tag("path", d=f"M{path}", class_=f"line {one.style}"))
        for x, y in one.points if len(one.points) <= _MOST_DOTS else ():
            words = tag("title", f"{one.name}, {across} {number(x)}: {say(y)}")
            drawn.append(tag("circle", words, cx=f"{right(x):.1f}", cy=f"{down(y):.1f}", r="2.4", class_=f"dot {one.style}"))
    said = "; ".join(f"{one.name} from {say(one.points[0][1])} to {say(one.points[-1][1])}" for one in curves)
    legend = [(one.name, f"stroke {one.style}") for one in curves] if len(curves) > 1 else []
    return _figure(title, legend, _svg(drawn, f"{title} over {across}: {said}"))


def _finite(points: Points) -> Points:
    """What can be drawn, thinned out where there are more points than a chart can show."""
    kept = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    step = -(-len(kept) // _MOST_POINTS)
    return kept if step <= 1 else [*kept[:-1:step], kept[-1]]


# -- columns ---------------------------------------------------------------------------------------------------------------


def columns(title: str, shown: Columns, say: Say = number, *, across: str = "layer", legend: Sequence[tuple[str, str]] = ()) -> Markup:
    """Columns by number, from 1; what each is called is in its tooltip."""
    count = len(shown.values)
    ticks = _ticks(0.0, max([*shown.values, *(high for _, high in shown.ranges), *shown.marks], default=1.0))
    down = _scale(ticks)
    step = (_WIDTH - _LEFT - _RIGHT) / max(count, 1)
    width = min(0.7 * step, 26)
    labels = [round(tick) for tick in _whole_ticks(1, count)]
    drawn = [_value_axis(ticks, down, say), *(_below(_LEFT + (tick - 0.5) * step, str(tick)) for tick in labels), _title_below(across)]
    for place, (name, value) in enumerate(zip(shown.names, shown.values, strict=True)):
        middle = _LEFT + (place + 0.5) * step
        words = [f"{place + 1}. {name}: {say(value)}"]
        bars = [_box(middle - width / 2, down(value), width, down(0) - down(value), "column")]
        if shown.ranges:
            low, high = shown.ranges[place]
            words.append(f"from {say(low)} to {say(high)}")
            bars.append(tag("path", d=f"M{middle:.1f} {down(low):.1f}V{down(high):.1f}", class_="whisker"))
        if shown.marks:
            words.append(f"{legend[-1][0]} {say(shown.marks[place])}" if legend else say(shown.marks[place]))
            reach = max(width / 2 + 1.5, 1.5)
            bars.append(tag("path", d=f"M{middle - reach:.1f} {down(shown.marks[place]):.1f}h{2 * reach:.1f}", class_="mark"))
        drawn.append(tag("g", tag("title", "; ".join(words)), *bars))
    lowest, highest = min(shown.values, default=0.0), max(shown.values, default=0.0)
    return _figure(title, legend, _svg(drawn, f"{title}, one column per {across}: from {say(lowest)} to {say(highest)}"))


# -- parts -----------------------------------------------------------------------------------------------------------------


def parts_bar(rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], say: Say) -> Markup:
    """Bars of parts below each other, all to one scale: (what a bar is, its parts as name, size and class)."""
    most = max(sum(size for _, size, _ in parts) for _, parts in rows) or 1.0
    drawn: list[Markup] = []
    for place, (name, parts) in enumerate(rows):
        top, at = 14 + 40 * place, 0.0
        drawn.append(tag("text", f"{name}: {say(sum(size for _, size, _ in parts))}", x="0", y=f"{top - 4}", class_="name"))
        for what, size, style in parts:
            width = size / most * _WIDTH
            drawn.append(tag("g", tag("title", f"{what}: {say(size)}"), _box(at, top, max(width - 0.6, 0.4), 14, f"part {style}")))
            at += width
    said = "; ".join(f"{name} {say(sum(size for _, size, _ in parts))}" for name, parts in rows)
    return _svg(drawn, f"Sizes to one scale: {said}", height=40 * len(rows) - 6)


# -- what charts are made of -----------------------------------------------------------------------------------------------


def _figure(title: str, legend: Sequence[tuple[str, str]], drawing: Markup) -> Markup:
    keys = tag("ul", *(tag("li", tag("span", class_=f"key {style}"), name) for name, style in legend), class_="legend") if legend else None
    return tag("figure", tag("figcaption", tag("b", title), keys), drawing, class_="chart")


def _svg(drawn: Sequence[Any], label: str, height: float = _HEIGHT) -> Markup:
    return tag("svg", joined(drawn, "\n"), viewBox=f"0 0 {_WIDTH} {height:g}", role="img", aria_label=label)


def _scale(ticks: Sequence[float]) -> Callable[[float], float]:
    """From values to heights on the drawing."""
    low, high = ticks[0], ticks[-1]
    return lambda y: _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)


def _value_axis(ticks: Sequence[float], down: Any, say: Say) -> Markup:
    rules = [tag("path", d=f"M{_LEFT} {down(tick):.1f}H{_WIDTH - _RIGHT}", class_="rule") for tick in ticks]
    names = [tag("text", say(tick), x=_LEFT - 6, y=f"{down(tick) + 3.5:.1f}", class_="tick", text_anchor="end") for tick in ticks]
    return joined([*rules, *names])


def _below(x: float, text: str) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=_HEIGHT - _BOTTOM + 15, class_="tick", text_anchor="middle")


def _title_below(text: str) -> Markup:
    return tag("text", text, x=(_WIDTH + _LEFT - _RIGHT) / 2, y=_HEIGHT - 4, class_="name", text_anchor="middle")


def _box(x: float, y: float, width: float, height: float, style: str) -> Markup:
    return tag("rect", x=f"{x:.1f}", y=f"{y:.1f}", width=f"{width:.1f}", height=f"{max(height, 0):.1f}", class_=style)


def _ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers, a few, that reach from below the lowest value to above the highest."""
    span = high - low or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / about))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if span / (unit * factor) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, max(last, first + 1) + 1)]


def _whole_ticks(first: float, last: float, about: int = 8) -> list[float]:
    """Some whole numbers from the first to the last: all if they are few, else round ones and the first."""
    if last - first <= about:
        return [float(value) for value in range(round(first), round(last) + 1)]
    step = max(1, round(_ticks(first, last, about)[1] - _ticks(first, last, about)[0]))
    inside = [float(value) for value in range(0, round(last) + 1, step) if value - first > 0.6 * step]
    return [first, *inside]
