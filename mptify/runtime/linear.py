"""Linear layers on signs: of tokens as bit planes, of one vector by counting bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mptify.runtime.planes import Kernel, Numbers, Value

__all__ = ["PopcountLinear"]


class PopcountLinear(Kernel):
    """The sums of a binary layer that sees one pixel: kept - 2 · popcount(mask & (input ^ sign)). `weight` is M ⊙ B: -1, 0 or 1."""

    weights: Tensor
    kept: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        filters, inputs = weight.shape
        signs = np.zeros((filters, -(-inputs // 8) * 8), np.int8)
        signs[:, :inputs] = weight.numpy()
        halves = [np.packbits(part, axis=1, bitorder="little") for part in (signs != 0, signs > 0)]
        self.register_buffer("weights", torch.from_numpy(np.stack(halves, axis=1)))
        self.register_buffer("kept", (weight != 0).sum(1).to(torch.int32))
        self.weight_count, self.survivor_count, self.weight_bytes = weight.numel(), int(self.kept.sum()), self.weights.nbytes

    def plan(self, to: Any, *inputs: Value) -> Value:
        ((_, place),) = inputs
        filters, _, row = self.weights.shape
        one = {"index": to.constant(self.weights), "starts": to.constant(self.kept)}
        return to.add("popcount", Numbers.in_order(filters), filters=filters, in_=place, one=one, length=row)
