"""Images to vectors."""

from __future__ import annotations

from typing import Any

from mptify.registry import kernels
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.values import Bits, Value

__all__ = ["Flatten"]


@kernels.register("flatten")
class Flatten(NativeKernel):
    """Makes one vector of all planes of an image."""

    def emit(self, builder: Any, *inputs: Value) -> Value:
        ((bits, buffer),) = inputs
        assert isinstance(bits, Bits)
        form = Bits.of_vector(bits.channels * bits.height * bits.width)
        conv = {"shape": bits.shape, "in_stride": bits.stride, "stride": form.stride}
        return builder.add("flatten", form, input=buffer, conv=conv)
