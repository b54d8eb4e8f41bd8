"""HTML by construction: whatever is not markup already is escaped, so that no ticket can write into the page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Markup", "joined", "plain", "scrolling", "table", "tag"]

_VOID = {"img", "meta"}


class Markup(str):
    """Text that is HTML already; only functions of this package make it."""

    __slots__ = ()


def plain(value: Any) -> Markup:
    """Any value as text: escaped, and without characters that can't be seen or that turn the line around."""
    if isinstance(value, Markup):
        return value
    shown = "".join(one if one.isprintable() or one in "\n\u00a0" else "�" for one in str(value))
    return Markup(html.escape(shown))


def tag(name: str, /, *inside: Any, **attributes: Any) -> Markup:
    """An element; attributes that are None or False are left out, and `class_` and `aria_label` are spelt as HTML does."""
    said = "".join(f' {_spelt(key)}="{plain(value)}"' for key, value in attributes.items() if value is not None and value is not False)
    return Markup(f"<{name}{said}>" if name in _VOID else f"<{name}{said}>{joined(inside)}</{name}>")


def joined(parts: Iterable[Any], between: str = "") -> Markup:
    """Several parts one after the other; None is nothing."""
    return Markup(between.join(plain(part) for part in parts if part is not None))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, words: Iterable[int] = (0,), caption: str = "") -> Markup:
    """Rows of cells under a head; the columns numbered in `words` are aligned to the left, the first cell of a row is its heading."""
    left = set(words)
    sides = ["word" if number in left else None for number in range(len(columns))]
    head = tag("tr", *(tag("th", column, scope="col", class_=side) for column, side in zip(columns, sides, strict=True)))
    body = []
    for first, *others in rows:
        cells = [tag("td", cell, class_=side) for cell, side in zip(others, sides[1:], strict=True)]
        body.append(tag("tr", tag("th", first, scope="row", class_=sides[0]), *cells))
    return tag("table", tag("caption", caption) if caption else None, tag("thead", head), tag("tbody", *body))


def scrolling(what: str, *inside: Any) -> Markup:
    """A box that scrolls sideways by itself, by finger and by key, so that the page never does."""
    return tag("div", *inside, class_="scroll", role="region", aria_label=what, tabindex="0")


def _spelt(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
