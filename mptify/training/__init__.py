"""The search: data, methods, the loop, callbacks, and run folders."""

from mptify.training.callbacks import Callback, SearchState, StepMetrics
from mptify.training.loop import Result, search
from mptify.training.methods import SearchMethod

__all__ = ["Callback", "Result", "SearchMethod", "SearchState", "StepMetrics", "search"]
