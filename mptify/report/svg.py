"""The shapes that the report's charts and the drawing of the surgery are made of.

`templates/svg.j2` writes them. A drawing library would bring its own look; these take their
colours from the page, so they suit light and dark, and stay legible on a phone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Shape", "circle", "group", "path", "rect", "text"]


@dataclass(frozen=True)
class Shape:
    """One SVG element. `title` is its tooltip; `inside` is drawn after its text."""

    tag: str
    attributes: dict[str, Any]
    text: str = ""
    title: str = ""
    inside: tuple[Shape, ...] = ()


def rect(x: float, y: float, width: float, height: float, **attributes: Any) -> Shape:
    return _shape("rect", x=x, y=y, width=width, height=height, **attributes)


def circle(x: float, y: float, radius: float, title: str = "", **attributes: Any) -> Shape:
    return _shape("circle", title=title, cx=x, cy=y, r=radius, **attributes)


def path(commands: str, **attributes: Any) -> Shape:
    return _shape("path", d=commands, **attributes)


def text(words: str, x: float, y: float, inside: Iterable[Shape] = (), **attributes: Any) -> Shape:
    return _shape("text", text=words, inside=inside, x=x, y=y, **attributes)


def group(shapes: Iterable[Shape], title: str = "", **attributes: Any) -> Shape:
    return _shape("g", title=title, inside=shapes, **attributes)


def _shape(
    tag: str, *, text: str = "", title: str = "", inside: Iterable[Shape] = (), **attributes: Any
) -> Shape:
    """`class_` and `text_anchor` are spelt as SVG does; None is left out; floats are rounded."""
    spelt = {
        name.rstrip("_").replace("_", "-"): f"{value:.1f}" if isinstance(value, float) else value
        for name, value in attributes.items()
        if value is not None
    }
    return Shape(tag, spelt, text, title, tuple(inside))
