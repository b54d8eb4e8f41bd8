"""Searching tickets: data, schedule, the loop, and the folder that a run lives in."""

from mptify.training.callbacks import Callback, SearchState, StepMetrics
from mptify.training.loop import Result, search
from mptify.training.methods import SearchMethod

__all__ = ["Callback", "Result", "SearchMethod", "SearchState", "StepMetrics", "search"]
