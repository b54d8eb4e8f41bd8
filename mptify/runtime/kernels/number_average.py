"""Global average pools of numbers and of levels, in front of a linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mptify.registry import kernels
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.validation import validate_step
from mptify.runtime.values import Numbers, Planes, Value, require_image

__all__ = ["NumberAverage"]


@kernels.register("number_average")
class NumberAverage(NativeKernel):
    """The mean of each channel, as one vector.

    Args:
        step: The value of level 1, if it reads levels.
    """

    def __init__(self, step: float = 1.0):
        super().__init__()
        self.step = step

    def validate(self) -> None:
        validate_step("step", self.step)

    def readable(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def emit(self, builder: Any, *inputs: Value) -> Value:
        ((form, buffer),) = inputs
        channels, height, width = require_image(form)
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
            gain=builder.constant(torch.tensor([self.step])),
        )
