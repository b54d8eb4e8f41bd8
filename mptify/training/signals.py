"""Signals and memory settings of the process that runs a search."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["init_worker_signals", "keep_freed_memory", "sigterm_blocked", "stoppable"]


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory, so that steps need not touch fresh pages."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for setting in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(setting, 1 << 30)


@contextlib.contextmanager
def stoppable(can_save: bool, tell: Callable[[], None]) -> Iterator[list[bool]]:
    """Let Ctrl-C and SIGTERM stop the search after the current step, if it can be saved.

    A second Ctrl-C stops at once. `tell` is called inside the signal handler.
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
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in processes started inside, until they call `init_worker_signals`."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def init_worker_signals(_: int) -> None:
    """Ignore signals in a process that reads images, so that the search can save first.

    The process ends with the search, or half a minute after a SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(_SECONDS_LEFT))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
