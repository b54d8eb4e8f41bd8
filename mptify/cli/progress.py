"""A search as a person sees it: a bar on a terminal, one plain line per epoch in a pipe. Only the main process prints."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import typer

from mptify.training.loop import Watcher

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


class Progress(Watcher):
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
            TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self.console,
            disable=not self.live,
            transient=True,
        )
        self.task: Any = None
        self.flipped: float | None = None
        self.text = ""
        self.told = time.monotonic()

    def __enter__(self) -> Progress:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def begin(self, config: Any, steps: int, epoch: int, step: int) -> None:
        self.config, self.steps, self.epoch_began = config, steps, time.monotonic()
        for headline in self.headlines:  # now that nothing is left to go wrong with the settings
            say(headline)
        self.task = self.bars.add_task(self.title, total=config.epochs * steps, completed=epoch * steps + step, text="")
        if epoch or step:
            say(f"{self.title}: goes on at epoch {epoch + 1}, step {step}")

    def step(self, epoch: int, step: int, seen: int, loss: float | None, accuracy: float | None) -> None:
        if loss is not None and accuracy is not None:
            speed = seen / max(time.monotonic() - self.epoch_began, 1e-3)
            speed_text = f"{speed:,.0f} img/s" if self.console.width >= 80 or not self.live else ""  # else bar and time left give way
            flipped_text = "" if self.flipped is None else f"flipped {100 * self.flipped:.1f} %"
            self.text = "  ".join(filter(None, (f"loss {loss:.3f}", f"acc {100 * accuracy:.1f} %", speed_text, flipped_text)))
        place = f"{self.title} {epoch + 1}/{self.config.epochs}"
        self.bars.update(self.task, completed=epoch * self.steps + step, description=place, text=self.text)
        if not self.live and time.monotonic() - self.told > 60:
            self._line(f"{place}  step {step}/{self.steps}  {self.text}")

    def epoch(self, row: dict[str, Any]) -> None:
        self.flipped, self.epoch_began = row.get("flipped"), time.monotonic()
        flipped = "" if self.flipped is None else f"  flipped {100 * self.flipped:4.1f} %"
        self._line(
            f"{self.title:<6} {row['epoch']:>3}/{self.config.epochs}  loss {row['loss']:.3f}  acc {100 * row['accuracy']:4.1f} %  "
            f"val {100 * row['val_accuracy']:6.2f} %{flipped}  {row['images_per_second']:,.0f}/s"
        )

    def alarm(self, text: str) -> None:
        self._line(f"alarm: {text}")

    def stopping(self) -> None:
        with contextlib.suppress(OSError):  # whoever read it may have been stopped, too
            if is_main():  # past all buffers, one of which may be at work
                os.write(2, b"\nStopping soon, then saving; a second Ctrl-C stops at once and saves nothing.\n")

    def _line(self, text: str) -> None:
        self.told = time.monotonic()
        if self.live:
            self.console.print(text, highlight=False, markup=False)
        else:
            say(text)
