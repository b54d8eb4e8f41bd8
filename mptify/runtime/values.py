"""Values in a program: numbers as tensors hold them, planes of numbers, and signs as bit planes.

A bit plane holds one channel, one bit per pixel: 1 for +1, 0 for -1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from mptify.errors import MptifyError

__all__ = [
    "LANE_TYPES", "LAYOUTS", "Bits", "Buffer", "Numbers", "Planes", "Value",
    "require_image", "row_bytes", "to_tokens", "whole_words",
]  # fmt: skip

LAYOUTS = ("channels", "tokens", "vectors")  # which dimension of a tensor becomes planes

LANE_TYPES = {"float32": (0, 4), "uint8": (1, 1), "int8": (2, 1)}  # number and bytes

_PLANES_READ_AHEAD = 2048  # bytes behind the last plane of numbers that a kernel may read
_READ_AHEAD = 40  # bytes behind the last plane that a kernel may read


def row_bytes(width: int) -> int:
    """The bytes of a plane's row. Each row starts at a new byte."""
    return -(-width // 8)


def whole_words(height: int, width: int) -> int:
    """The bytes of a plane, rounded up to the widest vector registers."""
    return -(-height * row_bytes(width) // 64) * 64


@dataclass(frozen=True)
class Bits:
    """The form of one image as bit planes. A vector is one plane of one row.

    The bits behind a row's last pixel, and behind the last row, are undefined.

    Attributes:
        tokens: For a row of tokens, the shape that the tokens had.
    """

    channels: int
    height: int
    width: int
    tokens: tuple[int, ...] | None = None
    vector: bool = False

    @classmethod
    def of_vector(cls, width: int) -> Bits:
        return cls(1, 1, width, vector=True)

    @property
    def stride(self) -> int:
        """The bytes from one plane to the next; kernels write no further.

        Small planes share a cache line; large ones are padded to whole words.
        """
        size = self.height * row_bytes(self.width)
        small = (stride for stride in (8, 16, 32) if size <= stride)
        return next(small, whole_words(self.height, self.width))

    @property
    def bytes(self) -> int:
        return self.channels * self.stride + _READ_AHEAD

    @property
    def shape(self) -> dict[str, int]:
        """The fields of the library's `ConvShape` that describe planes without a convolution."""
        return {
            "channels": self.channels,
            "height": self.height,
            "width": self.width,
            "in_bytes": row_bytes(self.width),
        }


@dataclass(frozen=True)
class Numbers:
    """The form of one image as float32: its shape and its strides, in elements.

    Attributes:
        tokens: For a row of tokens (channels × 1 × tokens), the shape that the tokens had.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tokens: tuple[int, ...] | None = None

    @classmethod
    def contiguous(cls, *shape: int, tokens: tuple[int, ...] | None = None) -> Numbers:
        return cls(shape, tuple(prod(shape[i + 1 :]) for i in range(len(shape))), tokens)

    @property
    def bytes(self) -> int:
        return 4 * prod(self.shape)


@dataclass(frozen=True)
class Planes:
    """The form of one image as planes of numbers between layers on lanes.

    A plane holds one channel. There are `margin` zeros behind each row, so that a row's left
    neighbours are zeros too, and `margin` rows of zeros above and below.

    Attributes:
        dtype: "float32", or "uint8" or "int8" for levels.
        tokens: For a row of tokens, the shape that the tokens had.
    """

    dtype: str
    channels: int
    height: int
    width: int
    margin: int = 0
    tokens: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    @property
    def type_number(self) -> int:
        return LANE_TYPES[self.dtype][0]

    @property
    def item_bytes(self) -> int:
        return LANE_TYPES[self.dtype][1]

    @property
    def row(self) -> int:
        """The elements from one row to the next."""
        return self.width + self.margin

    @property
    def origin(self) -> int:
        """The elements before the first pixel of the first plane, in whole cache lines."""
        per_line = 64 // self.item_bytes
        return -(-self.margin * (self.row + 1) // per_line) * per_line

    @property
    def plane(self) -> int:
        """The elements from one plane to the next; kernels write whole vectors."""
        pixels = (self.height + self.margin) * self.row + self.margin
        lines = -(-(self.origin + pixels) * self.item_bytes // 64) + 1
        return (lines + (lines % 16 == 0)) * 64 // self.item_bytes  # planes share no cache sets

    @property
    def strides(self) -> tuple[int, int, int]:
        """The elements from a channel, row and column to the next."""
        return self.plane, self.row, 1

    @property
    def bytes(self) -> int:
        return self.channels * self.plane * self.item_bytes + _PLANES_READ_AHEAD


class Buffer(NamedTuple):
    """A buffer of a program: the `number`-th of its inputs, outputs, workspace or constants."""

    kind: str
    number: int


class Value(NamedTuple):
    """What a kernel reads or makes, and the buffer that holds it."""

    form: Any
    buffer: Buffer


def require_image(form: Any) -> tuple[int, int, int]:
    """The channels, height and width of a value.

    Raises:
        MptifyError: It is none that images have.
    """
    if not isinstance(form, (Numbers, Planes)) or len(form.shape) != 3:
        raise MptifyError(f"A packed layer reads images, not {getattr(form, 'shape', form)}.")
    channels, height, width = form.shape
    return channels, height, width


def to_tokens(x: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """From images × channels × 1 × tokens to images × tokens, in their own shape, × channels."""
    return x[:, :, 0].transpose(1, 2).contiguous().unflatten(1, tokens)
