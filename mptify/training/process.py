"""What a search asks of the process that it runs in."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["keep_freed_memory", "outlive_one_signal", "stoppable"]


def keep_freed_memory() -> None:
    """Tell glibc not to give freed memory back: each step would pay again for the pages that the last one let go."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for setting in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(setting, 1 << 30)


@contextlib.contextmanager
def stoppable(can_save: bool, tell: Callable[[], None]) -> Iterator[list[bool]]:
    """Ctrl-C and SIGTERM ask for a stop after the current step, if anything can be saved; a second Ctrl-C stops at once.

    `tell` is called when they do, in the middle of whatever the process is doing.
    """
    asked: list[bool] = []
    before: dict[signal.Signals, Any] = {}

    def ask(number: int, frame: Any) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not asked:
            tell()
        asked.append(True)

    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        for number in (signal.SIGINT, signal.SIGTERM) if can_save else ():
            before[number] = signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def outlive_one_signal(_: int) -> None:
    """For a process that reads images: a SIGTERM may have gone to all of a search's processes, and the search is to save first.

    A second one ends it.
    """

    def end(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, end)
