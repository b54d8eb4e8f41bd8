"""A network's first layer: numbers in, weights of ±1, bit planes out."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.fusion import Pattern
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernel import Candidate, NativeKernel
from mptify.runtime.survivors import list_survivors, survivors_of, validate_starts
from mptify.runtime.thresholds import Thresholds
from mptify.runtime.values import Bits, Numbers, Value

__all__ = ["InputConv"]

_ADDITION_NS = 0.05  # for one pixel of one survivor


@kernels.register("input_conv")
class InputConv(NativeKernel):
    """Signs of thresholded sums of pixels.

    Args:
        weight: M ⊙ B: -1, 0 or 1.
        found: The thresholds of the sums, as float32 numbers.
        geometry: The convolution on images of the usual size.
    """

    SETTINGS: ClassVar = {
        "filters": int,
        "geometry": Geometry,
        "weight_count": int,
        "survivor_count": int,
        "weight_bytes": int,
    }
    BUFFERS = ("taps", "starts", "thresholds", "falling")
    geometry: Geometry
    taps: Tensor
    starts: Tensor
    thresholds: Tensor
    falling: Tensor

    def __init__(self, weight: Tensor, found: Thresholds, geometry: Geometry):
        super().__init__()
        self.filters, self.geometry = len(weight), geometry
        f, channel, kh, kw, positive = survivors_of(weight, geometry.channels)
        order, starts = list_survivors(self.filters, f, positive, kw, kh, channel)
        taps = np.stack([channel, kh, kw])[:, order].astype(np.int32)
        self.register_buffer("taps", torch.from_numpy(taps))
        self.register_buffer("starts", starts)
        self.register_buffer("thresholds", found.least.to(torch.float32))
        self.register_buffer("falling", found.falling.to(torch.uint8))
        self.weight_count, self.survivor_count = weight.numel(), len(order)
        self.weight_bytes = self.taps.nbytes

    @classmethod
    def matches(cls, pattern: Pattern) -> bool:
        branch, reads_numbers = pattern.branch, not pattern.reads_signs
        is_conv = branch.layout == "channels" and branch.pads_with_zeros and pattern.is_plain
        return is_conv and reads_numbers and pattern.makes_signs

    @classmethod
    def candidate(cls, pattern: Pattern) -> Candidate | None:
        weight, found, geometry = pattern.weight, pattern.thresholds, pattern.branch.geometry()
        if found is None:
            return None
        cost = int((weight != 0).sum()) * prod(geometry.out_size) * _ADDITION_NS
        return Candidate(cost, lambda: cls(weight, found, geometry))

    def validate(self) -> None:
        taps, geometry = self.taps, self.geometry
        if taps.dtype != torch.int32 or taps.dim() != 2 or len(taps) != 3:
            raise ValueError("its survivors are not channels, rows and columns")
        if min(geometry.out_size) < 1:
            raise ValueError("its geometry has no output")
        limits = np.array([geometry.channels, *geometry.kernel])[:, None]
        if ((taps.numpy() < 0) | (taps.numpy() >= limits)).any():
            raise ValueError("its survivors lie outside of the image")
        for buffer, dtype in ((self.thresholds, torch.float32), (self.falling, torch.uint8)):
            if buffer.dtype != dtype or buffer.shape != (self.filters,):
                raise ValueError("its thresholds are not one per filter")
        validate_starts(self.starts, self.filters, taps.shape[1])

    def readable(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def emit(self, builder: Any, *inputs: Value) -> Value:
        """Columns that a horizontal stride reads together lie side by side, in rows of `length`."""
        ((numbers, buffer),) = inputs
        assert isinstance(numbers, Numbers)
        channels, *size = numbers.shape
        if channels != self.geometry.channels:
            expected = self.geometry.channels
            raise MptifyError(f"A packed layer reads {expected} channels, not {channels}.")
        geometry = self.geometry.at((size[0], size[1]))
        form = Bits(self.filters, *geometry.out_size)
        step = geometry.stride[1]
        across = geometry.dilation[1] * np.arange(geometry.kernel[1])
        rows = geometry.size[0] + 2 * geometry.padding[0]
        channel, kh, kw = self.taps.numpy()
        length = form.width + int(across[-1]) // step
        first = (channel * step + across[kw] % step) * rows + kh * geometry.dilation[0]
        index = first * length + across[kw] // step
        padded = geometry.channels * step * rows * length
        if padded >= 1 << 31:
            raise MptifyError(f"An image of {size[0]}×{size[1]} is too large for a packed program.")
        conv = {
            "shape": geometry.shape(),
            "index": builder.constant(index.astype(np.int32)),
            "starts": builder.constant(self.starts),
            "workspace": builder.workspace(4 * (padded + 256)),  # vectors read past the last row
            "stride": form.stride,
        }
        return builder.add(
            "input_conv",
            form,
            filters=self.filters,
            input=buffer,
            conv=conv,
            thresholds=builder.constant(self.thresholds),
            falling=builder.constant(self.falling),
            length=length,
        )
