"""Convolutions on images of one size, and how the planes that they add lie in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mptify.errors import MptifyError
from mptify.runtime.library import Shape, word_bytes
from mptify.runtime.planes import row_bytes, whole_words

__all__ = ["CLASSES", "Geometry", "Layout", "fits"]

_OFFSETS = 1 << 16  # that 16 bits can tell apart
_MOST_GROUPS = 64  # of classes
_NEAR = 24 << 10  # bytes that stay in the cache that is nearest, beside all else that a kernel reads
_STRIP = 16 << 10  # bytes that a strip has at the most, if it need not have more
_USES = 8  # of a plane, that pay for cutting it into strips

CLASSES = 3  # of pixels, in a group


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
        return Shape(*sizes, *self.kernel, *self.stride, *self.padding, *self.dilation, len(self.phases))

    @cached_property
    def reach(self) -> int:
        """How far below the rows of its pixels a word of the output reads, in bytes."""
        return (self.rows - self.out_size[0]) * row_bytes(self.out_size[1])


@dataclass(frozen=True)
class Layout:
    """How planes lie in memory: in strips, each for `strip` bytes of the output, in which a plane has `part` bytes (strips.inl).

    Offsets count from the beginning of a strip, in units of `unit` bytes.
    """

    strip: int
    part: int
    unit: int

    @classmethod
    def of(cls, geometry: Geometry, survivors: int) -> Layout:
        """The one that a kernel with so many survivors is fastest with, on this machine."""
        row = row_bytes(geometry.out_size[1])
        strip, part = whole_words(*geometry.out_size), geometry.rows * row  # all in one
        word, reach, planes = max(32, word_bytes()), geometry.reach, geometry.planes
        words = max(1, (_STRIP // planes - reach) // word)
        if planes * part > _NEAR and reach <= 2 * word and words * word + reach < part and survivors >= _USES * planes:
            strip, part = words * word, words * word + reach
        if planes * part <= _OFFSETS:
            return cls(strip, part, 1)
        return cls(strip, -(-part // row) * row, row)

    def offsets(self, geometry: Geometry, channel: np.ndarray, kh: np.ndarray, kw: np.ndarray) -> np.ndarray:
        """Where in a strip the kernel finds what a tap sees."""
        down = kh * geometry.dilation[0]
        phase = np.searchsorted(geometry.phases, down % geometry.stride[0])
        plane = (channel * geometry.kernel[1] + kw) * len(geometry.phases) + phase
        return (plane * self.part + down // geometry.stride[0] * row_bytes(geometry.out_size[1])) // self.unit

    def taps(self, geometry: Geometry, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """And back: channel, row and column of the taps; rows are -1 where there is none."""
        plane, inside = np.divmod(offsets.astype(np.int64) * self.unit, self.part)
        row, between = np.divmod(inside, row_bytes(geometry.out_size[1]))
        known = (plane < geometry.planes) & (between == 0) & (row < geometry.rows)
        kh = np.where(known, _first_rows(geometry)[plane % len(geometry.phases), np.minimum(row, geometry.rows - 1)], -1)
        channel, kw = np.divmod(plane // len(geometry.phases), geometry.kernel[1])
        return channel, kh, kw


def fits(geometry: Geometry, most_kept: int) -> bool:
    """Whether the kernel can do it: offsets in 16 bits, sums in 15, and not too many kinds of borders."""
    if min(geometry.out_size) < 1 or geometry.planes * geometry.rows > _OFFSETS or most_kept >= 1 << 14:
        return False
    rows, columns = (len(geometry.taps_seen(axis)[1]) for axis in (0, 1))
    return rows * -(-columns // CLASSES) <= _MOST_GROUPS


def _first_rows(geometry: Geometry) -> np.ndarray:
    """[phases][rows of a plane]: which row of the kernel begins there; -1 where none does."""
    down = np.arange(geometry.kernel[0]) * geometry.dilation[0]
    row_of = np.full((len(geometry.phases), geometry.rows), -1)
    row_of[np.searchsorted(geometry.phases, down % geometry.stride[0]), down // geometry.stride[0]] = np.arange(geometry.kernel[0])
    return row_of
