"""A binary, pruned convolution on bit planes that adds one plane per survivor.

A filter is the list of its survivors: offsets of the planes that it adds. The sum over a pixel's
window is

    2 · (positives - negatives) - (positive survivors in the image - negative ones),

where *positives* counts the positive survivors whose input is +1. Pixels at the border see fewer
taps. Pixels that see the same taps form a class, and each class has thresholds of its own.

The kernel takes survivors in pairs of two signs, as long as there are both, and then the others,
which have to be positive. If a filter has more negative survivors than positive ones, the kernel
counts the complement, with all signs flipped.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.bitsliced_tables import Tables
from mptify.runtime.fusion import Pattern
from mptify.runtime.geometry import Geometry, TileLayout, fits
from mptify.runtime.kernel import Candidate, LayerKernel
from mptify.runtime.survivors import list_survivors, max_kept, survivors_of, validate_starts
from mptify.runtime.thresholds import validate_thresholds
from mptify.runtime.values import Bits, Numbers, Value, row_bytes

__all__ = ["BitslicedConv", "addition_cost"]

_WORD_NS = 0.55  # for 256 pixels of one survivor
_READ_AHEAD = 3  # offsets behind the last one that the kernel may read


def addition_cost(weight: Tensor, geometry: Geometry) -> float:
    """Nanoseconds to add the planes of all survivors."""
    height, width = geometry.out_size
    words = -(-height * row_bytes(width) // 32)
    return int((weight != 0).sum()) * words * _WORD_NS


@kernels.register("bitsliced_conv")
class BitslicedConv(LayerKernel):
    """Signs of thresholded sums, or the sums themselves.

    Args:
        weight: M ⊙ B: -1, 0 or 1.
        thresholds: [sets][filters]; the result is +1 where a sum reaches its filter's threshold.
            With two sets, the second one holds where the shortcut is +1. Without thresholds the
            result is the sums.
        geometry: The convolution on images of the usual size.
    """

    SETTINGS: ClassVar = {
        "filters": int,
        "geometry": Geometry,
        "layout": TileLayout,
        "max_kept": int,
        "weight_count": int,
        "survivor_count": int,
        "weight_bytes": int,
    }
    BUFFERS = ("index", "starts", "flipped")
    geometry: Geometry
    layout: TileLayout
    index: Tensor
    starts: Tensor
    flipped: Tensor

    def __init__(self, weight: Tensor, thresholds: Tensor | None, geometry: Geometry):
        super().__init__()
        self.filters, self.geometry = len(weight), geometry
        f, channel, kh, kw, positive = survivors_of(weight, geometry.channels)
        self.layout = TileLayout.of(geometry, len(f))
        offsets = self.layout.offsets(geometry, channel, kh, kw)
        order, starts = list_survivors(self.filters, f, positive, offsets)
        position, pairs, flipped = _pair_up(starts.numpy())
        index = np.zeros(len(f) + _READ_AHEAD, np.uint16)
        index[position] = offsets[order]
        starts[1::2] = starts[:-1:2] + 2 * torch.from_numpy(pairs)
        self.max_kept = _longest(starts)
        self.register_buffer("index", torch.from_numpy(index))
        self.register_buffer("starts", starts)
        self.register_buffer("flipped", torch.from_numpy(flipped.astype(np.uint8)))
        self.register_buffer("thresholds", None if thresholds is None else thresholds.int())
        self.weight_count, self.survivor_count = weight.numel(), len(f)
        self.weight_bytes = 2 * len(f)

    @classmethod
    def matches(cls, pattern: Pattern) -> bool:
        branch = pattern.branch
        reads_planes = pattern.reads_signs and branch.layout != "vectors"
        return reads_planes and branch.pads_with_zeros and pattern.other is None

    @classmethod
    def candidate(cls, pattern: Pattern) -> Candidate | None:
        geometry, found = pattern.branch.geometry(), pattern.thresholds
        if not fits(geometry, max_kept(pattern.weight)):
            return None
        if pattern.makes_signs and found is None:
            return None
        thresholds = None if found is None else found.least
        return Candidate(
            addition_cost(pattern.weight, geometry),
            lambda: cls(pattern.rising_weight, thresholds, geometry).scaled_for(pattern),
        )

    def validate(self) -> None:
        ungrouped, starts = self._ungrouped, self.starts
        if not fits(self.geometry, self.max_kept) or min(ungrouped, self.weight_count) < 1:
            raise ValueError("its sizes are none that a kernel has")
        if ungrouped % self.weight_count:
            raise ValueError("its sizes are none that a kernel has")
        if self.filters % self.groups or self.geometry.channels % self.groups:
            raise ValueError("its filters do not divide into groups")
        if self.index.dtype != torch.uint16 or self.index.dim() != 1:
            raise ValueError("its survivors are not 16-bit numbers")
        validate_starts(starts, self.filters, len(self.index) - _READ_AHEAD)
        flipped = self.flipped
        if flipped.dtype != torch.uint8 or flipped.shape != (self.filters,) or flipped.max() > 1:
            raise ValueError("it does not say which filters are flipped")
        if (self.paired % 2).any():
            raise ValueError("its survivors are in pairs of one")
        channel, kh, _ = self.layout.taps(self.geometry, self.index.numpy())
        if (kh < 0).any() or (channel >= self.geometry.channels).any():
            raise ValueError("its survivors lie outside of the image")
        group = np.arange(self.filters) * self.groups // self.filters
        expected = np.repeat(group, np.diff(starts.numpy()[::2]))
        if (channel[:-_READ_AHEAD] * self.groups // self.geometry.channels != expected).any():
            raise ValueError("its survivors lie in channels that their filters do not see")
        if _longest(starts) > self.max_kept:
            raise ValueError("it has more survivors than it says")
        validate_thresholds(self.thresholds, self.filters)
        self.validate_scales(self.filters)

    def emit(self, builder: Any, *inputs: Value) -> Value:
        """The second input is the shortcut, if there is one."""
        (bits, buffer), *shortcut = inputs
        assert isinstance(bits, Bits)
        geometry = self.geometry.at((bits.height, bits.width))
        if not fits(geometry, self.max_kept):
            return self.to_popcount().emit(builder, *inputs)
        has_two_sets = self.thresholds is not None and len(self.thresholds) == 2
        if bool(shortcut) != has_two_sets:
            raise MptifyError("A packed layer has a shortcut, or two thresholds per filter.")
        arguments = Tables(self, bits).arguments(builder)
        fields: dict[str, Any] = {"filters": self.filters, "input": buffer, "conv": arguments}
        if self.thresholds is None:
            form = Numbers.contiguous(self.filters, *geometry.out_size, tokens=bits.tokens)
            return builder.add("bitsliced_conv", form, **fields, **self.scales(builder))
        made = Bits(self.filters, *geometry.out_size, bits.tokens)
        if shortcut and shortcut[0].form != made:
            raise MptifyError(
                f"A packed layer makes {made}, but its shortcut is {shortcut[0].form}."
            )
        fields |= {"second_input": shortcut[0].buffer} if shortcut else {}
        return builder.add("bitsliced_conv", made, **fields)

    @property
    def _ungrouped(self) -> int:
        """The number of weights if each filter saw all channels."""
        rows, columns = self.geometry.kernel
        return self.filters * self.geometry.channels * rows * columns

    @property
    def groups(self) -> int:
        """The groups of the convolution."""
        return self._ungrouped // self.weight_count

    @property
    def paired(self) -> np.ndarray:
        """How many survivors of each filter are in pairs of two signs."""
        return (self.starts[1::2] - self.starts[:-1:2]).numpy()

    def _survivors(self) -> tuple[np.ndarray, ...]:
        """Filter, input channel, row and column of each survivor, and whether it is positive."""
        starts, flipped = self.starts.numpy(), self.flipped.numpy().astype(bool)
        filters = np.repeat(np.arange(self.filters), np.diff(starts[::2]))
        position = np.arange(len(filters)) - starts[::2][filters]
        is_subtracted = (position < self.paired[filters]) & (position % 2 == 1)
        taps = self.layout.taps(self.geometry, self.index.numpy()[:-_READ_AHEAD])
        return filters, *taps, ~is_subtracted ^ flipped[filters]

    def to_popcount(self) -> LayerKernel:
        """The same layer as one that counts bits, for images whose offsets exceed 16 bits."""
        from mptify.runtime.kernels.popcount_conv import PopcountConv

        f, channel, kh, kw, positive = self._survivors()
        weight = np.zeros((self.filters, self.geometry.channels, *self.geometry.kernel), np.int8)
        weight[f, channel, kh, kw] = np.where(positive, 1, -1)
        kernel = PopcountConv(torch.from_numpy(weight), self.thresholds, self.geometry)
        kernel.scale_(self.gain, self.bias)
        return kernel

    def index_for(self, geometry: Geometry, layout: TileLayout) -> Tensor:
        """The survivors' offsets for images of another size, or in another layout."""
        same_rows = row_bytes(geometry.out_size[1]) == row_bytes(self.geometry.out_size[1])
        if layout == self.layout and same_rows:
            return self.index
        taps = self.layout.taps(self.geometry, self.index.numpy())
        return torch.from_numpy(layout.offsets(geometry, *taps).astype(np.uint16))

    def count_per_tap(self) -> np.ndarray:
        """[filters][2][rows][columns]: the negative and the positive survivors of each tap."""
        f, _, kh, kw, positive = self._survivors()
        rows, columns = self.geometry.kernel
        taps = ((2 * f + positive) * rows + kh) * columns + kw
        counts = np.bincount(taps, minlength=2 * self.filters * rows * columns)
        return counts.reshape(self.filters, 2, rows, columns)


def _pair_up(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From lists of negative and positive survivors to one list per filter.

    Returns:
        The position of each survivor in it, the number of pairs of each filter, and which filters
        have more negative survivors than positive ones.
    """
    lengths = np.diff(starts).reshape(-1, 2)
    pairs, flipped = lengths.min(1), lengths[:, 0] > lengths[:, 1]
    lists = np.repeat(np.arange(len(starts) - 1), lengths.reshape(-1))
    rank = np.arange(len(lists)) - starts[lists]
    f, is_fewer = lists // 2, lists % 2 == flipped[lists // 2]
    of_more = np.where(rank < pairs[f], 2 * rank, pairs[f] + rank)
    return starts[::2][f] + np.where(is_fewer, 2 * rank + 1, of_more), pairs, flipped


def _longest(starts: Tensor) -> int:
    return int((starts[2::2] - starts[:-1:2]).max())
