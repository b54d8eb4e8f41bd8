"""Callbacks of a search, on which progress, trackers, curves and methods are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from mptify.config import SearchConfig
from mptify.errors import BadConfig, MptifyError, shown
from mptify.training.curves import draw_curves
from mptify.training.distributed import flat

__all__ = [
    "Callback",
    "CallbackList",
    "Curves",
    "SearchState",
    "StepMetrics",
    "Trackers",
    "check_callbacks",
]


@dataclass
class SearchState:
    """The state of a search, as its callbacks see it.

    Attributes:
        model: The network. Callbacks may change it, in the same way in every process.
        config: The settings of the search.
        steps_per_epoch: How many steps an epoch has.
        epoch: How many epochs are done.
        step: How many steps of the current epoch are done.
        rows: The metrics of each finished epoch.
        is_main: Whether this is the first process. Only the first should print or write.
    """

    model: nn.Module
    config: SearchConfig
    steps_per_epoch: int
    epoch: int = 0
    step: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    is_main: bool = True


class StepMetrics(NamedTuple):
    """The metrics of a step.

    Attributes:
        images: How many images this epoch has seen since the search began or was resumed, over all
            processes.
        loss: The mean loss of this process in the epoch so far; None except about twice a second.
        accuracy: The accuracy, likewise.
    """

    images: int
    loss: float | None
    accuracy: float | None


class Callback:
    """Base class of callbacks: override what you need.

    Pass instances to `mptify.search(..., callbacks=[...])`. Every process calls its own callbacks.
    A callback with state implements `state_dict` and `load_state_dict`, so that a search that is
    stopped and resumed ends in the same ticket.

    Example:
        class Printer(mptify.Callback):
            def on_epoch_end(self, search, row):
                if search.is_main:
                    print(row["epoch"], row["val_accuracy"])
    """

    def on_search_begin(self, search: SearchState) -> None:
        """Called before the first step of a new or resumed search."""

    def on_epoch_begin(self, search: SearchState) -> None:
        """Called before the first step of an epoch, the place to change the scores once per epoch.

        A search that is resumed within an epoch does not call it again.
        """

    def on_step_end(self, search: SearchState, metrics: StepMetrics) -> None:
        """Called after each optimizer step."""

    def on_epoch_end(self, search: SearchState, row: dict[str, Any]) -> None:
        """Called with the epoch's metrics, to which it may add.

        The epoch has been evaluated and its tickets are written, so what it changes in the model
        counts from the next epoch on.
        """

    def on_warning(self, search: SearchState, text: str) -> None:
        """Called when something looks wrong: a layer is dead, or its mask never changes."""

    def on_interrupt(self) -> None:
        """Called in the signal handler of Ctrl-C or SIGTERM; the search stops after this step."""

    def on_search_end(self, search: SearchState) -> None:
        """Called after the last step, also if the search was stopped or has failed."""

    def state_dict(self) -> dict[str, Any]:
        """State to keep in checkpoints, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class CallbackList:
    """Call several callbacks in turn."""

    def __init__(self, search: SearchState, callbacks: Sequence[Callback]):
        self.search, self.callbacks = search, list(callbacks)

    def search_begin(self) -> None:
        for callback in self.callbacks:
            callback.on_search_begin(self.search)

    def epoch_begin(self) -> None:
        for callback in self.callbacks:
            callback.on_epoch_begin(self.search)

    def step_end(self, metrics: StepMetrics) -> None:
        for callback in self.callbacks:
            callback.on_step_end(self.search, metrics)

    def epoch_end(self, row: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_epoch_end(self.search, row)

    def warning(self, text: str) -> None:
        for callback in self.callbacks:
            callback.on_warning(self.search, text)

    def interrupt(self) -> None:
        for callback in self.callbacks:
            callback.on_interrupt()

    def search_end(self) -> None:
        for callback in self.callbacks:
            callback.on_search_end(self.search)

    def state_dict(self) -> list[list[Any]]:
        """The class name and state of each callback that has state."""
        states = [
            (type(callback).__qualname__, callback.state_dict()) for callback in self.callbacks
        ]
        return [[name, state] for name, state in states if state]

    def load_state_dict(self, states: list[list[Any]]) -> None:
        """Restore the callbacks' states.

        Raises:
            MptifyError: The search was started with other stateful callbacks.
        """
        left = list(states)
        for callback in self.callbacks:
            if left and left[0][0] == type(callback).__qualname__:
                callback.load_state_dict(left.pop(0)[1])
        if left:
            raise MptifyError(
                f"The search was started with the callback {left[0][0]}, which has state; resume "
                "it with the same callbacks."
            )


class Trackers(Callback):
    """Log each epoch's metrics to Accelerate's trackers."""

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator

    def on_search_begin(self, search: SearchState) -> None:
        self.accelerator.init_trackers("mptify", config=flat(search.config.model_dump(mode="json")))

    def on_epoch_end(self, search: SearchState, row: dict[str, Any]) -> None:
        numbers = {
            key: value
            for key, value in row.items()
            if isinstance(value, (int, float)) and key != "epoch"
        }
        self.accelerator.log(numbers, step=search.epoch)

    def on_search_end(self, search: SearchState) -> None:
        # `end_training` would also end the process group, which a baseline needs.
        for tracker in self.accelerator.trackers:
            tracker.finish()


class Curves(Callback):
    """Draw the training curves of a run into its folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_epoch_end(self, search: SearchState, row: dict[str, Any]) -> None:
        if search.is_main:
            draw_curves(search.rows, self.folder / "curves.png")


def check_callbacks(callbacks: Any) -> list[Callback]:
    """A list of callbacks.

    Raises:
        BadConfig: Something else was given.
    """
    if isinstance(callbacks, Callback):
        return [callbacks]
    if isinstance(callbacks, (str, bytes, dict)) or not hasattr(callbacks, "__iter__"):
        raise BadConfig(f"callbacks: a list of mptify.Callback is needed, not {shown(callbacks)}.")
    found = list(callbacks)
    wrong = [callback for callback in found if not isinstance(callback, Callback)]
    if wrong:
        raise BadConfig(
            f"callbacks: a list of mptify.Callback is needed, and {shown(wrong[0])} is not one."
        )
    return found
