"""Convolutions on images of one size, and how the planes that they add lie in memory."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from mptify.errors import MptifyError
from mptify.runtime.library import word_bytes
from mptify.runtime.values import row_bytes, whole_words

__all__ = ["CLASSES", "Geometry", "TileLayout", "Window", "fits"]

CLASSES = 3  # classes of pixels in a group

_OFFSETS = 1 << 16  # what 16 bits can tell apart
_MAX_GROUPS = 64  # of classes; MAX_GROUPS in bitsliced_conv.inl
_L1_BYTES = 24 << 10  # planes that stay in the L1 cache beside everything else a kernel reads
_TILE_BYTES = 16 << 10  # the size that tiles aim at
_MIN_USES = 8  # uses of each plane that make up for cutting it into tiles


@dataclass(frozen=True)
class Window:
    """The window of a pool: rows and columns of each."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, module: nn.MaxPool2d) -> Window:
        sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
        return cls(*(nn.modules.utils._pair(size) for size in sizes))

    def to_json(self) -> Any:
        return astuple(self)

    @classmethod
    def from_json(cls, value: Any) -> Window:
        if not isinstance(value, (list, tuple)) or len(value) != 4:
            raise ValueError(f"{value!r} is not a window")
        window = cls(*(_pair(pair) for pair in value))
        if min(*window.kernel, *window.stride, *window.dilation) < 1:
            raise ValueError("its window has no pixels")
        return window


@dataclass(frozen=True)
class Geometry:
    """A convolution on images of one size."""

    channels: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def to_json(self) -> Any:
        return astuple(self)

    @classmethod
    def from_json(cls, value: Any) -> Geometry:
        if not isinstance(value, (list, tuple)) or len(value) != 6:
            raise ValueError(f"{value!r} is not the geometry of a convolution")
        channels, size, *window = value
        geometry = cls(_size(channels), _pair(size, 1 << 15), *(_pair(pair) for pair in window))
        if min(*geometry.size, *geometry.kernel, *geometry.stride, *geometry.dilation) < 1:
            raise ValueError(f"{value!r} is not the geometry of a convolution")
        return geometry

    @cached_property
    def out_size(self) -> tuple[int, int]:
        height, width = (
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in zip(
                self.size, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return height, width

    @cached_property
    def phases(self) -> list[int]:
        """The first rows of taps that a vertical stride does not reach from each other."""
        return sorted({kh * self.dilation[0] % self.stride[0] for kh in range(self.kernel[0])})

    @cached_property
    def rows(self) -> int:
        """The rows of an expanded plane."""
        return self.out_size[0] + (self.kernel[0] - 1) * self.dilation[0] // self.stride[0]

    @property
    def planes(self) -> int:
        """The number of expanded planes: one per channel, kernel column and phase."""
        return self.channels * self.kernel[1] * len(self.phases)

    @cached_property
    def reach(self) -> int:
        """The bytes below its own rows that a word of the output reads."""
        return (self.rows - self.out_size[0]) * row_bytes(self.out_size[1])

    def taps_seen(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """For rows (0) or columns (1): the class of each, and which taps each class sees."""
        start = np.arange(self.out_size[axis]) * self.stride[axis] - self.padding[axis]
        at = start[:, None] + np.arange(self.kernel[axis]) * self.dilation[axis]
        inside = (at >= 0) & (at < self.size[axis])
        seen, classes = np.unique(inside, axis=0, return_inverse=True)
        return classes.reshape(-1), seen

    def at(self, size: tuple[int, int]) -> Geometry:
        """The same convolution on images of another size."""
        return replace(self, size=size)

    def shape(self) -> dict[str, int]:
        """The fields of the library's `ConvShape`.

        Raises:
            MptifyError: The image is smaller than the kernel.
        """
        height, width = self.size
        if min(self.out_size) < 1:
            raise MptifyError(
                f"An image of {height}×{width} is too small for a layer with a kernel of "
                f"{self.kernel[0]}×{self.kernel[1]}."
            )
        names = ("kernel", "stride", "pad", "dilation")
        pairs = (self.kernel, self.stride, self.padding, self.dilation)
        shape = {
            "channels": self.channels,
            "height": height,
            "width": width,
            "in_bytes": row_bytes(width),
            "out_height": self.out_size[0],
            "out_width": self.out_size[1],
            "out_bytes": row_bytes(self.out_size[1]),
            "phases": len(self.phases),
        }
        for name, (rows, columns) in zip(names, pairs, strict=True):
            shape |= {f"{name}_h": rows, f"{name}_w": columns}
        return shape


@dataclass(frozen=True)
class TileLayout:
    """How expanded planes lie in memory: in tiles, see csrc/expand.inl.

    Attributes:
        tile: The bytes of an output plane that one tile is for.
        plane: The bytes that each expanded plane has in a tile.
        unit: What offsets count: bytes from the start of a tile, divided by this.
    """

    tile: int
    plane: int
    unit: int

    def to_json(self) -> Any:
        return astuple(self)

    @classmethod
    def from_json(cls, value: Any) -> TileLayout:
        if not isinstance(value, (list, tuple)) or len(value) != 3:
            raise ValueError(f"{value!r} is not a tile layout")
        if min(_size(one) for one in value) < 1:
            raise ValueError(f"{value!r} is not a tile layout")
        return cls(*value)

    @classmethod
    def of(cls, geometry: Geometry, survivors: int) -> TileLayout:
        """The fastest layout on this machine for a layer with so many survivors."""
        row = row_bytes(geometry.out_size[1])
        tile, plane = whole_words(*geometry.out_size), geometry.rows * row  # one tile for all
        word, reach, planes = max(32, word_bytes()), geometry.reach, geometry.planes
        words = max(1, (_TILE_BYTES // planes - reach) // word)
        is_large = planes * plane > _L1_BYTES and words * word + reach < plane
        if is_large and reach <= 2 * word and survivors >= _MIN_USES * planes:
            tile, plane = words * word, words * word + reach
        if planes * plane <= _OFFSETS:
            return cls(tile, plane, 1)
        return cls(tile, -(-plane // row) * row, row)

    def offsets(
        self, geometry: Geometry, channel: np.ndarray, kh: np.ndarray, kw: np.ndarray
    ) -> np.ndarray:
        """Where in a tile the kernel finds what a tap sees."""
        down = kh * geometry.dilation[0]
        phase = np.searchsorted(geometry.phases, down % geometry.stride[0])
        plane = (channel * geometry.kernel[1] + kw) * len(geometry.phases) + phase
        row = down // geometry.stride[0] * row_bytes(geometry.out_size[1])
        return (plane * self.plane + row) // self.unit

    def taps(self, geometry: Geometry, offsets: np.ndarray) -> tuple[np.ndarray, ...]:
        """The inverse of `offsets`: channel, row and column; the row is -1 if there is no tap."""
        plane, inside = np.divmod(offsets.astype(np.int64) * self.unit, self.plane)
        row, between = np.divmod(inside, row_bytes(geometry.out_size[1]))
        known = (plane < geometry.planes) & (between == 0) & (row < geometry.rows)
        phase, nearest = plane % len(geometry.phases), np.minimum(row, geometry.rows - 1)
        kh = np.where(known, _tap_rows(geometry)[phase, nearest], -1)
        channel, kw = np.divmod(plane // len(geometry.phases), geometry.kernel[1])
        return channel, kh, kw


def fits(geometry: Geometry, max_kept: int) -> bool:
    """Whether bit-sliced kernels can compute it: 16-bit offsets, 15-bit sums, few borders."""
    if min(geometry.out_size) < 1 or max_kept >= 1 << 14:
        return False
    if geometry.planes * geometry.rows > _OFFSETS:
        return False
    rows, columns = (len(geometry.taps_seen(axis)[1]) for axis in (0, 1))
    return rows * -(-columns // CLASSES) <= _MAX_GROUPS


def _tap_rows(geometry: Geometry) -> np.ndarray:
    """[phases][rows of a plane]: the kernel row that starts there, or -1."""
    down = np.arange(geometry.kernel[0]) * geometry.dilation[0]
    tap_rows = np.full((len(geometry.phases), geometry.rows), -1)
    phase = np.searchsorted(geometry.phases, down % geometry.stride[0])
    tap_rows[phase, down // geometry.stride[0]] = np.arange(geometry.kernel[0])
    return tap_rows


def _pair(value: Any, limit: int = 1 << 10) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"{value!r} is not a height and a width")
    return _size(value[0], limit), _size(value[1], limit)


def _size(value: Any, limit: int = 1 << 30) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{value!r} is not a size")
    return value
