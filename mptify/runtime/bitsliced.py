"""A binary, pruned convolution on bit planes: what its kernel in C++ is told.

A filter is the list of its survivors: offsets of the planes that it adds. The sum over a pixel's window is

    2 · (positives - negatives) - (how many positive survivors lie in the image - how many negative ones),

where *positives* counts the positive survivors whose input is +1. Pixels at the border see fewer taps: pixels that see the
same taps form a class, and each class has thresholds of its own.

The kernel takes survivors in pairs of two signs, as far as there are both, and then the others, which are to be positive: of a filter with
more negative survivors than positive ones it counts the complement, with all signs turned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.runtime.geometry import CLASSES, Geometry, Layout, fits
from mptify.runtime.planes import Bits, Kernel, Layer, Numbers, Value, row_bytes, whole_words

__all__ = ["BitslicedConv", "Tables", "fault_in_lists", "fault_in_thresholds", "in_lists", "survivors"]

_COUNTERS = (6, 8, 9, 10, 11, 12, 13, 15)  # the kernel's choices of bits per sum
_COUNTERS_OF_UNITS = (11, 15)  # where offsets are no bytes
_SPARE = 3  # offsets behind the last one, which the kernel may read


def survivors(weight: Tensor, channels: int) -> tuple[np.ndarray, ...]:
    """Filter, input channel, row and column of each survivor of M ⊙ B, and whether it is positive. Groups follow from the channels."""
    signs = weight.numpy()
    f, c, kh, kw = np.nonzero(signs)
    group = f // (len(signs) // (channels // signs.shape[1]))
    return f, group * signs.shape[1] + c, kh, kw, signs[f, c, kh, kw] > 0


def in_lists(filters: int, f: np.ndarray, positive: np.ndarray, *keys: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """The order in which survivors are listed, by filter, negative ones first, then by `keys` (the last counts most); where lists begin."""
    order = np.lexsort((*keys, positive, f))
    lengths = np.bincount((2 * f + positive)[order], minlength=2 * filters)
    return order, torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


class BitslicedConv(Layer):
    """Signs of thresholded sums, or the sums themselves. `weight` is M ⊙ B: -1, 0 or 1.

    `thresholds` [sets][filters]: an output is +1 where its sum reaches its filter's. With two sets, the second holds where the
    shortcut is +1.
    """

    SETTINGS = ("filters", "geometry", "layout", "most_kept", "weight_count", "survivor_count", "weight_bytes")
    index: Tensor
    starts: Tensor
    flipped: Tensor
    thresholds: Tensor | None

    def __init__(self, weight: Tensor, thresholds: Tensor | None, geometry: Geometry):
        super().__init__()
        self.filters = filters = len(weight)
        self.geometry = geometry
        f, channel, kh, kw, positive = survivors(weight, geometry.channels)
        self.layout = Layout.of(geometry, len(f))
        offsets = self.layout.offsets(geometry, channel, kh, kw)
        order, starts = in_lists(filters, f, positive, offsets)
        place, pairs, flipped = _in_pairs(starts.numpy())
        index = np.zeros(len(f) + _SPARE, np.uint16)
        index[place] = offsets[order]
        starts[1::2] = starts[:-1:2] + 2 * torch.from_numpy(pairs)
        self.most_kept = _longest(starts)
        self.register_buffer("index", torch.from_numpy(index))
        self.register_buffer("starts", starts)
        self.register_buffer("flipped", torch.from_numpy(flipped.astype(np.uint8)))
        self.register_buffer("thresholds", None if thresholds is None else thresholds.to(torch.int32))
        self.weight_count, self.survivor_count, self.weight_bytes = weight.numel(), len(f), 2 * len(f)

    @property
    def _ungrouped(self) -> int:
        """The weights that there would be if each filter saw all channels."""
        rows, columns = self.geometry.kernel
        return self.filters * self.geometry.channels * rows * columns

    @property
    def blocks(self) -> int:
        """Of filters, each of which sees channels of its own: a convolution's groups."""
        return self._ungrouped // self.weight_count

    @property
    def paired(self) -> np.ndarray:
        """How many survivors of each filter are in pairs of two signs."""
        return (self.starts[1::2] - self.starts[:-1:2]).numpy()

    def plan(self, to: Any, *inputs: Value) -> Value:
        """Planes of signs; where there are no thresholds, the sums (float32). A second input is the shortcut."""
        (bits, place), *shortcut = inputs
        geometry = self.geometry.at((bits.height, bits.width))
        if not fits(geometry, self.most_kept):
            return self._counted().plan(to, *inputs)
        tables = Tables(self, bits)
        if len(shortcut) != (self.thresholds is not None and len(self.thresholds) == 2):
            raise MptifyError("A packed layer has two thresholds per filter where it has a shortcut, and only there.")
        size = tables.geometry.out_size
        fields: dict[str, Any] = {"filters": self.filters, "in_": place, "one": tables.put(to)}
        if self.thresholds is None:
            return to.add("sums", Numbers.in_order(self.filters, *size, tokens=bits.tokens), **fields, **self.scales(to))
        made = Bits(self.filters, *size, bits.tokens)
        if shortcut and shortcut[0].form != made:
            raise MptifyError(f"A packed layer makes {made}, and its shortcut is {shortcut[0].form}.")
        fields |= {"second": shortcut[0].place} if shortcut else {}
        return to.add("conv", made, **fields)

    def fault(self) -> str | None:
        if not fits(self.geometry, self.most_kept) or min(self._ungrouped, self.weight_count) < 1 or self._ungrouped % self.weight_count:
            return "its sizes are none that a kernel has"
        if self.filters % self.blocks or self.geometry.channels % self.blocks:
            return "its filters do not fall into groups"
        if self.index.dtype != torch.uint16 or self.index.dim() != 1:
            return "its survivors are no 16-bit numbers"
        fault = fault_in_lists(self.starts, self.filters, len(self.index) - _SPARE)
        if fault:
            return fault
        if self.flipped.dtype != torch.uint8 or tuple(self.flipped.shape) != (self.filters,) or int(self.flipped.max()) > 1:
            return "it does not say of which sign most survivors are"
        if (self.paired % 2).any():
            return "its survivors are in pairs of one"
        channel, kh, _ = self.layout.taps(self.geometry, self.index.numpy())
        if (kh < 0).any() or (channel >= self.geometry.channels).any():
            return "its survivors lie outside of the image"
        block = np.repeat(np.arange(self.filters) * self.blocks // self.filters, np.diff(self.starts.numpy()[::2]))
        if (channel[:-_SPARE] * self.blocks // self.geometry.channels != block).any():
            return "its survivors lie in channels that their filters do not see"
        if _longest(self.starts) > self.most_kept:
            return "it has more survivors than it says"
        return fault_in_thresholds(self.thresholds, self.filters) or self.fault_in_scales(self.filters)

    def _survivors(self) -> tuple[np.ndarray, ...]:
        """Filter, input channel, row and column of each survivor, and whether it is positive."""
        starts, flipped = self.starts.numpy(), self.flipped.numpy().astype(bool)
        filters = np.repeat(np.arange(self.filters), np.diff(starts[::2]))
        place = np.arange(len(filters)) - starts[::2][filters]
        in_pairs = place < self.paired[filters]
        positive = ~(in_pairs & (place % 2 == 1)) ^ flipped[filters]
        return filters, *self.layout.taps(self.geometry, self.index.numpy()[:-_SPARE]), positive

    def _counted(self) -> Kernel:
        """The same layer as one that counts bits: for images on which its planes can't be told apart by 16 bits."""
        from mptify.runtime.windows import WindowConv  # which is made of this module

        f, channel, kh, kw, positive = self._survivors()
        weight = np.zeros((self.filters, self.geometry.channels, *self.geometry.kernel), np.int8)
        weight[f, channel, kh, kw] = np.where(positive, 1, -1)
        counted = WindowConv(torch.from_numpy(weight), self.thresholds, self.geometry)
        counted.scale_(self.gain, self.offset)
        return counted

    def index_for(self, geometry: Geometry, layout: Layout) -> Tensor:
        """The offsets of the survivors' planes, on images of another size or in another layout."""
        if layout == self.layout and row_bytes(geometry.out_size[1]) == row_bytes(self.geometry.out_size[1]):
            return self.index
        return torch.from_numpy(layout.offsets(geometry, *self.layout.taps(self.geometry, self.index.numpy())).astype(np.uint16))

    def per_tap(self) -> np.ndarray:
        """[filters][2][rows][columns]: how many negative and positive survivors there are at each place of the kernel."""
        f, _, kh, kw, positive = self._survivors()
        rows, columns = self.geometry.kernel
        counts = np.bincount(((2 * f + positive) * rows + kh) * columns + kw, minlength=2 * self.filters * rows * columns)
        return counts.reshape(self.filters, 2, rows, columns)


def _in_pairs(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From lists of negative and positive survivors: the place of each in its filter's one list, how many pairs there are in each, and
    in which filters the negative ones are more."""
    lengths = np.diff(starts).reshape(-1, 2)
    pairs, flipped = lengths.min(1), lengths[:, 0] > lengths[:, 1]
    lists = np.repeat(np.arange(len(starts) - 1), lengths.reshape(-1))
    rank = np.arange(len(lists)) - starts[lists]
    f, fewer = lists // 2, lists % 2 == flipped[lists // 2]
    inside = np.where(fewer, 2 * rank + 1, np.where(rank < pairs[f], 2 * rank, pairs[f] + rank))
    return starts[::2][f] + inside, pairs, flipped


class Tables:
    """What the kernel needs for images of one size, beside the survivors: above all, what its counters start from.

    For signs, minus the threshold. For sums, that of a threshold of 0: what the counters end with is then half the sum, rounded down, and
    whether it is odd depends on the pixel's class alone.
    """

    def __init__(self, layer: BitslicedConv, bits: Bits):
        if bits.channels != layer.geometry.channels:
            raise MptifyError(f"A packed layer reads {layer.geometry.channels} channels, and was given {bits.channels}.")
        self.layer, self.in_stride = layer, bits.stride
        self.geometry = geometry = layer.geometry.at((bits.height, bits.width))
        if not fits(geometry, layer.most_kept):
            raise MptifyError(f"Images of {bits.height}×{bits.width} are more than this layer can do; pack the model with one of them.")
        self.layout = Layout.of(geometry, layer.survivor_count)
        height, width = geometry.out_size
        (row_class, rows), (column_class, columns) = geometry.taps_seen(0), geometry.taps_seen(1)
        counters = _COUNTERS if self.layout.unit == 1 else _COUNTERS_OF_UNITS
        self.bits = next(bits for bits in counters if 1 << (bits - 1) > layer.most_kept)
        thresholds = np.zeros((1, layer.filters), np.int64) if layer.thresholds is None else layer.thresholds.numpy().astype(np.int64)
        self.sets = len(thresholds)
        per_row = -(-len(columns) // CLASSES)
        self.groups = len(rows) * per_row
        self.stride = Bits(layer.filters, height, width).stride
        self.init = np.zeros((layer.filters, self.sets, self.groups, self.bits), np.uint8)
        self.odd = np.zeros((layer.filters, self.groups), np.uint8)
        self.unions = np.zeros((self.groups, 1 << CLASSES, whole_words(height, width)), np.uint8)
        taps, flipped = layer.per_tap(), layer.flipped.numpy().astype(bool)
        pairs = layer.paired // 2
        for i, seen_rows in enumerate(rows):
            for j, seen_columns in enumerate(columns):
                negative, positive = taps[:, :, seen_rows][..., seen_columns].sum((2, 3)).T
                group, place = i * per_row + j // CLASSES, j % CLASSES
                self.odd[:, group] |= ((positive - negative) % 2 << place).astype(np.uint8)
                for which, wanted in enumerate(thresholds):
                    least = -((negative - positive - wanted) // 2)  # half of it, rounded up
                    least = np.clip(least, -negative, positive + 1)
                    first = np.where(flipped, least - 1, -least) - pairs
                    for bit in range(self.bits):
                        self.init[:, which, group, bit] |= ((first >> bit & 1) << place).astype(np.uint8)
                mask = np.zeros((height, row_bytes(width) * 8), np.uint8)
                mask[:, :width] = (row_class == i)[:, None] & (column_class == j)
                plane = np.packbits(mask, axis=-1, bitorder="little").reshape(-1)
                for subset in range(1 << CLASSES):
                    if subset >> place & 1:
                        self.unions[group, subset, : len(plane)] |= plane
        cells = self.unions[:, -1].reshape(self.groups, -1, 8).any(-1)
        self.present = (cells.astype(np.uint64) << np.arange(self.groups, dtype=np.uint64)[:, None]).sum(0, dtype=np.uint64)
        self.present[self.present == 0] = 1  # nothing but what lies behind the image: any threshold will do

    def put(self, to: Any) -> dict[str, Any]:
        """Into a plan."""
        layer, geometry, layout = self.layer, self.geometry, self.layout
        arrays = {
            "index": layer.index_for(geometry, layout), "starts": layer.starts, "flipped": layer.flipped, "init": self.init,
            "odd": self.odd if layer.thresholds is None else None, "unions": self.unions, "present": self.present,
            "masks": _column_masks(geometry), "phases": np.array(geometry.phases, np.int64),
        }  # fmt: skip
        return {name: to.constant(array) for name, array in arrays.items() if array is not None} | {
            "shape": geometry.shape(), "blocks": layer.blocks, "unit": layout.unit, "strip": layout.strip, "part": layout.part,
            "stride": self.stride, "groups": self.groups, "sets": self.sets, "bits": self.bits,
            "in_stride": self.in_stride, "union_stride": self.unions.shape[-1],
        }  # fmt: skip


def fault_in_lists(starts: Tensor, filters: int, survivors: int) -> str | None:
    """What is wrong with where the lists of survivors begin: two per filter, one after the other."""
    if starts.dtype != torch.int32 or tuple(starts.shape) != (2 * filters + 1,) or filters < 1:
        return "it does not say where each filter's survivors begin"
    if int(starts[0]) != 0 or int(starts[-1]) != survivors or bool((starts[1:] < starts[:-1]).any()):
        return "its filters' survivors do not follow each other"
    return None


def fault_in_thresholds(sets: Tensor | None, filters: int) -> str | None:
    fits_them = sets is None or (sets.dtype == torch.int32 and tuple(sets.shape) in ((1, filters), (2, filters)))
    return None if fits_them else "its thresholds are not one or two per filter"


def _longest(starts: Tensor) -> int:
    return int((starts[2::2] - starts[:-1:2]).max())


def _column_masks(geometry: Geometry) -> np.ndarray | None:
    """For each column of the kernel, the pixels of a plane, shifted as a whole, that come from the row that they stand in.

    None where planes can't be shifted as a whole.
    """
    (height, width), out_width = geometry.size, geometry.out_size[1]
    shifts = np.arange(geometry.kernel[1]) * geometry.dilation[1] - geometry.padding[1]
    if geometry.stride != (1, 1) or row_bytes(width) != row_bytes(out_width) or abs(shifts).max() > 63:
        return None
    columns = np.arange(8 * row_bytes(width))
    seen = (columns + shifts[:, None] >= 0) & (columns + shifts[:, None] < width) & (columns < out_width)
    rows = np.packbits(seen, axis=1, bitorder="little")
    whole = -(-height * row_bytes(width) // 32) * 32 + 32  # the kernel shifts 32 bytes at a time, from anywhere
    masks = np.zeros((len(shifts), whole), np.uint8)
    masks[:, : height * row_bytes(width)] = np.tile(rows, height)
    return masks
