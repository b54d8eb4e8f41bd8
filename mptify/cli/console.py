"""The console that commands print to."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

__all__ = ["console", "print_facts"]


def console() -> Console:
    """Terminal width on a terminal; in a pipe, lines as long as they are."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=200, soft_wrap=True, highlight=False)


def print_facts(out: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Names and what is to be said of them: a table that wraps on a terminal, plain lines in a pipe."""
    if not out.is_terminal:
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            out.print(f"{name:<{width}}  {text}", markup=False)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    out.print(table)
