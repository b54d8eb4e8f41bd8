"""The console that commands print to."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console

__all__ = ["Whole", "console", "print_facts"]


def console() -> Console:
    """Terminal width on a terminal; in a pipe, lines as long as they are."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=200, soft_wrap=True, highlight=False)


class Whole(str):
    """A path or a command, which is to be copied: never wrapped by us."""


def print_facts(out: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Names and what is to be said of them. On a terminal sentences wrap, at the ends of words."""
    from rich.text import Text

    names = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        lines = [str(text)]
        if out.is_terminal and not isinstance(text, Whole):
            lines = textwrap.wrap(
                text, max(out.width - names, 20), break_long_words=False, break_on_hyphens=False
            ) or [""]
        for line in lines:
            out.print(Text.assemble((f"{name:<{names}}", "bold"), line), soft_wrap=True)
            name = ""
