"""Numbers to bit planes."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

from torch import Tensor

from mptify.registry import kernels
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.values import Bits, Numbers, Value

__all__ = ["Pack"]


@kernels.register("pack")
class Pack(NativeKernel):
    """Takes signs: 1 where a number is at least 0.

    Args:
        layout: "channels" for images × channels × height × width, "tokens" for images × … ×
            channels, "vectors" for images × numbers.
    """

    SETTINGS: ClassVar = {"layout": str}

    def __init__(self, layout: str):
        super().__init__()
        self.layout = layout

    def readable(self, x: Tensor) -> Tensor:
        needs_one_stride = self.layout == "tokens" and x.dim() > 3
        return x.contiguous() if needs_one_stride else x

    def emit(self, builder: Any, *inputs: Value) -> Value:
        ((numbers, buffer),) = inputs
        assert isinstance(numbers, Numbers)
        shape, strides = numbers.shape, numbers.strides
        if numbers.tokens is not None:  # channels × 1 × tokens, read as tokens × channels
            inner = Numbers.contiguous(*numbers.tokens).strides
            shape, strides = (*numbers.tokens, shape[0]), (*inner, strides[0])
        if self.layout == "tokens":
            form = Bits(shape[-1], 1, prod(shape[:-1]), shape[:-1])
            strides = (strides[-1], 0, strides[-2])
        elif self.layout == "vectors":
            form, strides = Bits.of_vector(*shape), (0, 0, *strides)
        else:
            channels, height, width = shape
            form = Bits(channels, height, width)
        conv = {"shape": form.shape, "stride": form.stride}
        return builder.add("pack", form, input=buffer, strides=strides, conv=conv)
