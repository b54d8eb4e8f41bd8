"""Values in a program: numbers, and signs as bit planes.

A plane holds one channel, one bit per pixel: 1 for +1, 0 for -1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor

__all__ = ["LAYOUTS", "Bits", "Buffer", "Numbers", "Value", "row_bytes", "to_tokens", "whole_words"]

LAYOUTS = ("channels", "tokens", "vectors")  # which dimension of a tensor becomes planes

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


class Buffer(NamedTuple):
    """A buffer of a program: the `number`-th of its inputs, outputs, workspace or constants."""

    kind: str
    number: int


class Value(NamedTuple):
    """What a kernel reads or makes, and the buffer that holds it."""

    form: Bits | Numbers
    buffer: Buffer


def to_tokens(x: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """From images × channels × 1 × tokens to images × tokens, in their own shape, × channels."""
    return x[:, :, 0].transpose(1, 2).contiguous().unflatten(1, tokens)
