"""Max-pools on bit planes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mptify.errors import MptifyError
from mptify.runtime.geometry import Geometry
from mptify.runtime.planes import Bits, Kernel, Value

__all__ = ["Pool"]


class Pool(Kernel):
    """The largest value per window; where `falling` (by channel), the smallest."""

    SETTINGS = ("sizes",)
    falling: Tensor | None

    def __init__(self, module: nn.MaxPool2d, falling: Tensor | None):
        super().__init__()
        pair = nn.modules.utils._pair
        self.sizes = tuple(pair(one) for one in (module.kernel_size, module.stride, module.padding, module.dilation))
        self.register_buffer("falling", None if falling is None else falling.to(torch.uint8))

    def fault(self) -> str | None:
        if len(self.sizes) != 4 or min(min(pair) for pair in (self.sizes[0], self.sizes[1], self.sizes[3])) < 1:
            return "its windows have no size"
        return None if self.falling is None or self.falling.dtype == torch.uint8 else "it does not say which channels fall"

    def plan(self, to: Any, *inputs: Value) -> Value:
        ((bits, place),) = inputs
        geometry = Geometry(bits.channels, (bits.height, bits.width), *self.sizes)
        if self.falling is not None and tuple(self.falling.shape) != (bits.channels,):
            raise MptifyError(f"A packed pool reads {len(self.falling)} channels, and was given {bits.channels}.")
        form = Bits(bits.channels, *geometry.out_size)
        falling = {} if self.falling is None else {"falling": to.constant(self.falling)}
        one = {"shape": geometry.shape(), "in_stride": bits.stride, "stride": form.stride}
        return to.add("pool", form, in_=place, one=one, **falling)
