"""A network's first layer: ordinary numbers in, weights of ±1, bit planes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.runtime.bitsliced import fault_in_lists, in_lists, survivors
from mptify.runtime.geometry import Geometry
from mptify.runtime.planes import Bits, Kernel, Value
from mptify.runtime.thresholds import Thresholds

__all__ = ["PixelConv"]


class PixelConv(Kernel):
    """Signs of thresholded sums of pixels. `weight` is M ⊙ B: -1, 0 or 1."""

    SETTINGS = ("filters", "geometry", "weight_count", "survivor_count", "weight_bytes")
    taps: Tensor
    starts: Tensor
    thresholds: Tensor
    falling: Tensor

    def __init__(self, weight: Tensor, found: Thresholds, geometry: Geometry):
        super().__init__()
        self.filters, self.geometry = len(weight), geometry
        f, channel, kh, kw, positive = survivors(weight, geometry.channels)
        order, starts = in_lists(self.filters, f, positive, kw, kh, channel)
        self.register_buffer("taps", torch.from_numpy(np.stack([channel, kh, kw])[:, order].astype(np.int32)))
        self.register_buffer("starts", starts)
        self.register_buffer("thresholds", found.least.to(torch.float32))
        self.register_buffer("falling", found.falling.to(torch.uint8))
        self.weight_count, self.survivor_count, self.weight_bytes = weight.numel(), len(order), self.taps.nbytes

    def fault(self) -> str | None:
        if self.taps.dtype != torch.int32 or self.taps.dim() != 2 or len(self.taps) != 3 or min(self.geometry.out_size) < 1:
            return "it does not say what its survivors see"
        taps, most = self.taps.numpy(), np.array([self.geometry.channels, *self.geometry.kernel])[:, None]
        if ((taps < 0) | (taps >= most)).any():
            return "its survivors lie outside of the image"
        per_filter = ((self.thresholds, torch.float32), (self.falling, torch.uint8))
        if any(one.dtype != dtype or tuple(one.shape) != (self.filters,) for one, dtype in per_filter):
            return "its thresholds are not one per filter"
        return fault_in_lists(self.starts, self.filters, self.taps.shape[1])

    def readable(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def plan(self, to: Any, *inputs: Value) -> Value:
        """Columns that a stride skips together lie side by side, in rows of `length`."""
        ((numbers, place),) = inputs
        channels, *size = numbers.shape
        if channels != self.geometry.channels:
            raise MptifyError(f"A packed layer reads {self.geometry.channels} channels, and was given {channels}.")
        geometry = self.geometry.at((size[0], size[1]))
        form = Bits(self.filters, *geometry.out_size)
        step = geometry.stride[1]
        across = geometry.dilation[1] * np.arange(geometry.kernel[1])
        rows = geometry.size[0] + 2 * geometry.padding[0]
        channel, kh, kw = self.taps.numpy()
        length = form.width + int(across[-1]) // step
        first = (channel * step + across[kw] % step) * rows + kh * geometry.dilation[0]
        if geometry.channels * step * rows * length >= 1 << 31:
            raise MptifyError(f"An image of {size[0]}×{size[1]} is too large for a packed program.")
        scratch = 4 * (geometry.channels * step * rows * length + 256)  # vectors reach beyond the last row
        one = {
            "shape": geometry.shape(), "index": to.constant((first * length + across[kw] // step).astype(np.int32)),
            "starts": to.constant(self.starts), "scratch": to.scratch(scratch), "stride": form.stride,
        }  # fmt: skip
        return to.add(
            "pixels", form, filters=self.filters, in_=place, one=one, thresholds=to.constant(self.thresholds),
            falling=to.constant(self.falling), length=length,
        )  # fmt: skip
