"""Pictures of masks: PNG files within the page.

They are transparent where nothing survives, so they suit light and dark.
"""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass

import numpy as np

from mptify.config import TicketConfig
from mptify.ticket.codec import TicketLayer

__all__ = ["Picture", "kernels_picture", "mask_picture"]

SIDE = 144  # pixels on the page that a mask's picture is wide and high at most
ALL_CELLS = 800_000  # of all pictures of a page together: half a byte each
_SHADES = 16
_BLUE, _ORANGE = (59, 116, 226), (222, 110, 38)
# Pixels on the page that the picture of kernels is wide and high at most.
_KERNELS, _KERNELS_HIGH = (318, 420)


@dataclass(frozen=True)
class Picture:
    """A PNG as a data address, and how large to show it so that all its cells are alike.

    `block` is how many weights a cell stands for, `darkest` the density of the darkest cell, and
    `shown` the number of filters.
    """

    address: str
    width: int
    height: int
    block: tuple[int, int] = (1, 1)
    darkest: float = 1.0
    shown: int = 0


def mask_picture(layer: TicketLayer, layers: int) -> Picture:
    """Filters downwards, their weights (input channels × taps) to the right.

    A cell is as dark as the share of its weights that survives. Where there are more weights than
    cells, a cell is the mean over a block of them, and the darkest one sets the scale.
    """
    plane = layer.mask.reshape(layer.shape[0] if layer.shape else 1, -1)
    side = max(8, min(SIDE, math.isqrt(ALL_CELLS // max(layers, 1))))
    block = (-(-plane.shape[0] // side), -(-plane.shape[1] // side))
    shares = _means(plane, block)
    darkest = float(shares.max())
    index = np.ceil(shares / max(darkest, 1e-9) * (_SHADES - 1) - 1e-6).astype(np.uint8)
    shades = [(*_BLUE, round(255 * shade / (_SHADES - 1))) for shade in range(_SHADES)]
    height, width = (SIDE // size * size if size <= SIDE else size for size in index.shape)
    return Picture(_png(index, shades), width, height, block, darkest)


def _means(plane: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Over blocks; those at the far ends may be smaller."""
    shares: np.ndarray = plane.astype(np.float64)
    for axis, size in enumerate(block):
        starts = np.arange(0, shares.shape[axis], size)
        counts = np.diff(np.append(starts, shares.shape[axis]))
        shares = np.add.reduceat(shares, starts, axis=axis) / counts.reshape(
            [-1, 1] if axis == 0 else [1, -1]
        )
    return shares


def kernels_picture(layer: TicketLayer, config: TicketConfig) -> Picture | None:
    """The filters of a convolution that sees images, a kernel per channel side by side.

    Survivors are blue where positive and orange where negative; larger 32-bit weights are darker.
    None for any other layer.
    """
    if len(layer.shape) != 4 or layer.shape[1] > 4 or math.prod(layer.shape[2:]) == 1:
        return None
    filters, channels, high, wide = layer.shape
    # A cell of nothing is between kernels, and two are between filters.
    across, down = channels * (wide + 1) - 1, high
    in_row = min(filters, max(1, min(8, (_KERNELS // 3 + 2) // (across + 2))))
    width = in_row * (across + 2) - 2
    scale = max(1, min(7, _KERNELS // width))
    rows = min(-(-filters // in_row), max(1, (_KERNELS_HIGH // scale + 2) // (down + 2)))
    shown = min(filters, rows * in_row)
    canvas = np.full((rows * (down + 2) - 2, width), 2 * _SHADES, np.uint8)
    cells = _signed_shades(layer, config)
    for place in range(shown):
        top, left = place // in_row * (down + 2), place % in_row * (across + 2)
        for channel in range(channels):
            start = left + channel * (wide + 1)
            canvas[top : top + high, start : start + wide] = cells[place, channel]
    alphas = [round(255 * (shade + 1) / _SHADES) for shade in range(_SHADES)]
    palette = [
        *((*_BLUE, alpha) for alpha in alphas),
        *((*_ORANGE, alpha) for alpha in alphas),
        (0, 0, 0, 0),
        (128, 128, 128, 44),
    ]
    height, width = (scale * cells for cells in canvas.shape)
    return Picture(_png(canvas, palette), width, height, shown=shown)


def _signed_shades(layer: TicketLayer, config: TicketConfig) -> np.ndarray:
    """Places in the palette: a shade of blue or orange for survivors, grey for pruned weights."""
    weights = np.abs(layer.weights(config)) * layer.mask
    largest = max(float(weights.max()), 1e-12)
    shade = np.clip(np.ceil(weights / largest * _SHADES) - 1, 0, _SHADES - 1).astype(np.uint8)
    signed = shade + _SHADES * layer.negative(config.seed).astype(np.uint8)
    return np.where(layer.mask, signed, 2 * _SHADES + 1).astype(np.uint8)


def _png(index: np.ndarray, palette: list[tuple[int, int, int, int]]) -> str:
    """A picture of colours by number, as an address that holds all of it."""
    from PIL import Image

    image = Image.frombytes("P", index.shape[::-1], index.tobytes())
    image.putpalette([part for colour in palette for part in colour[:3]])
    file = io.BytesIO()
    alphas = bytes(colour[3] for colour in palette)
    bits = 4 if len(palette) <= 16 else 8
    image.save(file, "PNG", optimize=True, bits=bits, transparency=alphas)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
