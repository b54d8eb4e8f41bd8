"""Values in a program: numbers, and signs as bit planes: a plane per channel, in it a bit per pixel, 1 for +1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mptify.errors import MptifyError
from mptify.runtime.library import Shape

__all__ = [
    "LAYOUTS",
    "Bits",
    "Concat",
    "Flatten",
    "Kernel",
    "Layer",
    "Numbers",
    "Pack",
    "Place",
    "Unpack",
    "Value",
    "own_order",
    "row_bytes",
    "whole_words",
]

LAYOUTS = ("channels", "tokens", "vectors")


def row_bytes(width: int) -> int:
    """Each row of a plane begins with a byte of its own."""
    return -(-width // 8)


def whole_words(height: int, width: int) -> int:
    """The bytes of a plane, as whole words of the widest processors."""
    return -(-height * row_bytes(width) // 64) * 64


_SLACK = 40  # bytes behind the last plane that a kernel may read


@dataclass(frozen=True)
class Bits:
    """One image as bit planes; what lies behind a row's last pixel, or behind the last row, means nothing.

    A vector is one plane of one row.
    """

    channels: int
    height: int
    width: int
    tokens: tuple[int, ...] | None = None  # of a row of tokens: their own order
    vector: bool = False

    @classmethod
    def of_vector(cls, width: int) -> Bits:
        return cls(1, 1, width, vector=True)

    @property
    def stride(self) -> int:
        """Bytes from a plane to the next, beyond which no kernel writes: so few that several share a line of the cache, or whole words."""
        size = self.height * row_bytes(self.width)
        return next((few for few in (8, 16, 32) if size <= few), whole_words(self.height, self.width))

    @property
    def bytes(self) -> int:
        return self.channels * self.stride + _SLACK

    @property
    def shape(self) -> Shape:
        """Of the planes alone, without a convolution."""
        return Shape(self.channels, self.height, self.width, row_bytes(self.width))


@dataclass(frozen=True)
class Numbers:
    """One image as float32: its shape, and how far its neighbours in each dimension lie apart. A row of tokens is still one of pixels."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    tokens: tuple[int, ...] | None = None

    @classmethod
    def in_order(cls, *shape: int, tokens: tuple[int, ...] | None = None) -> Numbers:
        return cls(shape, tuple(prod(shape[i + 1 :]) for i in range(len(shape))), tokens)

    @property
    def bytes(self) -> int:
        return 4 * prod(self.shape)


class Place(NamedTuple):
    """Where an array is: among a program's inputs, outputs, rooms to work in, or constants."""

    among: str
    number: int


class Value(NamedTuple):
    form: Any  # Bits or Numbers
    place: Place


class Kernel(nn.Module):
    """One step of a program. `plan` adds it to a plan for images of one size, and says what comes out.

    Its buffers and what `SETTINGS` names make it again; `fault` says what is wrong with them, since the C++ library believes everything.
    """

    SETTINGS: tuple[str, ...] = ()

    def fault(self) -> str | None:
        return None

    def readable(self, x: Tensor) -> Tensor:
        """Numbers in an order of memory that it can read."""
        return x

    def plan(self, to: Any, *inputs: Value) -> Value:
        raise NotImplementedError  # what a subclass is for


class Layer(Kernel):
    """A layer: signs, or its output, which is its sums, times `gain`, plus each filter's `offset`, as far as it has them."""

    thresholds: Tensor | None
    gain: Tensor | None
    offset: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.scale_(None, None)

    def scale_(self, gain: Tensor | None, offset: Tensor | None) -> None:
        self.register_buffer("gain", None if gain is None else gain.detach())
        self.register_buffer("offset", None if offset is None else offset.detach())

    def scales(self, to: Any) -> dict[str, Place]:
        """Gain and offset, put into a plan: what a step that makes numbers needs of them."""
        found = {"gain": self.gain, "offset": self.offset}
        return {name: to.constant(one.contiguous()) for name, one in found.items() if one is not None}

    def fault_in_scales(self, filters: int) -> str | None:
        fits_gain = self.gain is None or (self.gain.dtype == torch.float32 and self.gain.numel() == 1)
        fits_offset = self.offset is None or (self.offset.dtype == torch.float32 and tuple(self.offset.shape) == (filters,))
        return None if fits_gain and fits_offset else "its gain is not one number, or its offsets are not one per filter"


class Pack(Kernel):
    """Signs of images × channels × height × width (`channels`), of images × … × channels in one row (`tokens`), of images × numbers."""

    def __init__(self, layout: str):
        super().__init__()
        self.layout = layout

    def readable(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.layout == "tokens" and x.dim() > 3 else x  # all tokens lie as far apart

    def plan(self, to: Any, *inputs: Value) -> Value:
        ((numbers, place),) = inputs
        shape, steps = numbers.shape, numbers.steps
        if numbers.tokens is not None:  # still channels × 1 × tokens: what they are in their own order
            shape, steps = (*numbers.tokens, shape[0]), (*Numbers.in_order(*numbers.tokens).steps, steps[0])
        if self.layout == "tokens":
            form, steps = Bits(shape[-1], 1, prod(shape[:-1]), shape[:-1]), (steps[-1], 0, steps[-2])
        elif self.layout == "vectors":
            form, steps = Bits.of_vector(*shape), (0, 0, *steps)
        else:
            form = Bits(*shape)
        return to.add("pack", form, in_=place, steps=steps, one={"shape": form.shape, "stride": form.stride})


class Unpack(Kernel):
    """±1, as float32."""

    def plan(self, to: Any, *inputs: Value) -> Value:
        ((bits, place),) = inputs
        shape = (bits.width,) if bits.vector else (bits.channels, bits.height, bits.width)
        form = Numbers.in_order(*shape, tokens=bits.tokens)
        return to.add("unpack", form, in_=place, one={"shape": bits.shape, "in_stride": bits.stride})


class Flatten(Kernel):
    """All planes of an image as one vector."""

    def plan(self, to: Any, *inputs: Value) -> Value:
        ((bits, place),) = inputs
        form = Bits.of_vector(bits.channels * bits.height * bits.width)
        return to.add("flatten", form, in_=place, one={"shape": bits.shape, "in_stride": bits.stride, "stride": form.stride})


class Concat(Kernel):
    """The channels of several values, one after the other."""

    def plan(self, to: Any, *inputs: Value) -> Value:
        first = inputs[0].form
        form = Bits(sum(one.form.channels for one in inputs), first.height, first.width, first.tokens)
        if any(one.form != replace(first, channels=one.form.channels) for one in inputs):
            raise MptifyError(f"Images of different sizes can't be joined: {', '.join(str(one.form) for one in inputs)}.")
        made: Any = None
        offset = 0
        for bits, place in inputs:
            length = bits.channels * bits.stride
            made = to.add("copy", form, made, in_=place, span=offset, length=length)
            offset += length
        return made


def own_order(x: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """Of images × channels × 1 × tokens: images × tokens, in their own order, × channels."""
    return x[:, :, 0].transpose(1, 2).contiguous().unflatten(1, tokens)
