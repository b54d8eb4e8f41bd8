"""Max-pools on bit planes."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.geometry import Geometry, Window
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.values import Bits, Value

__all__ = ["MaxPool"]


@kernels.register("max_pool")
class MaxPool(NativeKernel):
    """The largest value in each window; for `falling` channels, the smallest.

    A falling channel holds the signs of a filter whose larger sums give -1.
    """

    SETTINGS: ClassVar = {"window": Window}
    OPTIONAL_BUFFERS = ("falling",)
    window: Window
    falling: Tensor | None

    def __init__(self, window: Window, falling: Tensor | None = None):
        super().__init__()
        self.window = window
        self.register_buffer("falling", None if falling is None else falling.to(torch.uint8))

    @classmethod
    def of(cls, module: nn.MaxPool2d, falling: Tensor | None = None) -> MaxPool:
        sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
        return cls(Window(*(nn.modules.utils._pair(size) for size in sizes)), falling)

    def validate(self) -> None:
        if self.falling is not None and self.falling.dtype != torch.uint8:
            raise ValueError("it does not say which channels fall")

    def emit(self, builder: Any, *inputs: Value) -> Value:
        ((bits, buffer),) = inputs
        assert isinstance(bits, Bits)
        geometry = Geometry(bits.channels, (bits.height, bits.width), *astuple(self.window))
        if self.falling is not None and self.falling.shape != (bits.channels,):
            raise MptifyError(
                f"A packed max-pool reads {len(self.falling)} channels, not {bits.channels}."
            )
        form = Bits(bits.channels, *geometry.out_size)
        falling = {} if self.falling is None else {"falling": builder.constant(self.falling)}
        conv = {"shape": geometry.shape(), "in_stride": bits.stride, "stride": form.stride}
        return builder.add("max_pool", form, input=buffer, conv=conv, **falling)
