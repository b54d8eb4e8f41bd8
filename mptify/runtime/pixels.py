"""A network's first layer: ordinary numbers in, weights of ±1, bit planes out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mptify.runtime.bitsliced import Geometry, survivors
from mptify.runtime.library import Pixels, library
from mptify.runtime.planes import Planes, Prepared, row_bytes, stride_of
from mptify.runtime.thresholds import Thresholds

__all__ = ["PixelConv"]


class PixelConv(Prepared):
    """Signs of thresholded sums of pixels. `weight` is M ⊙ B: -1, 0 or 1."""

    taps: Tensor
    starts: Tensor
    thresholds: Tensor
    falling: Tensor

    def __init__(self, weight: Tensor, found: Thresholds, geometry: Geometry):
        super().__init__()
        self.filters, self.geometry = len(weight), geometry
        f, channel, kh, kw, positive = survivors(weight, geometry.channels)
        order = np.lexsort((kw, kh, channel, positive, f))
        lengths = np.bincount((2 * f + positive)[order], minlength=2 * self.filters)
        self.register_buffer("taps", torch.from_numpy(np.stack([channel, kh, kw])[:, order].astype(np.int32)))
        self.register_buffer("starts", torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)))
        self.register_buffer("thresholds", found.least.to(torch.float32))
        self.register_buffer("falling", found.falling.to(torch.uint8))
        self.weight_count, self.survivor_count, self.weight_bytes = weight.numel(), len(order), self.taps.nbytes
        self.which_cpu = -1  # the best

    def forward(self, x: Tensor) -> Planes:
        if self._tables is None or tuple(x.shape[2:]) != self.geometry.size:
            self.geometry = self.geometry.at((x.shape[2], x.shape[3]))
            self._tables = _Tables(self)
        tables = self._tables
        x = x.to(torch.float32).contiguous()
        out = Planes.empty(len(x), self.filters, *self.geometry.out_size)
        assert library is not None
        for number, image in enumerate(x):
            tables.job.out = out.address_of(number)
            library.mptify_packed_pixels(
                image.data_ptr(),
                tables.shape,
                tables.job,
                tables.scratch.data_ptr(),
                tables.length,
                self.which_cpu,
                torch.get_num_threads(),
            )
        return out


class _Tables:
    """What the kernel needs for images of one size: columns that a stride skips together lie side by side, in rows of `length`."""

    def __init__(self, layer: PixelConv):
        geometry = layer.geometry
        height, width = geometry.out_size
        step = geometry.stride[1]
        across = geometry.dilation[1] * np.arange(geometry.kernel[1])
        rows = geometry.size[0] + 2 * geometry.padding[0]
        channel, kh, kw = layer.taps.numpy()
        self.length = width + int(across[-1]) // step
        place = (channel * step + across[kw] % step) * rows + kh * geometry.dilation[0]
        self.index = (place * self.length + across[kw] // step).astype(np.int32)
        self.scratch = torch.zeros(geometry.channels * step * rows * self.length + 256)  # vectors reach beyond the last row
        self.shape = geometry.shape()
        self.job = Pixels(
            index=self.index.ctypes.data, starts=layer.starts.data_ptr(), thresholds=layer.thresholds.data_ptr(),
            falling=layer.falling.data_ptr(), filters=layer.filters, width=width, row_bytes=row_bytes(width),
            stride=stride_of(height, width), step=geometry.stride[0] * self.length,
        )  # fmt: skip
