"""Bit planes to numbers."""

from __future__ import annotations

from typing import Any

from mptify.registry import kernels
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.values import Bits, Numbers, Value

__all__ = ["Unpack"]


@kernels.register("unpack")
class Unpack(NativeKernel):
    """Makes ±1 as float32."""

    def emit(self, builder: Any, *inputs: Value) -> Value:
        ((bits, buffer),) = inputs
        assert isinstance(bits, Bits)
        shape = (bits.width,) if bits.vector else (bits.channels, bits.height, bits.width)
        form = Numbers.contiguous(*shape, tokens=bits.tokens)
        conv = {"shape": bits.shape, "in_stride": bits.stride}
        return builder.add("unpack", form, input=buffer, conv=conv)
