"""Activations of one bit as bit planes: a plane per channel, in it a bit per pixel, 1 for +1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mptify.runtime.library import Shape, library

__all__ = ["LAYOUTS", "Planes", "Prepared", "in_order", "pack", "pack_as", "pool", "row_bytes", "stride_of", "unpack"]


def row_bytes(width: int) -> int:
    """Each row of a plane begins with a byte of its own."""
    return -(-width // 8)


def stride_of(height: int, width: int) -> int:
    """Bytes from a plane to the next: whole words of the widest processors."""
    return -(-height * row_bytes(width) // 64) * 64


_SLACK = 16  # bytes behind the last plane that a kernel may read


@dataclass
class Planes:
    """Bits in `room`, images × channels × `stride` bytes; what lies behind a row's last pixel, or behind the last row, means nothing."""

    room: Tensor
    images: int
    channels: int
    height: int
    width: int
    stride: int
    address: int
    tokens: tuple[int, ...] | None = None  # of a row of tokens: their own order

    @classmethod
    def empty(cls, images: int, channels: int, height: int, width: int, tokens: tuple[int, ...] | None = None) -> Planes:
        stride = stride_of(height, width)
        room = torch.empty(images * channels * stride + _SLACK, dtype=torch.uint8)
        return cls(room, images, channels, height, width, stride, room.data_ptr(), tokens)

    def address_of(self, image: int) -> int:
        return self.address + image * self.channels * self.stride


LAYOUTS = ("channels", "tokens", "vectors")


class Prepared(nn.Module):
    """A layer with `_tables` for its kernel, full of addresses: made anew where its buffers are copied or moved."""

    _tables: Any = None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._tables = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": None}


def pack_as(layout: str, x: Tensor) -> Planes:
    """Signs of images × channels × height × width (`channels`), of images × … × channels in one row (`tokens`), of images × numbers."""
    if layout == "tokens":
        planes = pack(x.flatten(1, -2).transpose(1, 2)[:, :, None])
        planes.tokens = tuple(x.shape[1:-1])
        return planes
    return pack(x[:, None, None] if layout == "vectors" else x)


def pack(x: Tensor) -> Planes:
    """The signs of images × channels × height × width."""
    assert library is not None
    x = x.to(torch.float32)
    planes = Planes.empty(*x.shape)
    steps = torch.tensor(x.stride()[1:])
    for number, image in enumerate(x):
        library.mptify_packed_pack(
            image.data_ptr(),
            steps.data_ptr(),
            *image.shape,
            planes.address_of(number),
            planes.stride,
            row_bytes(planes.width),
            torch.get_num_threads(),
        )
    return planes


def unpack(planes: Planes) -> Tensor:
    """±1, as float32."""
    assert library is not None
    x = torch.empty((planes.images, planes.channels, planes.height, planes.width))
    for number, image in enumerate(x):
        library.mptify_packed_unpack(
            planes.address_of(number), planes.stride, row_bytes(planes.width), *image.shape, image.data_ptr(), torch.get_num_threads()
        )
    return in_order(x, planes.tokens)


def in_order(x: Tensor, tokens: tuple[int, ...] | None) -> Tensor:
    """Of one row of tokens: images × tokens, in their own order, × channels."""
    return x if tokens is None else x[:, :, 0].transpose(1, 2).contiguous().unflatten(1, tokens)


def pool(planes: Planes, falling: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, out_size: tuple[int, int]) -> Planes:
    """The largest value per window; where `falling` (bool, by channel), the smallest."""
    assert library is not None
    out = Planes.empty(planes.images, planes.channels, *out_size)
    sizes = (planes.height, planes.width, row_bytes(planes.width), *out_size, row_bytes(out_size[1]))
    shape = Shape(planes.channels, *sizes, *kernel, *stride, *padding, *dilation, 0, 0)
    threads = torch.get_num_threads()
    for image in range(planes.images):
        library.mptify_packed_pool(
            planes.address_of(image), planes.stride, shape, falling.data_ptr(), out.address_of(image), out.stride, threads
        )
    return out
