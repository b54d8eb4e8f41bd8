"""Global average pools of numbers and of levels, in front of a linear layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from mptify.registry import kernels
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.values import Numbers, Planes, Value

__all__ = ["NumberAverage"]


@kernels.register("number_average")
class NumberAverage(NativeKernel):
    """The mean of each channel, as one vector.

    Args:
        step: The value of level 1, if it reads levels.
    """

    BUFFERS: ClassVar = ("step",)
    step: Tensor

    def __init__(self, step: float = 1.0):
        super().__init__()
        self.register_buffer("step", torch.tensor([step]))

    def readable(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def emit(self, builder: Any, *inputs: Value) -> Value:
        ((form, buffer),) = inputs
        channels, height, width = form.shape
        is_planes = isinstance(form, Planes)
        lanes = {
            "in_type": form.type_number if is_planes else 0,
            "in_origin": form.origin if is_planes else 0,
        }
        shape = Geometry(channels, (height, width), (1, 1)).shape()
        return builder.add(
            "number_average",
            Numbers.contiguous(channels),
            input=buffer,
            strides=form.strides,
            conv={"shape": shape},
            lanes=lanes,
            gain=builder.constant(self.step),
        )
