"""From numbers to levels, and back."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mptify.registry import kernels
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.kernels.lanes_conv import level_type
from mptify.runtime.validation import validate_levels, validate_step
from mptify.runtime.values import LANE_TYPES, Numbers, Planes, Value, require_image

__all__ = ["Dequantize", "Quantize"]


def _add_copy(
    builder: Any, source: Value, form: Any, size: tuple[int, int, int], levels: Any, types: Any
) -> Value:
    """A step that copies numbers or levels into planes, or into a tensor, as other numbers."""
    channels, height, width = size
    read: Any = source.form
    margin = form.margin if isinstance(form, Planes) else 0
    in_origin, out_origin, out_channel = 0, 0, height * width
    strides = (height * width, width, 1)
    if isinstance(form, Planes):
        out_origin, out_channel = form.origin - margin * (form.row + 1), form.plane
    if isinstance(read, Planes):
        in_origin, strides = read.origin, read.strides
        if isinstance(form, Planes) and read.margin == margin:
            # The same rows: a channel with its margins is one row.
            in_origin -= margin * (read.row + 1)
            height, width = 1, (height + 2 * margin) * read.row + margin
            margin = 0
    elif read.shape != size:  # tokens
        strides = (1, 0, channels)
    geometry = Geometry(channels, (height, width), (1, 1), padding=(margin, margin))
    lanes = {
        "row": width + margin,
        "rows": height + 2 * margin,
        "column_phases": 1,
        "tail": margin,
        "in_type": LANE_TYPES[types[0]][0],
        "in_origin": in_origin,
        "out_type": LANE_TYPES[types[1]][0],
        "out_origin": out_origin,
        "out_channel": out_channel,
        "levels": builder.constant(torch.tensor(levels)),
    }
    conv = {
        "shape": geometry.shape() | {"phases": 1},
        "phases": builder.constant(np.zeros(2, np.int64)),
    }
    fields = {"input": source.buffer, "strides": strides, "conv": conv, "lanes": lanes}
    return builder.add("lanes_arrange", form, **fields)


@kernels.register("quantize")
class Quantize(NativeKernel):
    """Rounds numbers to levels in bytes: round(clip(x · inverse)).

    Args:
        inverse: The inverse of the step.
        lowest: The lowest level.
        highest: The highest level.
        tokens: Whether channels are the last dimension.
    """

    def __init__(self, inverse: float, lowest: float, highest: float, *, tokens: bool = False):
        super().__init__()
        self.levels, self.tokens = (inverse, lowest, highest), tokens

    def validate(self) -> None:
        inverse, lowest, highest = self.levels
        validate_step("inverse", inverse)
        validate_levels(lowest, highest)

    def readable(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def emit(self, builder: Any, *inputs: Value) -> Value:
        (source,) = inputs
        tokens = None
        if isinstance(source.form, Planes):
            size = source.form.shape
        elif self.tokens:
            tokens = source.form.shape[:-1]
            size = source.form.shape[-1], 1, prod(tokens)
        else:
            size = require_image(source.form)
        dtype = level_type(self.levels[1])
        form = Planes(dtype, *size, 0 if self.tokens else builder.margin, tokens)
        return _add_copy(builder, source, form, size, self.levels, ("float32", dtype))


@kernels.register("dequantize")
class Dequantize(NativeKernel):
    """Numbers from levels.

    Args:
        step: The value of level 1.
    """

    def __init__(self, step: float):
        super().__init__()
        self.step = step

    def validate(self) -> None:
        validate_step("step", self.step)

    def emit(self, builder: Any, *inputs: Value) -> Value:
        (source,) = inputs
        planes: Any = source.form
        size: Any = planes.shape
        form: Any = Numbers.contiguous(*size, tokens=planes.tokens)
        if not builder.is_output:
            form = Planes("float32", size[0], size[1], size[2], builder.margin)
        levels, types = (self.step, 0.0, 0.0), (planes.dtype, "float32")
        return _add_copy(builder, source, form, size, levels, types)
