"""A binary convolution of few pixels: it counts the bits of each window that differ from a filter.

The sum over a window is kept - 2 · popcount(mask & (input ^ sign)). Bits outside of the image are
0, and differ from each positive survivor. How many those are is known for each class of pixels,
and the kernel adds it back.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.fusion import Pattern
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernel import Candidate, LayerKernel
from mptify.runtime.thresholds import validate_thresholds
from mptify.runtime.values import Bits, Numbers, Value, row_bytes

__all__ = ["PopcountConv", "count_cost"]

_WINDOW_NS, _BLOCK_NS = 3.0, 1.0  # for a window of one filter, and for each 32 bytes in it
_MAX_PADDING = 1.05  # weights with those that pad channels to whole bytes, over weights


def count_cost(geometry: Geometry, filters: int) -> float:
    """Nanoseconds to count the bits of all windows for all filters."""
    blocks = -(-_window_bytes(geometry) // 32)
    return filters * math.prod(geometry.out_size) * (_WINDOW_NS + blocks * _BLOCK_NS)


@kernels.register("popcount_conv")
class PopcountConv(LayerKernel):
    """Signs of thresholded sums, or the sums themselves.

    Args:
        weight: M ⊙ B: -1, 0 or 1, without groups.
        thresholds: As for a `BitslicedConv`.
        geometry: The convolution on images of the usual size.
    """

    SETTINGS: ClassVar = {
        "filters": int,
        "geometry": Geometry,
        "weight_count": int,
        "survivor_count": int,
        "weight_bytes": int,
    }
    BUFFERS = ("weights",)
    geometry: Geometry
    weights: Tensor

    def __init__(self, weight: Tensor, thresholds: Tensor | None, geometry: Geometry):
        super().__init__()
        self.filters, self.geometry = len(weight), geometry
        padded = 8 * row_bytes(geometry.channels)
        signs = np.zeros((self.filters, *geometry.kernel, padded), np.int8)
        signs[..., : geometry.channels] = weight.numpy().transpose(0, 2, 3, 1)
        bits = [np.packbits(half, axis=-1, bitorder="little") for half in (signs != 0, signs > 0)]
        weights = np.stack(bits, axis=1).reshape(self.filters, 2, -1)
        self.register_buffer("weights", torch.from_numpy(weights))
        self.register_buffer("thresholds", None if thresholds is None else thresholds.int())
        self.weight_count, self.survivor_count = weight.numel(), int((weight != 0).sum())
        self.weight_bytes = self.weights.nbytes

    @classmethod
    def matches(cls, pattern: Pattern) -> bool:
        branch = pattern.branch
        reads_planes = pattern.reads_signs and branch.layout != "vectors"
        return reads_planes and branch.pads_with_zeros and pattern.other is None

    @classmethod
    def candidate(cls, pattern: Pattern) -> Candidate | None:
        geometry, found = pattern.branch.geometry(), pattern.thresholds
        channels = geometry.channels
        if pattern.weight.shape[1] != channels or min(geometry.out_size) < 1:
            return None
        if 8 * row_bytes(channels) > _MAX_PADDING * channels or not _has_few_classes(geometry):
            return None
        if pattern.makes_signs and found is None:
            return None
        thresholds = None if found is None else found.least
        return Candidate(
            count_cost(geometry, len(pattern.weight)),
            lambda: cls(pattern.rising_weight, thresholds, geometry).scaled_for(pattern),
        )

    def validate(self) -> None:
        shape = (self.filters, 2, _window_bytes(self.geometry))
        if self.weights.dtype != torch.uint8 or self.weights.shape != shape:
            raise ValueError("its weights are not masks and signs")
        if not _has_few_classes(self.geometry):
            raise ValueError("its kernel has too many taps")
        validate_thresholds(self.thresholds, self.filters)
        self.validate_scales(self.filters)

    def emit(self, builder: Any, *inputs: Value) -> Value:
        """The second input is the shortcut, if there is one."""
        (bits, buffer), *shortcut = inputs
        assert isinstance(bits, Bits)
        size, channels = (bits.height, bits.width), self.geometry.channels
        if bits.channels != channels:
            raise MptifyError(f"A packed layer reads {channels} channels, not {bits.channels}.")
        geometry = self.geometry.at(size)
        if not _has_few_classes(geometry):
            raise MptifyError(
                f"An image of {size[0]}×{size[1]} is too large for this layer; pack the model with "
                "an example of that size."
            )
        made = Bits(self.filters, *geometry.out_size, bits.tokens)
        has_two_sets = self.thresholds is not None and len(self.thresholds) == 2
        if bool(shortcut) != has_two_sets or any(one.form != made for one in shortcut):
            raise MptifyError("A packed layer has a shortcut, or two thresholds per filter.")
        fields: dict[str, Any] = {
            "filters": self.filters,
            "input": buffer,
            "conv": self._arguments(builder, geometry, bits, made),
        }
        if self.thresholds is None:
            form = Numbers.contiguous(self.filters, *geometry.out_size, tokens=bits.tokens)
            return builder.add("popcount_conv", form, **fields, **self.scales(builder))
        fields |= {"second_input": shortcut[0].buffer} if shortcut else {}
        fields["thresholds"] = builder.constant(self.thresholds)
        return builder.add("popcount_conv", made, **fields)

    def _arguments(
        self, builder: Any, geometry: Geometry, bits: Bits, made: Bits
    ) -> dict[str, Any]:
        (row_class, rows), (column_class, columns) = geometry.taps_seen(0), geometry.taps_seen(1)
        classes = row_class[:, None] * len(columns) + column_class[None]
        window = -(-_window_bytes(geometry) // 32) * 32
        pixels = bits.stride * 8 * row_bytes(geometry.channels)
        windows = (math.prod(geometry.out_size) + 4) * window
        return {
            "shape": geometry.shape(),
            "weights": builder.constant(self.weights),
            "base": builder.constant(self._base(rows, columns)),
            "pixel_classes": builder.constant(classes.astype(np.uint8)),
            "class_count": len(rows) * len(columns),
            "in_stride": bits.stride,
            "stride": made.stride,
            "workspace": builder.workspace(pixels + windows),
        }

    def _base(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """[filters][classes]: survivors in the image, and twice the positive ones outside."""
        taps = self.weights.numpy().reshape(self.filters, 2, *self.geometry.kernel, -1)
        per_tap = np.unpackbits(taps, axis=-1).sum(-1, dtype=np.int64)
        kept, positive = per_tap[:, 0], per_tap[:, 1]
        inside = rows[:, None, :, None] & columns[None, :, None, :]  # [row and column class][tap]
        inside = inside.reshape(-1, *inside.shape[2:])
        base = [np.where(seen, kept, 2 * positive).sum((1, 2)) for seen in inside]
        return np.stack(base, axis=1).astype(np.int32)


def _has_few_classes(geometry: Geometry) -> bool:
    """Whether a byte holds the class of a pixel."""
    return math.prod(2 * taps for taps in geometry.kernel) <= 256


def _window_bytes(geometry: Geometry) -> int:
    return math.prod(geometry.kernel) * row_bytes(geometry.channels)
