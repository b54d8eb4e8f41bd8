"""A binary, pruned convolution on bit planes: what its kernel in C++ is told.

A filter is the list of its survivors: offsets of the planes that it adds. The sum over a pixel's window is

    2 · (positives - negatives) - (how many positive survivors lie in the image - how many negative ones),

where *positives* counts the positive survivors whose input is +1. Pixels at the border see fewer taps: pixels that see the
same taps form a class, and each class has thresholds of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.runtime.library import Shape
from mptify.runtime.planes import Bits, Kernel, Numbers, Value, row_bytes, stride_of

__all__ = ["BitslicedConv", "Geometry", "Tables", "fault_in_lists", "fault_in_thresholds", "fits", "runs_of", "survivors"]

_COUNTERS = (6, 8, 9, 10, 11, 12, 13, 15)  # the kernel's choices of bits per sum
_MOST_GROUPS = 64  # of classes
_CLASSES = 3  # in a group
_SPARE = 3  # offsets behind the last one, which the kernel may read


@dataclass(frozen=True)
class Geometry:
    """A convolution on images of one size."""

    channels: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    @cached_property
    def out_size(self) -> tuple[int, int]:
        height, width = (
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, pad, dilation in zip(self.size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        )
        return height, width

    @cached_property
    def phases(self) -> list[int]:
        """First rows of the taps, as far as the stride does not reach them from each other."""
        return sorted({kh * self.dilation[0] % self.stride[0] for kh in range(self.kernel[0])})

    @cached_property
    def rows(self) -> int:
        """Of an expanded plane."""
        return self.out_size[0] + (self.kernel[0] - 1) * self.dilation[0] // self.stride[0]

    @property
    def planes(self) -> int:
        return self.channels * self.kernel[1] * len(self.phases)

    def offsets(self, channel: np.ndarray, kh: np.ndarray, kw: np.ndarray) -> np.ndarray:
        """Where the kernel finds what a tap sees, in rows."""
        down = kh * self.dilation[0]
        phase = np.searchsorted(self.phases, down % self.stride[0])
        return ((channel * self.kernel[1] + kw) * len(self.phases) + phase) * self.rows + down // self.stride[0]

    def taps_seen(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """For rows (0) or columns (1): the class of each, and for each class which taps lie in the image."""
        start = np.arange(self.out_size[axis]) * self.stride[axis] - self.padding[axis]
        places = start[:, None] + np.arange(self.kernel[axis]) * self.dilation[axis]
        seen, classes = np.unique((places >= 0) & (places < self.size[axis]), axis=0, return_inverse=True)
        return classes.reshape(-1), seen

    def at(self, size: tuple[int, int]) -> Geometry:
        """The same on images of another size."""
        return replace(self, size=size)

    def shape(self) -> Shape:
        """For the library; images that are too small for the kernel are refused here."""
        if min(self.out_size) < 1:
            raise MptifyError(f"An image of {self.size[0]}×{self.size[1]} is too small for a layer that sees {self.kernel} pixels.")
        sizes = (self.channels, *self.size, row_bytes(self.size[1]), *self.out_size, row_bytes(self.out_size[1]))
        return Shape(*sizes, *self.kernel, *self.stride, *self.padding, *self.dilation, len(self.phases), self.rows)


def fits(geometry: Geometry, most_kept: int) -> bool:
    """Whether the kernel can do it: offsets in 16 bits, sums in 15, and not too many kinds of borders."""
    if min(geometry.out_size) < 1 or geometry.planes * geometry.rows > 1 << 16 or most_kept >= 1 << 14:
        return False
    rows, columns = (len(geometry.taps_seen(axis)[1]) for axis in (0, 1))
    return rows * -(-columns // _CLASSES) <= _MOST_GROUPS


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


class BitslicedConv(Kernel):
    """Signs of thresholded sums, or the sums themselves. `weight` is M ⊙ B: -1, 0 or 1.

    `thresholds` [sets][filters]: an output is +1 where its sum reaches its filter's. With two sets, the second holds where the
    shortcut is +1.
    """

    SETTINGS = ("filters", "geometry", "most_kept", "weight_count", "survivor_count", "weight_bytes")
    index: Tensor
    starts: Tensor
    thresholds: Tensor | None

    def __init__(self, weight: Tensor, thresholds: Tensor | None, geometry: Geometry):
        super().__init__()
        self.filters = filters = len(weight)
        self.geometry = geometry
        f, channel, kh, kw, positive = survivors(weight, geometry.channels)
        offsets = geometry.offsets(channel, kh, kw)
        order, starts = in_lists(filters, f, positive, offsets)
        index = np.concatenate([offsets[order], np.zeros(_SPARE, np.int64)]).astype(np.uint16)
        self.most_kept = _longest(starts)
        self.register_buffer("index", torch.from_numpy(index))
        self.register_buffer("starts", starts)
        self.register_buffer("thresholds", None if thresholds is None else thresholds.to(torch.int32))
        self.weight_count, self.survivor_count, self.weight_bytes = weight.numel(), len(order), 2 * len(order)

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
            runs = runs_of(tables.classes, tables.classes)
            form: Any = Numbers.in_order(self.filters, *size, tokens=bits.tokens)
            return to.add("sums", form, runs=to.constant(runs), run_count=len(runs), **fields)
        made = Bits(self.filters, *size, bits.tokens)
        if shortcut and shortcut[0].form != made:
            raise MptifyError(f"A packed layer makes {made}, and its shortcut is {shortcut[0].form}.")
        fields |= {"second": shortcut[0].place} if shortcut else {}
        return to.add("conv", made, **fields)

    def fault(self) -> str | None:
        if not fits(self.geometry, self.most_kept):
            return "its sizes are none that a kernel has"
        if self.index.dtype != torch.uint16 or self.index.dim() != 1:
            return "its survivors are no 16-bit numbers"
        fault = fault_in_lists(self.starts, self.filters, len(self.index) - _SPARE)
        if fault:
            return fault
        if not self._sees_taps():
            return "its survivors lie outside of the image"
        if _longest(self.starts) > self.most_kept:
            return "it has more survivors than it says"
        return fault_in_thresholds(self.thresholds, self.filters)

    def _sees_taps(self) -> bool:
        """Whether each offset is one that a tap of the kernel has."""
        geometry = self.geometry
        plane, step = np.divmod(self.index.numpy().astype(np.int64), geometry.rows)
        return bool((plane < geometry.planes).all() and (self._rows()[plane % len(geometry.phases), step] >= 0).all())

    def _counted(self) -> Kernel:
        """The same layer as one that counts bits: for images on which its planes can't be told apart by 16 bits."""
        from mptify.runtime.windows import WindowConv  # which is made of this module

        geometry = self.geometry
        plane, step = np.divmod(self.index.numpy()[:-_SPARE].astype(np.int64), geometry.rows)
        row = self._rows()[plane % len(geometry.phases), step]
        channel, column = np.divmod(plane // len(geometry.phases), geometry.kernel[1])
        lists = np.repeat(np.arange(2 * self.filters), np.diff(self.starts.numpy()))
        weight = np.zeros((self.filters, geometry.channels, *geometry.kernel), np.int8)
        weight[lists // 2, channel, row, column] = np.where(lists % 2, 1, -1)
        return WindowConv(torch.from_numpy(weight), self.thresholds, geometry)

    def _rows(self) -> np.ndarray:
        """[phases][rows of a plane]: which row of the kernel begins there; -1 where none does."""
        geometry = self.geometry
        down = np.arange(geometry.kernel[0]) * geometry.dilation[0]
        row_of = np.full((len(geometry.phases), geometry.rows), -1)
        row_of[np.searchsorted(geometry.phases, down % geometry.stride[0]), down // geometry.stride[0]] = np.arange(geometry.kernel[0])
        return row_of

    def index_at(self, geometry: Geometry) -> Tensor:
        """The offsets of the survivors' planes on images of another size."""
        old = self.geometry.rows
        if geometry.rows == old:
            return self.index
        offsets = self.index.numpy().astype(np.int64)
        return torch.from_numpy((offsets // old * geometry.rows + offsets % old).astype(np.uint16))

    def taps(self) -> np.ndarray:
        """[filters][2][rows][columns]: how many negative and positive survivors there are at each place of the kernel."""
        geometry, row_of = self.geometry, self._rows()
        offsets, starts = self.index.numpy()[:-_SPARE].astype(np.int64), self.starts.numpy()
        plane, step = offsets // geometry.rows, offsets % geometry.rows
        row = row_of[plane % len(geometry.phases), step]
        column = plane // len(geometry.phases) % geometry.kernel[1]
        lists = np.repeat(np.arange(2 * self.filters), np.diff(starts))
        places = (lists * geometry.kernel[0] + row) * geometry.kernel[1] + column
        counts = np.bincount(places, minlength=2 * self.filters * math.prod(geometry.kernel))
        return counts.reshape(self.filters, 2, *geometry.kernel)


class Tables:
    """What the kernel needs for images of one size, beside the survivors."""

    def __init__(self, layer: BitslicedConv, bits: Bits):
        if bits.channels != layer.geometry.channels:
            raise MptifyError(f"A packed layer reads {layer.geometry.channels} channels, and was given {bits.channels}.")
        self.layer, self.in_stride = layer, bits.stride
        self.geometry = geometry = layer.geometry.at((bits.height, bits.width))
        if not fits(geometry, layer.most_kept):
            raise MptifyError(f"Images of {bits.height}×{bits.width} are more than this layer can do; pack the model with one of them.")
        height, width = geometry.out_size
        (row_class, rows), (column_class, columns) = geometry.taps_seen(0), geometry.taps_seen(1)
        self.bits = next(bits for bits in _COUNTERS if 1 << (bits - 1) > layer.most_kept)
        thresholds = [] if layer.thresholds is None else list(layer.thresholds.numpy())
        self.sets = max(1, len(thresholds))
        per_row = -(-len(columns) // _CLASSES)
        self.groups = len(rows) * per_row
        self.stride = stride_of(height, width)
        self.bias = np.zeros((layer.filters, len(rows) * len(columns)), np.int16)
        self.classes = (row_class[:, None] * len(columns) + column_class[None]).astype(np.uint8)
        init = np.zeros((layer.filters, self.sets, self.groups, self.bits), np.uint8)
        self.init = init if thresholds else None
        self.unions = np.zeros((self.groups, 1 << _CLASSES, self.stride), np.uint8)
        taps = layer.taps()
        for i, seen_rows in enumerate(rows):
            for j, seen_columns in enumerate(columns):
                negative, positive = taps[:, :, seen_rows][..., seen_columns].sum((2, 3)).T
                self.bias[:, i * len(columns) + j] = positive - negative
                group, place = i * per_row + j // _CLASSES, j % _CLASSES
                for which, wanted in enumerate(thresholds):
                    least = -((negative - positive - wanted) // 2)  # half of it, rounded up
                    least = np.clip(least, -negative, positive + 1)
                    for bit in range(self.bits):
                        init[:, which, group, bit] |= ((least - 1 >> bit & 1) << place).astype(np.uint8)
                mask = np.zeros((height, row_bytes(width) * 8), np.uint8)
                mask[:, :width] = self.classes == i * len(columns) + j
                plane = np.packbits(mask, axis=-1, bitorder="little").reshape(-1)
                for subset in range(1 << _CLASSES):
                    if subset >> place & 1:
                        self.unions[group, subset, : len(plane)] |= plane
        cells = self.unions[:, -1].reshape(self.groups, -1, 8).any(-1)
        self.present = (cells.astype(np.uint64) << np.arange(self.groups, dtype=np.uint64)[:, None]).sum(0, dtype=np.uint64)
        self.present[self.present == 0] = 1  # nothing but what lies behind the image: any threshold will do

    def put(self, to: Any, which: int = 0) -> dict[str, Any]:
        """Into a plan; `which` scratch room the layer may use."""
        geometry, masks = self.geometry, _column_masks(self.geometry)
        arrays = {
            "index": self.layer.index_at(geometry), "starts": self.layer.starts, "init": self.init, "unions": self.unions,
            "present": self.present, "masks": masks, "phases": np.array(geometry.phases, np.int64), "bias": self.bias,
        }  # fmt: skip
        unit = row_bytes(geometry.out_size[1])
        return {name: to.constant(array) for name, array in arrays.items() if array is not None} | {
            "shape": geometry.shape(), "scratch": to.scratch(geometry.planes * geometry.rows * unit + 128, which), "unit": unit,
            "stride": self.stride, "groups": self.groups, "sets": self.sets, "bits": self.bits, "in_stride": self.in_stride,
            "classes": self.bias.shape[1],
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
    masks = np.zeros((len(shifts), (height * row_bytes(width) + 15) // 8 * 8), np.uint8)
    masks[:, : height * row_bytes(width)] = np.tile(rows, height)
    return masks


def runs_of(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Pixels in a row that are of one class in each of two layers: begin and end in a plane, the first pixel, the classes."""
    height, width = one.shape
    changes = np.ones((height, width), bool)
    changes[:, 1:] = (one[:, 1:] != one[:, :-1]) | (other[:, 1:] != other[:, :-1])
    y, x = np.nonzero(changes)
    pixel = y * width + x
    ends = np.append(pixel[1:], height * width)
    begin = y * row_bytes(width) * 8 + x
    return np.stack([begin, begin + ends - pixel, pixel, one[y, x], other[y, x]], axis=1).astype(np.int64)
