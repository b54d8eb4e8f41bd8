"""Searching tickets: data, schedule, the loop, and the folder that a run lives in."""

from mptify.training.loop import Result, Watcher, search

__all__ = ["Result", "Watcher", "search"]
