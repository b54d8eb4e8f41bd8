"""Max-pools on numbers, between layers on lanes."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, ClassVar

from torch import Tensor, nn

from mptify.registry import kernels
from mptify.runtime.geometry import Geometry, Window
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.values import Numbers, Value

__all__ = ["NumberMaxPool"]


@kernels.register("number_max_pool")
class NumberMaxPool(NativeKernel):
    """The largest number in each window."""

    SETTINGS: ClassVar = {"window": Window}
    window: Window

    def __init__(self, window: Window):
        super().__init__()
        self.window = window

    @classmethod
    def of(cls, module: nn.MaxPool2d) -> NumberMaxPool:
        sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
        return cls(Window(*(nn.modules.utils._pair(size) for size in sizes)))

    def readable(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def emit(self, builder: Any, *inputs: Value) -> Value:
        ((numbers, buffer),) = inputs
        assert isinstance(numbers, Numbers)
        channels, height, width = numbers.shape
        geometry = Geometry(channels, (height, width), *astuple(self.window))
        form = Numbers.contiguous(channels, *geometry.out_size)
        conv = {"shape": geometry.shape()}
        return builder.add("number_max_pool", form, input=buffer, conv=conv)
