"""Max-pools on bit planes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mptify.runtime.bitsliced import Geometry
from mptify.runtime.planes import Bits, Kernel, Value

__all__ = ["Pool"]


class Pool(Kernel):
    """The largest value per window; where `falling` (by channel), the smallest."""

    falling: Tensor | None

    def __init__(self, module: nn.MaxPool2d, falling: Tensor | None):
        super().__init__()
        pair = nn.modules.utils._pair
        self.sizes = tuple(pair(one) for one in (module.kernel_size, module.stride, module.padding, module.dilation))
        self.register_buffer("falling", None if falling is None else falling.to(torch.uint8))

    def plan(self, to: Any, *inputs: Value) -> Value:
        ((bits, place),) = inputs
        geometry = Geometry(bits.channels, (bits.height, bits.width), *self.sizes)
        form = Bits(bits.channels, *geometry.out_size)
        falling = {} if self.falling is None else {"falling": to.constant(self.falling)}
        one = {"shape": geometry.shape(), "in_stride": bits.stride, "stride": form.stride}
        return to.add("pool", form, in_=place, one=one, **falling)
