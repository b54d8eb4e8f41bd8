"""Draw the training curves of a run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from mptify.files import write_whole

__all__ = ["draw_curves"]


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss, accuracy, and the share of survivors replaced in each epoch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    panels = [("loss", "loss", "val_loss"), ("accuracy", "accuracy", "val_accuracy")]
    if "flipped" in rows[0]:
        panels.append(("survivors replaced in the epoch", "flipped", ""))
    figure = Figure(figsize=(3.6 * len(panels), 3), layout="constrained")
    FigureCanvasAgg(figure)
    epochs = [row["epoch"] for row in rows]
    for axes, (title, train, val) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        axes.plot(epochs, [row[train] for row in rows], marker=".", label="training")
        if val:
            axes.plot(epochs, [row[val] for row in rows], marker=".", label="validation")
            axes.legend(frameon=False)
        if train != "loss":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120)
    write_whole(path, buffer.getvalue())
