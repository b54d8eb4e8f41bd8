"""The console that commands print to."""

from __future__ import annotations

from rich.console import Console

__all__ = ["console"]


def console() -> Console:
    """Terminal width on a terminal; in a pipe, lines as long as they are."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=200, soft_wrap=True, highlight=False)
