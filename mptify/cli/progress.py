"""A search as a person sees it: a bar on a terminal, one plain line per epoch in a pipe. Only the main process prints."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import typer

from mptify.training.callbacks import Callback, SearchState, StepMetrics

__all__ = ["Progress", "is_main", "processes", "say"]


def is_main() -> bool:
    """Whether this is the only process, or the first of several that `accelerate launch` started."""
    return os.environ.get("RANK", "0") == "0"


def processes() -> int:
    """How many `accelerate launch` started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def say(text: str) -> None:
    """One line, from the main process."""
    if is_main():
        typer.echo(text, err=True)


class Progress(Callback):
    """Epochs and steps, loss, accuracy, images per second, time left, and how much of the mask flipped in the last epoch."""

    def __init__(self, title: str, *headlines: str):
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars
        from rich.table import Column

        self.title, self.headlines = title, headlines
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal and is_main()
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
        self.task: Any = None
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
        for headline in self.headlines:  # now that nothing is left to go wrong with the settings
            say(headline)
        steps = search.steps_per_epoch
        self.task = self.bars.add_task(
            self.title,
            total=search.config.epochs * steps,
            completed=search.epoch * steps + search.step,
            text="",
        )
        if search.epoch or search.step:
            say(f"{self.title}: goes on at epoch {search.epoch + 1}, step {search.step}")

    def on_step_end(self, search: SearchState, metrics: StepMetrics) -> None:
        images, loss, accuracy = metrics
        if loss is not None and accuracy is not None:
            speed = images / max(time.monotonic() - self.epoch_began, 1e-3)
            speed_text = (
                f"{speed:,.0f} img/s" if self.console.width >= 80 or not self.live else ""
            )  # else bar and time left give way
            flipped_text = "" if self.flipped is None else f"flipped {100 * self.flipped:.1f} %"
            self.text = "  ".join(
                filter(
                    None,
                    (f"loss {loss:.3f}", f"acc {100 * accuracy:.1f} %", speed_text, flipped_text),
                )
            )
        place = f"{self.title} {search.epoch + 1}/{search.config.epochs}"
        done = search.epoch * search.steps_per_epoch + search.step
        self.bars.update(self.task, completed=done, description=place, text=self.text)
        if not self.live and time.monotonic() - self.last_line > 60:
            self._line(f"{place}  step {search.step}/{search.steps_per_epoch}  {self.text}")

    def on_epoch_end(self, search: SearchState, row: dict[str, Any]) -> None:
        self.flipped, self.epoch_began = row.get("flipped"), time.monotonic()
        flipped = "" if self.flipped is None else f"  flipped {100 * self.flipped:4.1f} %"
        self._line(
            f"{self.title:<6} {row['epoch']:>3}/{search.config.epochs}  loss {row['loss']:.3f}  acc {100 * row['accuracy']:4.1f} %  "
            f"val {100 * row['val_accuracy']:6.2f} %{flipped}  {row['images_per_second']:,.0f}/s"
        )

    def on_warning(self, search: SearchState, text: str) -> None:
        self._line(f"warning: {text}")

    def on_interrupt(self) -> None:
        with contextlib.suppress(OSError):  # whoever read it may have been stopped, too
            if is_main():  # past all buffers, one of which may be at work
                os.write(
                    2,
                    b"\nStopping soon, then saving; a second Ctrl-C stops at once and saves nothing.\n",
                )

    def _line(self, text: str) -> None:
        self.last_line = time.monotonic()
        if self.live:
            self.console.print(text, highlight=False, markup=False)
        else:
            say(text)
