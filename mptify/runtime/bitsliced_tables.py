"""What bit-sliced layers read beside their survivors, for images of one size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mptify.errors import MptifyError
from mptify.runtime.geometry import CLASSES, Geometry, TileLayout, fits
from mptify.runtime.values import Bits, row_bytes, whole_words

if TYPE_CHECKING:
    from mptify.runtime.kernels.bitsliced_conv import BitslicedConv

__all__ = ["Tables"]

_COUNTER_BITS = (6, 8, 9, 10, 11, 12, 13, 15)  # that csrc/bitsliced_conv.inl is compiled for
_COUNTER_BITS_OF_UNITS = (11, 15)  # the same, where offsets do not count bytes


class Tables:
    """The tables of a layer for images of one size: above all, what its counters start from.

    To make signs, the counters start from minus the threshold. To make sums, they start as for a
    threshold of 0. They then end with half the sum, rounded down; whether the sum is odd depends
    on the class of the pixel alone.

    Args:
        layer: The layer.
        bits: The form of its input.
    """

    def __init__(self, layer: BitslicedConv, bits: Bits):
        size, channels = (bits.height, bits.width), layer.geometry.channels
        if bits.channels != channels:
            raise MptifyError(f"A packed layer reads {channels} channels, not {bits.channels}.")
        self.layer, self.in_stride = layer, bits.stride
        self.geometry = geometry = layer.geometry.at(size)
        if not fits(geometry, layer.max_kept):
            raise MptifyError(
                f"An image of {size[0]}×{size[1]} is too large for this layer; pack the model with "
                "an example of that size."
            )
        self.layout = TileLayout.of(geometry, layer.survivor_count)
        choices = _COUNTER_BITS if self.layout.unit == 1 else _COUNTER_BITS_OF_UNITS
        self.bits = next(bits for bits in choices if 1 << (bits - 1) > layer.max_kept)
        self.stride = Bits(layer.filters, *geometry.out_size).stride
        if layer.thresholds is None:
            self.thresholds = np.zeros((1, layer.filters), np.int64)
        else:
            self.thresholds = layer.thresholds.numpy().astype(np.int64)
        self._fill()

    def _fill(self) -> None:
        """The tables of each class of pixels. Up to three classes of a row form a group."""
        layer, geometry = self.layer, self.geometry
        height, width = geometry.out_size
        (row_class, rows), (column_class, columns) = geometry.taps_seen(0), geometry.taps_seen(1)
        per_row, sets = -(-len(columns) // CLASSES), len(self.thresholds)
        self.groups = groups = len(rows) * per_row
        self.init = np.zeros((layer.filters, sets, groups, self.bits), np.uint8)
        self.odd = np.zeros((layer.filters, groups), np.uint8)
        self.unions = np.zeros((groups, 1 << CLASSES, whole_words(height, width)), np.uint8)
        taps = layer.count_per_tap()
        for i, seen_rows in enumerate(rows):
            for j, seen_columns in enumerate(columns):
                negative, positive = taps[:, :, seen_rows][..., seen_columns].sum((2, 3)).T
                group, member = i * per_row + j // CLASSES, j % CLASSES
                self.odd[:, group] |= ((positive - negative) % 2 << member).astype(np.uint8)
                self._fill_init(group, member, negative, positive)
                pixels = np.zeros((height, row_bytes(width) * 8), np.uint8)
                pixels[:, :width] = (row_class == i)[:, None] & (column_class == j)
                plane = np.packbits(pixels, axis=-1, bitorder="little").reshape(-1)
                for subset in range(1 << CLASSES):
                    if subset >> member & 1:
                        self.unions[group, subset, : len(plane)] |= plane
        cells = self.unions[:, -1].reshape(groups, -1, 8).any(-1).astype(np.uint64)
        bit_of_group = np.arange(groups, dtype=np.uint64)[:, None]
        self.present = (cells << bit_of_group).sum(0, dtype=np.uint64)
        self.present[self.present == 0] = 1  # behind the image any threshold will do

    def _fill_init(
        self, group: int, member: int, negative: np.ndarray, positive: np.ndarray
    ) -> None:
        """What counters start from in one class, which sees so many survivors of each filter."""
        flipped, pairs = self.layer.flipped.numpy().astype(bool), self.layer.paired // 2
        for which, wanted in enumerate(self.thresholds):
            least = -((negative - positive - wanted) // 2)  # half of the threshold, rounded up
            least = np.clip(least, -negative, positive + 1)
            first = np.where(flipped, least - 1, -least) - pairs
            for bit in range(self.bits):
                is_set = (first >> bit & 1) << member
                self.init[:, which, group, bit] |= is_set.astype(np.uint8)

    def arguments(self, program: Any) -> dict[str, Any]:
        """The kernel arguments, with the tables as constants of a program."""
        layer, geometry, layout = self.layer, self.geometry, self.layout
        arrays = {
            "index": layer.index_for(geometry, layout),
            "starts": layer.starts,
            "flipped": layer.flipped,
            "init": self.init,
            "odd": self.odd if layer.thresholds is None else None,
            "unions": self.unions,
            "present": self.present,
            "masks": _column_masks(geometry),
            "phases": np.array(geometry.phases, np.int64),
        }
        constants = {
            name: program.constant(array) for name, array in arrays.items() if array is not None
        }
        return constants | {
            "shape": geometry.shape(),
            "groups": layer.groups,
            "unit": layout.unit,
            "tile": layout.tile,
            "plane": layout.plane,
            "stride": self.stride,
            "class_groups": self.groups,
            "sets": len(self.thresholds),
            "bits": self.bits,
            "in_stride": self.in_stride,
            "union_stride": self.unions.shape[-1],
        }


def _column_masks(geometry: Geometry) -> np.ndarray | None:
    """For each kernel column, which pixels stay in their row when a plane is shifted as a whole.

    None if planes can't be shifted as a whole.
    """
    (height, width), out_width = geometry.size, geometry.out_size[1]
    row = row_bytes(width)
    shifts = np.arange(geometry.kernel[1]) * geometry.dilation[1] - geometry.padding[1]
    if geometry.stride != (1, 1) or row != row_bytes(out_width) or abs(shifts).max() > 63:
        return None
    columns = np.arange(8 * row)
    source = columns + shifts[:, None]
    rows = np.packbits(
        (source >= 0) & (source < width) & (columns < out_width), axis=1, bitorder="little"
    )
    padded = -(-height * row // 32) * 32 + 32  # the kernel shifts 32 bytes at a time, at any byte
    masks = np.zeros((len(shifts), padded), np.uint8)
    masks[:, : height * row] = np.tile(rows, height)
    return masks
