"""Max-pools on numbers and levels, between layers on lanes."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from torch import Tensor, nn

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.geometry import Geometry, Window
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.values import Numbers, Planes, Value, require_image

__all__ = ["NumberMaxPool"]


@kernels.register("number_max_pool")
class NumberMaxPool(NativeKernel):
    """The largest number in each window; for falling channels, the smallest."""

    def __init__(self, window: Window, falling: Tensor | None = None):
        super().__init__()
        self.window = window
        self.falling = None if falling is None else falling.byte()

    @classmethod
    def of(cls, module: nn.MaxPool2d, falling: Tensor | None = None) -> NumberMaxPool:
        return cls(Window.of(module), falling)

    def readable(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def emit(self, builder: Any, *inputs: Value) -> Value:
        ((form, buffer),) = inputs
        size = require_image(form)
        if self.falling is not None and self.falling.shape != size[:1]:
            raise MptifyError(
                f"A packed max-pool reads {len(self.falling)} channels, not {size[0]}."
            )
        origin = form.origin if isinstance(form, Planes) else 0
        geometry = Geometry(size[0], (size[1], size[2]), *astuple(self.window))
        lanes: dict[str, Any] = {"in_origin": origin}
        if isinstance(form, Planes):
            lanes["in_type"] = lanes["out_type"] = form.type_number
        made: Any = Numbers.contiguous(size[0], *geometry.out_size)
        lanes |= {"out_channel": made.strides[0], "out_row": made.strides[1]}
        if not builder.is_output:
            dtype = form.dtype if isinstance(form, Planes) else "float32"
            made = Planes(dtype, size[0], *geometry.out_size, builder.margin)
            lanes |= {
                "out_origin": made.origin,
                "out_channel": made.plane,
                "out_row": made.row,
                "out_margin": made.margin,
                "flat": True,
            }
        fields: dict[str, Any] = {"conv": {"shape": geometry.shape()}, "lanes": lanes}
        if self.falling is not None:
            fields["falling"] = builder.constant(self.falling)
        return builder.add("number_max_pool", made, input=buffer, strides=form.strides, **fields)
