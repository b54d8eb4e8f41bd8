"""The table as a page in Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from mptify.tools.compatibility.behaviours import BEHAVIOURS
from mptify.tools.compatibility.checking import Cell, Cells, State
from mptify.tools.zoo_rows import DEFAULT_BITS

__all__ = ["cells_in", "page", "row"]

_START = """# Compatibility with timm

mptify changes what a network computes, and other code still expects timm's network. This page shows
what of timm works on tickets: twelve behaviours, tried on one network of each of timm's families,
in both modes. `python -m mptify.tools.compatibility > docs/compatibility.md` writes it.

In 1/32 a ticket is the original network with other layers in it: it keeps its class and all of its
methods. In 1/1 activations become signs, so `forward` is rewritten as a graph, and the methods of
the original class no longer fit it. mptify keeps those that are a part of the graph. The others
raise `mptify.errors.NotKept`, an `AttributeError` that says why and what to do instead.

A behaviour works if the ticket gives what the dense network gives (as many outputs, of the same
shapes) and if its numbers agree with the ticket's own `forward`.

## What survives each mode

The figures count families: those where it works, of those whose dense network offers it.

| behaviour | 1/32 | 1/1 | what to know |
| --- | ---: | ---: | --- |
"""


def page(table: dict[str, Cells]) -> str:
    """The page in Markdown, from the cells of each family."""
    return "".join(_page(table))


def row(name: str, cells: dict[str, Cell], numbers: dict[str, int]) -> str:
    """The row of a family in the table of one mode. `numbers` maps reasons to their numbers."""
    marks = [str(numbers.get(cell.reason, cell.state.value)) for cell in cells.values()]
    return f"| `{name}` | " + " | ".join(marks) + " |\n"


def _page(table: dict[str, Cells]) -> Iterator[str]:
    yield _START
    for key, one in BEHAVIOURS.items():
        counts = [
            _count([cells[bits][key].state for cells in table.values()]) for bits in DEFAULT_BITS
        ]
        yield f"| {one.what} | {counts[0]} | {counts[1]} | {one.note} |\n"
    yield "\n## Each family\n\n"
    yield "● works · – the dense network does not offer it · a number: refused, since\n\n"
    numbers: dict[str, int] = {}
    for _, _, _, cell in cells_in(table, State.REFUSED):
        numbers.setdefault(cell.reason, len(numbers) + 1)
    for reason, number in numbers.items():
        yield f"{number}. {reason}.\n"
    if any(cells_in(table, State.FAILED)):
        yield "\n✗ fails:\n\n"
    for name, bits, key, cell in cells_in(table, State.FAILED):
        yield f"- `{name}` in {bits}, {key}: {cell.reason}\n"
    for bits in DEFAULT_BITS:
        yield f"\n### {bits}\n\n| family | " + " | ".join(BEHAVIOURS) + " |\n"
        yield "| --- |" + " :---: |" * len(BEHAVIOURS) + "\n"
        yield from (row(name, cells[bits], numbers) for name, cells in table.items())


def cells_in(table: dict[str, Cells], state: State) -> Iterator[tuple[str, str, str, Cell]]:
    """The cells in one state: family, mode, behaviour and cell."""
    for name, modes in table.items():
        for bits, cells in modes.items():
            for key, cell in cells.items():
                if cell.state is state:
                    yield name, bits, key, cell


def _count(states: list[State]) -> str:
    offered = sum(state is not State.NOT_OFFERED for state in states)
    works = states.count(State.WORKS)
    return f"all {offered}" if works == offered else f"{works} of {offered}"
