"""The progress of a search: a bar on a terminal, one line per epoch in a pipe."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column

from mptify.cli.launching import is_main_process, print_from_main
from mptify.training.callbacks import Callback, SearchState, StepMetrics

__all__ = ["Progress"]

_SECONDS_BETWEEN_LINES = 60  # in a pipe, within an epoch
_WIDTH_WITH_SPEED = 80  # on a narrower terminal, the bar and the remaining time need the space


class Progress(Callback):
    """Prints epoch, step, loss, accuracy, speed, remaining time and the share of flipped bits.

    Only the main process prints.

    Args:
        title: The text in front of each line.
        headlines: Lines to print when the search begins.
    """

    def __init__(self, title: str, *headlines: str):
        self.title, self.headlines = title, headlines
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal and is_main_process()
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TimeRemainingColumn(compact=True, table_column=Column(min_width=5, no_wrap=True)),
            TextColumn(
                "{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis")
            ),
            console=self.console,
            disable=not self.live,
            transient=True,
        )
        self.task: TaskID | None = None
        self.flipped: float | None = None
        self.text = ""
        self.last_line = time.monotonic()

    def __enter__(self) -> Progress:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def on_search_begin(self, search: SearchState) -> None:
        self.epoch_began = time.monotonic()
        for headline in self.headlines:  # printed only now, since all settings have been checked
            print_from_main(headline)
        steps = search.steps_per_epoch
        self.task = self.bars.add_task(
            self.title,
            total=search.config.epochs * steps,
            completed=search.epoch * steps + search.step,
            text="",
        )
        if search.epoch or search.step:
            print_from_main(
                f"{self.title}: resumes at epoch {search.epoch + 1}, step {search.step}"
            )

    def on_step_end(self, search: SearchState, metrics: StepMetrics) -> None:
        images, loss, accuracy = metrics
        if loss is not None and accuracy is not None:
            texts = [f"loss {loss:.3f}", f"acc {100 * accuracy:.1f} %"]
            if self.console.width >= _WIDTH_WITH_SPEED or not self.live:
                speed = images / max(time.monotonic() - self.epoch_began, 1e-3)
                texts.append(f"{speed:,.0f} img/s")
            if self.flipped is not None:
                texts.append(f"flipped {100 * self.flipped:.1f} %")
            self.text = "  ".join(texts)
        place = f"{self.title} {search.epoch + 1}/{search.config.epochs}"
        done = search.epoch * search.steps_per_epoch + search.step
        assert self.task is not None, "on_search_begin adds the task"
        self.bars.update(self.task, completed=done, description=place, text=self.text)
        if not self.live and time.monotonic() - self.last_line > _SECONDS_BETWEEN_LINES:
            self._print(f"{place}  step {search.step}/{search.steps_per_epoch}  {self.text}")

    def on_epoch_end(self, search: SearchState, row: dict[str, Any]) -> None:
        self.flipped, self.epoch_began = row.get("flipped"), time.monotonic()
        flipped = "" if self.flipped is None else f"  flipped {100 * self.flipped:4.1f} %"
        self._print(
            f"{self.title:<6} {row['epoch']:>3}/{search.config.epochs}  loss {row['loss']:.3f}  "
            f"acc {100 * row['accuracy']:4.1f} %  val {100 * row['val_accuracy']:6.2f} %{flipped}  "
            f"{row['images_per_second']:,.0f}/s"
        )

    def on_warning(self, search: SearchState, text: str) -> None:
        self._print(f"warning: {text}")

    def on_interrupt(self) -> None:
        text = b"\nStopping soon, then saving; a second Ctrl-C stops at once and saves nothing.\n"
        with contextlib.suppress(OSError):  # the reader of the pipe may be gone, too
            if is_main_process():
                os.write(2, text)  # a signal may arrive while a buffered stream is being written

    def _print(self, text: str) -> None:
        self.last_line = time.monotonic()
        if self.live:
            self.console.print(text, highlight=False, markup=False)
        else:
            print_from_main(text)
