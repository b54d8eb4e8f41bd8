"""What a search asks of the process that it runs in."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["born_deaf", "keep_freed_memory", "leave_stopping_to_the_search", "stoppable"]


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
        asked.append(True)
        if len(asked) == 1:
            tell()

    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        for number in (signal.SIGINT, signal.SIGTERM) if can_save else ():
            before[number] = signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_SECONDS_LEFT = 30


@contextlib.contextmanager
def born_deaf() -> Iterator[None]:
    """Processes that are started within don't hear SIGTERM until `leave_stopping_to_the_search` has run in them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_stopping_to_the_search(_: int) -> None:
    """For a process that reads images: a signal may have gone to all of a search's processes, and the search saves first.

    It ends with the search then, and half a minute after a SIGTERM in any case.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(_SECONDS_LEFT))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
