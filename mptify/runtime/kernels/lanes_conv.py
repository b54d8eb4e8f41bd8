"""A pruned convolution of real or few-bit numbers: one addition per survivor and vector of pixels.

Weights are ±1. Inputs of 32 bits are added as float32; those of 2, 4 and 8 bits are rounded to
levels first, and added as bytes or 16-bit integers.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernel import Candidate, NativeKernel
from mptify.runtime.lane_fusion import LanePattern
from mptify.runtime.lane_layout import LaneLayout, lists_of_taps
from mptify.runtime.library import word_bytes
from mptify.runtime.survivors import max_kept
from mptify.runtime.values import Numbers, Value

__all__ = ["LanesConv"]

_MAX_SHORT = 32767
_ADDITION_NS = 0.4  # of one vector
_EPILOGUE = ("bias", "alpha", "beta", "last_alpha", "last_beta")  # one number per filter each


@kernels.register("lanes_conv")
class LanesConv(NativeKernel):
    """Sums of ±inputs, and what follows them.

    ((sum · unit · scale + bias) · alpha + beta) + other, clipped to a range, · last_alpha +
    last_beta, each operation rounded to float32.

    Args:
        weight: M ⊙ B: -1, 0 or 1. For tokens, [filters][channels][1][1].
        geometry: The convolution on images of the usual size.
        scale: What multiplies the sums.
        levels: How inputs are rounded: the inverse of their step, their lowest and highest level,
            and the unit that sums of levels are multiplied by; None for float32 inputs.
        epilogue: bias, alpha, beta, last_alpha and last_beta, as far as there are any, and the
            `range` that the output is clipped to.
        tokens: Whether channels are the last dimension.
        fused: Whether multiplying by alpha and adding beta is one operation, rounded once.
    """

    SETTINGS: ClassVar = {
        "filters": int,
        "geometry": Geometry,
        "tokens": bool,
        "fused": bool,
        "weight_count": int,
        "survivor_count": int,
        "weight_bytes": int,
    }
    BUFFERS = ("weights", "scale")
    OPTIONAL_BUFFERS = ("levels", "range", *_EPILOGUE)
    ON_LANES = True
    geometry: Geometry
    weights: Tensor
    scale: Tensor
    levels: Any
    bias: Any

    def __init__(
        self,
        weight: Tensor,
        geometry: Geometry,
        scale: Tensor,
        levels: tuple[float, float, float, float] | None = None,
        epilogue: dict[str, Tensor] | None = None,
        *,
        tokens: bool = False,
        fused: bool = False,
    ):
        super().__init__()
        self.filters, self.geometry = len(weight), geometry
        self.tokens, self.fused = tokens, fused
        signs = weight.numpy().reshape(self.filters, -1)
        bits = [np.packbits(half, axis=1, bitorder="little") for half in (signs != 0, signs > 0)]
        self.register_buffer("weights", torch.from_numpy(np.stack(bits, axis=1)))
        self.register_buffer("scale", scale.detach().reshape(1).float())
        self.register_buffer("levels", None if levels is None else torch.tensor(levels))
        for name in ("range", *_EPILOGUE):
            value = (epilogue or {}).get(name)
            self.register_buffer(name, None if value is None else value.detach().float())
        self.weight_count, self.survivor_count = weight.numel(), int((weight != 0).sum())
        self.weight_bytes = self.weights.nbytes

    @classmethod
    def matches(cls, pattern: LanePattern) -> bool:
        return not pattern.is_depthwise

    @classmethod
    def candidate(cls, pattern: LanePattern) -> Candidate | None:
        geometry, weight = pattern.geometry(), pattern.weight()
        groups = geometry.channels // weight.shape[1]
        if pattern.levels is not None:  # sums are exact in float32
            longest = max_kept(weight) * max(map(abs, pattern.levels[1:3]))
            if longest >= 1 << 24:
                return None
            per_sign = _taps_per_sign(weight.numpy())
            if _most_in_a_group(per_sign, 1) * max(map(abs, pattern.levels[1:3])) > _MAX_SHORT:
                return None  # one channel of a large kernel may overflow 16 bits
        flat = prod(geometry.out_size)
        plain = (geometry.stride, geometry.padding) == ((1, 1), (0, 0))
        tiled = geometry.at((1, flat)) if geometry.kernel == (1, 1) and plain else geometry
        kept = int((weight != 0).sum()) // groups
        lanes = {None: 4, 255: 2, 127: 2}.get(pattern.levels and int(pattern.levels[2]), 1)
        sizes = (weight.shape[1], len(weight) // groups)
        layout = LaneLayout.of(tiled, *sizes, kept, lanes)
        cost = groups * layout.cost(tiled, *sizes, kept) * _ADDITION_NS
        if cost > weight.numel() * flat / dense_rate():
            return None
        return Candidate(
            cost,
            lambda: cls(
                weight,
                geometry,
                pattern.scale(),
                pattern.levels,
                pattern.epilogue,
                tokens=pattern.tokens,
                fused=pattern.fused,
            ),
        )

    def ternary(self) -> np.ndarray:
        """M ⊙ B as int8."""
        count = self.weight_count // self.filters
        mask, positive = (
            np.unpackbits(self.weights.numpy()[:, half], axis=1, bitorder="little", count=count)
            for half in (0, 1)
        )
        signs = (2 * positive.astype(np.int8) - 1) * mask.astype(np.int8)
        return signs.reshape(self.filters, -1, *self.geometry.kernel)

    @property
    def groups(self) -> int:
        """The groups of the convolution."""
        rows, columns = self.geometry.kernel
        return self.filters * self.geometry.channels * rows * columns // self.weight_count

    def readable(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def emit(self, builder: Any, *inputs: Value) -> Value:
        """The second input is added to the output."""
        (numbers, buffer), *other = inputs
        assert isinstance(numbers, Numbers)
        channels = numbers.shape[-1 if self.tokens else 0]
        if channels != self.geometry.channels:
            expected = self.geometry.channels
            raise MptifyError(f"A packed layer reads {expected} channels, not {channels}.")
        geometry, strides = self._flattened(numbers)
        weight = self.ternary()
        layout, most = self._layout(weight, geometry)
        taps, starts = lists_of_taps(layout, geometry, self.groups, weight)
        if self.tokens:
            form = Numbers.contiguous(*numbers.shape[:-1], self.filters)
            out_strides = (1, 0, self.filters)
        else:
            form = Numbers.contiguous(
                self.filters, *self.geometry.at((numbers.shape[1], numbers.shape[2])).out_size
            )
            pixels = form.shape[1] * form.shape[2]
            out_strides = (pixels, geometry.out_size[1], 1)
        if other and other[0].form != form:
            raise MptifyError(f"A packed layer makes {form}, but what it adds is {other[0].form}.")
        lanes = {
            "bytes": layout.bytes,
            "rows": layout.rows,
            "columns": layout.columns,
            "row": layout.row,
            "plane_rows": layout.plane_rows,
            "plane": layout.plane,
            "group_channels": layout.group_channels,
            "filter_blocks": self._blocks(geometry, layout),
            "most": most,
            "fused": self.fused,
            "out_strides": out_strides,
        }
        for name in ("alpha", "beta", "last_alpha", "last_beta", "range"):
            value = getattr(self, name)
            if value is not None:
                lanes[name] = builder.constant(value.contiguous())
        if self.levels is not None:
            lanes["levels"] = builder.constant(self.levels)
        shape = geometry.shape() | {"phases": len(layout.phases)}
        conv = {
            "shape": shape,
            "index": builder.constant(np.concatenate([taps, np.zeros(4, np.int32)])),
            "starts": builder.constant(starts),
            "phases": builder.constant(np.array(layout.phases, np.int64)),
            "groups": self.groups,
        }
        fields: dict[str, Any] = {
            "filters": self.filters,
            "input": buffer,
            "conv": conv,
            "lanes": lanes,
            "gain": builder.constant(self.scale),
            "strides": strides,
        }
        if self.bias is not None:
            fields["bias"] = builder.constant(self.bias.contiguous())
        if other:
            fields["second_input"] = other[0].buffer
        return builder.add("lanes_conv", form, **fields)

    def _flattened(self, numbers: Numbers) -> tuple[Geometry, tuple[int, int, int]]:
        """The convolution and the strides of its input; pixels of 1×1 kernels are one row."""
        if self.tokens:
            tokens = int(np.prod(numbers.shape[:-1]))
            return self.geometry.at((1, tokens)), (1, 0, self.geometry.channels)
        geometry = self.geometry.at((numbers.shape[1], numbers.shape[2]))
        pixels = numbers.shape[1] * numbers.shape[2]
        is_plain = geometry.stride == (1, 1) and geometry.padding == (0, 0)
        if geometry.kernel == (1, 1) and is_plain:
            return self.geometry.at((1, pixels)), (pixels, pixels, 1)
        return geometry, (pixels, numbers.shape[2], 1)

    def _layout(self, weight: np.ndarray, geometry: Geometry) -> tuple[LaneLayout, int]:
        """The layout, and how many taps of one sign fill a byte."""
        channels, filters = weight.shape[1], self.filters // self.groups
        kept = self.survivor_count // self.groups
        if self.levels is None:
            return LaneLayout.of(geometry, channels, filters, kept, 4), 0
        largest = int(self.levels[1:3].abs().max())
        per_sign = _taps_per_sign(weight)
        longest = int(per_sign.sum(2).max())
        if float(self.levels[1]) == 0 and largest < 16 and longest * largest <= _MAX_SHORT:
            return LaneLayout.of(geometry, channels, filters, kept, 1), 255 // largest
        layout = LaneLayout.of(geometry, channels, filters, kept, 2)
        group = layout.group_channels
        while group > 1 and _most_in_a_group(per_sign, group) * largest > _MAX_SHORT:
            group = ceil(group / 2)
        return replace(layout, group_channels=group), 0

    def _blocks(self, geometry: Geometry, layout: LaneLayout) -> int:
        """How many parts the filters of a tile are split into, so that threads can share them."""
        height, width = geometry.out_size
        tiles = ceil(height / layout.rows) * ceil(width / layout.columns) * self.groups
        return max(1, min(self.filters // self.groups // 64, ceil(4 / tiles)))


def dense_rate() -> float:
    """How many multiplications torch's convolutions do in a nanosecond."""
    return 25 * max(16, word_bytes()) / 16


def _taps_per_sign(weight: np.ndarray) -> np.ndarray:
    """[positive, negative][filters][channels]: how many taps there are."""
    return np.stack([(weight > 0).sum((2, 3)), (weight < 0).sum((2, 3))])


def _most_in_a_group(per_sign: np.ndarray, group: int) -> int:
    """The most taps of one sign that a filter has in a group of channels."""
    starts = np.arange(0, per_sign.shape[2], group)
    return int(np.add.reduceat(per_sign, starts, axis=2).max())
