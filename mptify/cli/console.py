"""The console that commands print to."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

__all__ = ["Unwrapped", "console", "print_fields"]


def console() -> Console:
    """A console as wide as the terminal. In a pipe, lines are not wrapped."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=200, soft_wrap=True, highlight=False)


class Unwrapped(str):
    """A path or a command. It is printed on one line, so that users can copy it."""


def print_fields(out: Console, fields: Sequence[tuple[str, str]]) -> None:
    """Print names and values in two columns. On a terminal, long values wrap between words.

    Args:
        out: The console.
        fields: Pairs of name and value. `Unwrapped` values stay on one line.
    """
    name_width = max(len(name) for name, _ in fields) + 2
    for name, value in fields:
        lines = [str(value)]
        if out.is_terminal and not isinstance(value, Unwrapped):
            lines = textwrap.wrap(
                value,
                max(out.width - name_width, 20),
                break_long_words=False,
                break_on_hyphens=False,
            ) or [""]
        for number, line in enumerate(lines):
            label = name if number == 0 else ""
            out.print(Text.assemble((f"{label:<{name_width}}", "bold"), line), soft_wrap=True)
