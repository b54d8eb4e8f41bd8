"""How a convolution on lanes reads its input, is cut into tiles, and lists its taps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np

from mptify.runtime.geometry import Geometry
from mptify.runtime.library import word_bytes
from mptify.runtime.values import LANE_TYPES, Planes

__all__ = ["Arrangement", "LaneLayout", "Sums", "TapLists", "tap_lists"]

UNIT = 8  # bytes; as in csrc/lanes.inl
_L1_BYTES = 26 << 10  # for planes and sums, beside lists and what is read besides
# Costs in nanoseconds, measured on a core with 512-bit vectors (docs/packed.md):
_ADDITION = 0.27  # of one vector
_COPY = 0.4  # of one vector that a tap sees
_LIST = 2.5  # of a filter's taps of one sign in a group of channels
_WRITE = 1.6  # of one vector of float32, from sums to output
_ARRANGE = 0.5  # of one vector of the input


class Sums(NamedTuple):
    """What adds up, and how far.

    Attributes:
        lane_bytes: The bytes of a lane: float32 if 4, otherwise integers.
        most: Taps until a byte is full and is widened; 0 if sums are lanes.
        lowest: The lowest level of the input.
        highest: The highest level of the input.
    """

    lane_bytes: int
    most: int = 0
    lowest: int = 0
    highest: int = 0

    @classmethod
    def of(cls, levels: tuple[int, int] | None, per_sign: np.ndarray) -> Sums | None:
        """The narrowest lanes that can't overflow; None if there are none.

        Args:
            levels: The lowest and highest level of the input; None for float32.
            per_sign: [positive, negative][filters][channels]: how many taps there are.
        """
        if levels is None:
            return cls(4)
        lowest, highest = levels
        found = cls(1, 0, lowest, highest)
        if max(-lowest, highest) <= 3 and found._fits(per_sign):
            return found
        longest = int(per_sign.sum(2).max()) * max(-lowest, highest)
        most = (255 if lowest == 0 else 127) // max(-lowest, highest)
        if most > 0 and longest <= np.iinfo(np.int16).max:
            return cls(1, most, lowest, highest)
        found = cls(2, 0, lowest, highest)
        return found if found._fits(per_sign) else None

    def _fits(self, per_sign: np.ndarray) -> bool:
        """Whether one channel's taps fit a lane."""
        return bool(self._is_safe(per_sign).all())

    def _is_safe(self, per_sign: np.ndarray) -> np.ndarray:
        """Whether sums of so many taps of both signs fit a lane."""
        positive, negative = per_sign.astype(np.int64)
        limit = 2 ** (8 * self.lane_bytes - 1) - 1
        above = positive * self.highest - negative * self.lowest
        below = negative * self.highest - positive * self.lowest
        return (above <= limit) & (below <= limit)

    def phase_ends(self, per_sign: np.ndarray, group_channels: int) -> np.ndarray | None:
        """For each group of channels: whether sums are widened behind it; None if never.

        Raises:
            OverflowError: A group of channels alone is too many.
        """
        if self.lane_bytes == 4 or self.most:
            return None
        starts = np.arange(0, per_sign.shape[2], group_channels)
        groups = np.add.reduceat(per_sign, starts, axis=2)
        if self._is_safe(groups.sum(2)).all():
            return None
        ends = np.zeros(len(starts), np.uint8)
        before = np.zeros_like(groups[:, :, 0])
        for number in range(len(starts)):
            group = groups[:, :, number]
            if not self._is_safe(group).all():
                raise OverflowError
            before = before + group
            if not self._is_safe(before).all():
                ends[number - 1], before = 1, group
        ends[-1] = 1
        return ends


@dataclass(frozen=True)
class Arrangement:
    """Planes in which what a tap sees of all pixels is one run of memory.

    Rows and columns that a stride skips are put into planes of their own, the phases.

    Attributes:
        dtype: "float32", "uint8" or "int8".
        row: The elements from one row to the next, of the planes and of the lanes of the output.
        rows: The rows of a phase.
        row_phases: The first rows of the phases.
        column_phases: The first columns of the phases.
        tail: The elements behind the last row that taps read.
    """

    dtype: str
    row: int
    rows: int
    row_phases: tuple[int, ...] = (0,)
    column_phases: tuple[int, ...] = (0,)
    tail: int = 0

    @classmethod
    def of(cls, geometry: Geometry, dtype: str) -> Arrangement:
        (kh, kw), (dh, dw), (sh, sw) = geometry.kernel, geometry.dilation, geometry.stride
        down, across = np.arange(kh) * dh, np.arange(kw) * dw
        return cls(
            dtype,
            geometry.out_size[1] + int(across[-1]) // sw,
            geometry.out_size[0] + int(down[-1]) // sh,
            tuple(int(one) for one in np.unique(down % sh)),
            tuple(int(one) for one in np.unique(across % sw)),
            int(across[-1]) // sw,
        )

    @property
    def item_bytes(self) -> int:
        return LANE_TYPES[self.dtype][1]

    @property
    def phase(self) -> int:
        """The elements of a phase."""
        read = (self.rows * self.row + self.tail) * self.item_bytes
        return -(-read // 64) * 64 // self.item_bytes

    @property
    def plane(self) -> int:
        """The elements of a channel."""
        return self.phase * len(self.row_phases) * len(self.column_phases)

    def bytes(self, channels: int) -> int:
        return channels * self.plane * self.item_bytes + 2048

    def tap_offsets(self, geometry: Geometry) -> np.ndarray:
        """For each tap, the bytes from the start of its channel to what the first pixel sees."""
        (kh, kw), (dh, dw), (sh, sw) = geometry.kernel, geometry.dilation, geometry.stride
        down, across = np.arange(kh) * dh, np.arange(kw) * dw
        y = np.searchsorted(self.row_phases, down % sh)[:, None]
        x = np.searchsorted(self.column_phases, across % sw)[None]
        phase = (y * len(self.column_phases) + x) * self.phase
        inside = (down // sh)[:, None] * self.row + (across // sw)[None]
        return ((phase + inside) * self.item_bytes).reshape(-1).astype(np.int64)


def margin_offsets(planes: Planes, geometry: Geometry) -> np.ndarray | None:
    """The same for taps that read planes with a margin as they are; None if they can't."""
    (kh, kw), (dh, dw), (ph, pw) = geometry.kernel, geometry.dilation, geometry.padding
    if geometry.stride != (1, 1) or max(ph, pw) > planes.margin:
        return None
    if geometry.out_size != geometry.size or planes.row < planes.width + max(ph, pw):
        return None
    down, across = np.arange(kh) * dh - ph, np.arange(kw) * dw - pw
    offsets = planes.origin + down[:, None] * planes.row + across[None]
    return (offsets * planes.item_bytes).reshape(-1).astype(np.int64)


@dataclass(frozen=True)
class LaneLayout:
    """Tiles of an output, and how many channels and filters are in the L1 cache at once.

    Attributes:
        tile_bytes: The bytes of the lanes of a tile.
        group_channels: Channels.
        filter_block: Filters.
    """

    tile_bytes: int
    group_channels: int
    filter_block: int

    @classmethod
    def of(
        cls, sums: Sums, lanes: int, taps: int, channels: int, filters: int, kept: int, dtype: str
    ) -> tuple[LaneLayout, float]:
        """The layout of least estimated cost, and that cost in nanoseconds.

        Args:
            sums: What adds up.
            lanes: The lanes of the output, from its first to its last pixel.
            taps: The taps of a channel.
            channels: The channels that a filter sees.
            filters: The filters that see them.
            kept: The survivors of these filters.
            dtype: That of the arranged input.
        """
        costs = {
            one: one.cost(sums, lanes, taps, channels, filters, kept)
            for one in _candidates(sums, lanes, taps, channels, filters)
        }
        best = min(costs, key=costs.__getitem__)
        return best, costs[best]

    def cost(
        self, sums: Sums, lanes: int, taps: int, channels: int, filters: int, kept: int
    ) -> float:
        word = max(16, word_bytes())
        vectors = self.tile_bytes / word
        tiles = ceil(lanes * sums.lane_bytes / self.tile_bytes)
        blocks, groups = ceil(filters / self.filter_block), ceil(channels / self.group_channels)
        lists = groups * filters
        per_tap = max(vectors, 0.75) + 0.25
        additions = kept * per_tap * _ADDITION
        copies = blocks * channels * taps * vectors * _COPY
        sum_bytes = self.tile_bytes * (2 if sums.most else 1)
        flushes = 2 * lists + kept / sums.most if sums.most else 0
        of_lists = lists * (_LIST + 2 * sum_bytes / word * _ADDITION)
        widening = flushes * vectors * 3 * _ADDITION
        write = filters * self.tile_bytes / sums.lane_bytes / (word / 4) * _WRITE
        used = self.group_channels * taps * self.tile_bytes
        used += min(self.filter_block, filters) * sum_bytes
        slower = max(1.0, used / _L1_BYTES) ** 0.7
        return tiles * (slower * (additions + of_lists + widening) + copies + write)


def _candidates(
    sums: Sums, lanes: int, taps: int, channels: int, filters: int
) -> Iterator[LaneLayout]:
    word = max(16, word_bytes())
    most = -(-lanes * sums.lane_bytes // word)
    for vectors in {min(vectors, most) for vectors in (1, 2, 3, 4, 6, 8)} - {5, 7}:
        tile = vectors * word
        sum_bytes = tile * (2 if sums.most else 1)
        for block in {min(filters, block) for block in (32, 64, 128, 256)}:
            room = max(1, (_L1_BYTES - block * sum_bytes) // (tile * taps))
            for wanted in {room, 2 * room, 4, 16, channels}:
                largest = max(1, (1 << 16) * UNIT // tile // taps)
                groups = ceil(channels / max(1, min(wanted, largest, channels)))
                yield LaneLayout(tile, ceil(channels / groups), block)


class TapLists(NamedTuple):
    """The taps of each block of filters and group of channels, as csrc/lanes.inl reads them.

    Attributes:
        taps: Where in the planes of their group taps find what they add, in units of 8 bytes; for
            each filter those that are added, then those that are subtracted.
        counts: [lists][filters of a block][2]: how many taps of each sign there are.
        starts: [lists]: where the taps of a list start.
    """

    taps: np.ndarray
    counts: np.ndarray
    starts: np.ndarray


def tap_lists(layout: LaneLayout, groups: int, weight: np.ndarray) -> TapLists:
    """List the taps of a layer.

    Args:
        layout: The layout.
        groups: The groups of the convolution.
        weight: M ⊙ B: -1, 0 or 1, [filters][channels of a group][rows][columns].
    """
    filters, channels, rows, columns = weight.shape
    per_group = filters // groups
    block_size = min(layout.filter_block, per_group)
    blocks, parts = -(-per_group // block_size), -(-channels // layout.group_channels)
    f, c, kh, kw = np.nonzero(weight)
    number = f // per_group * blocks + f % per_group // block_size
    list_of = number * parts + c // layout.group_channels
    is_negative = weight[f, c, kh, kw] < 0
    which = (list_of * block_size + f % per_group % block_size) * 2 + is_negative
    plane = ((c % layout.group_channels) * rows + kh) * columns + kw
    offsets = plane * (layout.tile_bytes // UNIT)
    assert offsets.max(initial=0) < 1 << 16
    lists = groups * blocks * parts
    counts = np.bincount(which, minlength=lists * block_size * 2)
    taps = offsets[np.lexsort((offsets, which))].astype(np.uint16)
    starts = np.cumsum(counts.reshape(lists, -1).sum(1))
    return TapLists(
        np.append(taps, np.zeros(2, np.uint16)),
        counts.astype(np.uint16),
        np.concatenate([[0], starts[:-1]]).astype(np.int32),
    )
