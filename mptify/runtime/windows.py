"""A binary convolution that sees few pixels: its windows as rows of bits, whose differences from the signs are counted.

The sum over a window is kept - 2 · popcount(mask & (input ^ sign)). Bits outside of the image are 0, and differ where a survivor is
positive: what that comes to is known for each class of pixels, and taken back.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.runtime.bitsliced import fault_in_thresholds
from mptify.runtime.geometry import Geometry
from mptify.runtime.planes import Bits, Layer, Numbers, Value

__all__ = ["WindowConv", "can_count", "is_faster"]

_WORD, _WINDOW, _BLOCK = 0.55, 3.0, 1.0  # nanoseconds: of a word of a survivor's plane, of a window, and of each 32 bytes in it


def can_count(geometry: Geometry) -> bool:
    """Whether the kernel can do it: 256 kinds of borders at most, and not much more than two bits per weight."""
    return -(-geometry.channels // 8) * 8 <= 1.05 * geometry.channels and min(geometry.out_size) > 0 and _few_kinds(geometry)


def _few_kinds(geometry: Geometry) -> bool:
    return math.prod(2 * taps for taps in geometry.kernel) <= 256


def is_faster(geometry: Geometry, filters: int, survivors: int) -> bool:
    """Whether counting in windows takes less time than adding planes, by what both took on an AVX2 core."""
    pixels = math.prod(geometry.out_size)
    words = -(-geometry.out_size[0] * -(-geometry.out_size[1] // 8) // 32)
    blocks = -(-math.prod(geometry.kernel) * -(-geometry.channels // 8) // 32)
    return filters * pixels * (_WINDOW + blocks * _BLOCK) < survivors * words * _WORD


class WindowConv(Layer):
    """Signs of thresholded sums, or the sums themselves; `thresholds` as in a `BitslicedConv`. `weight` is M ⊙ B, without groups."""

    SETTINGS = ("filters", "geometry", "weight_count", "survivor_count", "weight_bytes")
    weights: Tensor
    thresholds: Tensor | None

    def __init__(self, weight: Tensor, thresholds: Tensor | None, geometry: Geometry):
        super().__init__()
        self.filters, self.geometry = len(weight), geometry
        signs = np.zeros((self.filters, *geometry.kernel, -(-geometry.channels // 8) * 8), np.int8)
        signs[..., : geometry.channels] = weight.numpy().transpose(0, 2, 3, 1)
        halves = [np.packbits(part, axis=-1, bitorder="little").reshape(self.filters, -1) for part in (signs != 0, signs > 0)]
        self.register_buffer("weights", torch.from_numpy(np.stack(halves, axis=1)))
        self.register_buffer("thresholds", None if thresholds is None else thresholds.to(torch.int32))
        self.weight_count, self.survivor_count, self.weight_bytes = weight.numel(), int((weight != 0).sum()), self.weights.nbytes

    def fault(self) -> str | None:
        geometry = self.geometry
        row = math.prod(geometry.kernel) * -(-geometry.channels // 8)
        if not _few_kinds(geometry) or self.weights.dtype != torch.uint8 or tuple(self.weights.shape) != (self.filters, 2, row):
            return "its weights are no masks and signs"
        return fault_in_thresholds(self.thresholds, self.filters) or self.fault_in_scales(self.filters)

    def plan(self, to: Any, *inputs: Value) -> Value:
        (bits, place), *shortcut = inputs
        if bits.channels != self.geometry.channels:
            raise MptifyError(f"A packed layer reads {self.geometry.channels} channels, and was given {bits.channels}.")
        if not _few_kinds(self.geometry):
            raise MptifyError(f"Images of {bits.height}×{bits.width} are more than this layer can do; pack the model with one of them.")
        geometry = self.geometry.at((bits.height, bits.width))
        shape = geometry.shape()
        made = Bits(self.filters, *geometry.out_size, bits.tokens)
        if len(shortcut) != (self.thresholds is not None and len(self.thresholds) == 2) or any(one.form != made for one in shortcut):
            raise MptifyError("A packed layer has two thresholds per filter where it has a shortcut of its own size, and only there.")
        (row_class, rows), (column_class, columns) = geometry.taps_seen(0), geometry.taps_seen(1)
        classes = (row_class[:, None] * len(columns) + column_class[None]).astype(np.uint8)
        one: dict[str, Any] = {
            "shape": shape, "index": to.constant(self.weights), "bias": to.constant(self._bias(rows, columns)),
            "present": to.constant(classes), "classes": len(rows) * len(columns), "in_stride": bits.stride, "stride": made.stride,
            "scratch": to.scratch(self._scratch(geometry, bits)),
        }  # fmt: skip
        fields: dict[str, Any] = {"filters": self.filters, "in_": place, "one": one}
        if self.thresholds is None:
            return to.add("windows", Numbers.in_order(self.filters, *geometry.out_size, tokens=bits.tokens), **fields, **self.scales(to))
        fields |= {"second": shortcut[0].place} if shortcut else {}
        return to.add("windows", made, thresholds=to.constant(self.thresholds), **fields)

    def _bias(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """[filters][classes]: survivors inside of the image, and twice the positive ones outside."""
        per_tap = np.unpackbits(self.weights.numpy().reshape(self.filters, 2, *self.geometry.kernel, -1), axis=-1).sum(-1, dtype=np.int64)
        kept, positive = per_tap[:, 0], per_tap[:, 1]
        inside = rows[:, None, :, None] & columns[None, :, None, :]  # [classes of rows][of columns][taps][taps]
        bias = [(np.where(seen, kept, 2 * positive)).sum((1, 2)) for seen in inside.reshape(-1, *inside.shape[2:])]
        return np.stack(bias, axis=1).astype(np.int32)

    def _scratch(self, geometry: Geometry, bits: Bits) -> int:
        channels = -(-geometry.channels // 8)
        window = -(-math.prod(geometry.kernel) * channels // 32) * 32
        return bits.stride * 8 * channels + (math.prod(geometry.out_size) + 4) * window
