"""How a convolution on lanes is cut into tiles, and where its taps find what they add."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np

from mptify.runtime.geometry import Geometry
from mptify.runtime.library import word_bytes

__all__ = ["LaneLayout", "lists_of_taps"]

_L1_BYTES = 32 << 10
_MAX_VECTORS = 16  # in a tile
# Costs, in additions of one vector:
_CROSSING = 0.5  # of a vector that lies in two cache lines
_ROW = 3.0  # of a row that is expanded, besides its vectors
_LIST = 14.0  # of a list of taps


@dataclass(frozen=True)
class LaneLayout:
    """Tiles of an output, and the planes that the input is expanded into for each of them.

    Attributes:
        bytes: The bytes of a lane.
        rows: The rows of a tile.
        columns: The columns of a tile, all of them if it has several rows.
        row: The lanes of a row of an expanded plane.
        phases: The first input rows of the planes of a channel and kernel column.
        plane_rows: The rows of a plane.
        plane: The lanes from one plane to the next.
        group_channels: How many channels are expanded at once.
    """

    bytes: int
    rows: int
    columns: int
    row: int
    phases: tuple[int, ...]
    plane_rows: int
    plane: int
    group_channels: int

    @classmethod
    def of(
        cls, geometry: Geometry, channels: int, filters: int, kept: int, lane_bytes: int
    ) -> LaneLayout:
        """The layout of least estimated cost.

        Args:
            geometry: The convolution.
            channels: The channels that a filter sees.
            filters: The filters that see them.
            kept: The survivors of these filters.
            lane_bytes: The bytes of a lane.
        """
        found = _candidates(geometry, channels, lane_bytes)
        return min(found, key=lambda one: one.cost(geometry, channels, filters, kept))

    def cost(self, geometry: Geometry, channels: int, filters: int, kept: int) -> float:
        """The estimated cost of all tiles of one group of a convolution."""
        lanes = _lanes(self.bytes)
        tiles = ceil(geometry.out_size[0] / self.rows) * ceil(geometry.out_size[1] / self.columns)
        vectors = ceil(self.rows * self.row / lanes)
        offsets = self.row_offsets(geometry)[1] * self.row * self.bytes
        crossing = float(np.mean(offsets % (lanes * self.bytes) != 0))
        groups = ceil(channels / self.group_channels)
        additions = kept * vectors * (1 + _CROSSING * crossing)
        lists = filters * groups * (_LIST + 2 * vectors)
        planes = channels * geometry.kernel[1] * len(self.phases)
        expansion = planes * self.plane_rows * (_ROW + 2 * self.row / lanes)
        return tiles * (additions + lists + expansion)

    def row_offsets(self, geometry: Geometry) -> tuple[np.ndarray, np.ndarray]:
        """For each kernel row: the phase of its plane, and the row where its taps start."""
        down = np.arange(geometry.kernel[0]) * geometry.dilation[0]
        if len(self.phases) == geometry.kernel[0] and self.plane_rows == self.rows:
            return np.arange(geometry.kernel[0]), np.zeros_like(down)
        phase = np.searchsorted(self.phases, down % geometry.stride[0])
        return phase, down // geometry.stride[0]

    def offsets(
        self, geometry: Geometry, channel: np.ndarray, kh: np.ndarray, kw: np.ndarray
    ) -> np.ndarray:
        """Where in the planes of its group of channels each tap finds what it adds."""
        phase, row = self.row_offsets(geometry)
        plane = ((channel % self.group_channels) * geometry.kernel[1] + kw) * len(self.phases)
        return (plane + phase[kh]) * self.plane + row[kh] * self.row


def _lanes(lane_bytes: int) -> int:
    return max(16, word_bytes()) // lane_bytes


def _candidates(geometry: Geometry, channels: int, lane_bytes: int) -> Iterator[LaneLayout]:
    height, width = geometry.out_size
    lanes = _lanes(lane_bytes)
    by_row = tuple(int(kh) for kh in np.arange(geometry.kernel[0]) * geometry.dilation[0])
    most = _MAX_VECTORS * lanes
    cuts = {width} if width <= most else {lanes * n for n in (4, 7, 8)}
    for columns in cuts:
        for row in {columns, -(-columns // lanes) * lanes, -(-columns // 8) * 8}:
            highest = max(1, min(height, most // row)) if columns == width else 1
            for rows in {highest, max(1, highest // 2), -(-height // -(-height // highest)), 1}:
                for phases in {by_row, tuple(geometry.phases)}:
                    reach = 0 if phases == by_row else by_row[-1] // geometry.stride[0]
                    plane_rows = rows + reach
                    plane = -(-plane_rows * row // lanes) * lanes
                    size = geometry.kernel[1] * len(phases) * plane * lane_bytes
                    group = max(1, min(channels, _L1_BYTES // size))
                    group = ceil(channels / ceil(channels / group))
                    yield LaneLayout(
                        lane_bytes, rows, columns, row, phases, plane_rows, plane, group
                    )


def lists_of_taps(
    layout: LaneLayout, geometry: Geometry, groups: int, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The taps of each group of channels, filter and sign, and where each list starts.

    Args:
        layout: The layout.
        geometry: The convolution.
        groups: The groups of the convolution.
        weight: M ⊙ B: -1, 0 or 1, [filters][channels of a group][rows][columns].
    """
    filters, channels = weight.shape[:2]
    f, c, kh, kw = np.nonzero(weight)
    part = c // layout.group_channels
    parts = -(-channels // layout.group_channels)
    offsets = layout.offsets(geometry, c, kh, kw)
    negative = weight[f, c, kh, kw] < 0
    which = (part * filters + f) * 2 + negative
    order = np.lexsort((offsets, which))
    lengths = np.bincount(which, minlength=2 * filters * parts)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return offsets[order].astype(np.int32), starts.astype(np.int32)
