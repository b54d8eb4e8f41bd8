"""Draw masks: the density of each layer by filter and channel."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np

from mptify.files import write_whole
from mptify.ticket.codec import Ticket

__all__ = ["draw_masks"]

MOST_PIXELS = 96  # per side of one layer's panel


def draw_masks(ticket: Ticket, path: Path) -> None:
    """One panel per layer: rows are filters, columns are input channels, brightness is density."""
    from matplotlib.figure import Figure

    layers = list(ticket.layers.values())
    columns = min(6, len(layers))
    rows = math.ceil(len(layers) / columns)
    figure = Figure(figsize=(2.3 * columns, 2.55 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, layer in zip(axes.flat, layers, strict=False):
        plane = _shrunk(
            layer.mask.reshape(
                layer.shape[0] if layer.shape else 1, (layer.shape[1:2] or (1,))[0], -1
            ).mean(2)
        )
        axis.imshow(
            plane,
            cmap="magma",
            vmin=0,
            vmax=max(float(plane.max()), 1e-9),
            aspect="auto",
            interpolation="nearest",
        )
        name = layer.name if len(layer.name) <= 30 else "…" + layer.name[-29:]
        axis.set_title(
            f"{name}\n{'×'.join(map(str, layer.shape))}, {100 * layer.kept / layer.size:.1f} %",
            fontsize=7,
            parse_math=False,
        )
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    write_whole(path, picture.getvalue())


def _shrunk(plane: np.ndarray) -> np.ndarray:
    """Average over blocks, so that a panel has at most `size` pixels per side."""
    for axis in (0, 1):
        size = plane.shape[axis]
        edges = np.linspace(0, size, min(size, MOST_PIXELS) + 1).astype(int)
        sums = np.add.reduceat(plane, edges[:-1], axis=axis)
        shape = [1, 1]
        shape[axis] = -1
        plane = sums / np.diff(edges).reshape(shape)
    return plane
