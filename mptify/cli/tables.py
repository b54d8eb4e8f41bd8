"""Tables for the terminal: each column knows its heading, its cells and when to hide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

__all__ = ["Column", "make_table"]


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        heading: The text above the column.
        cell: A function from a row's data to the text of its cell.
        left: Whether to align the cells to the left, as words are, not to the right, as numbers.
        wraps: Whether a long cell may take several lines.
        min_width: The width of the terminal from which the column is shown.
    """

    heading: str
    cell: Callable[[Any], str | Text]
    left: bool = False
    wraps: bool = False
    min_width: int = 0


def make_table(
    columns: Sequence[Column],
    rows: Iterable[Any],
    *,
    width: int | None = None,
    wrap_all: bool = False,
    **style: Any,
) -> Table:
    """Make a table without borders.

    Args:
        columns: The columns, from left to right.
        rows: The data of each row, which the `cell` functions of the columns format.
        width: The width of the terminal, to leave out columns that need more; None keeps all.
        wrap_all: Whether all columns may wrap.
        style: Further arguments for `rich.table.Table`.

    Returns:
        The table, for `console().print`.
    """
    shown = [column for column in columns if width is None or width >= column.min_width]
    table = Table(**{"box": None, "pad_edge": False, **style})
    for column in shown:
        table.add_column(
            column.heading,
            justify="left" if column.left else "right",
            no_wrap=not (column.wraps or wrap_all),
            overflow="fold" if column.wraps else "ellipsis",
        )
    for row in rows:
        table.add_row(*(column.cell(row) for column in shown))
    return table
