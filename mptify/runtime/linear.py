"""Linear layers on one vector of signs: bits are counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.runtime.planes import Bits, Layer, Numbers, Value, row_bytes

__all__ = ["PopcountLinear"]


class PopcountLinear(Layer):
    """The sums of a binary layer that sees one pixel: kept - 2 · popcount(mask & (input ^ sign)). `weight` is M ⊙ B: -1, 0 or 1.

    With `thresholds` [filters], signs: +1 where a sum reaches its filter's.
    """

    SETTINGS = ("weight_count", "survivor_count", "weight_bytes")
    weights: Tensor
    kept: Tensor
    thresholds: Tensor | None

    def __init__(self, weight: Tensor, thresholds: Tensor | None = None):
        super().__init__()
        filters, inputs = weight.shape
        signs = np.zeros((filters, -(-inputs // 8) * 8), np.int8)
        signs[:, :inputs] = weight.numpy()
        halves = [np.packbits(part, axis=1, bitorder="little") for part in (signs != 0, signs > 0)]
        self.register_buffer("weights", torch.from_numpy(np.stack(halves, axis=1)))
        self.register_buffer("kept", (weight != 0).sum(1).to(torch.int32))
        self.register_buffer("thresholds", None if thresholds is None else thresholds.to(torch.float32))
        self.weight_count, self.survivor_count, self.weight_bytes = weight.numel(), int(self.kept.sum()), self.weights.nbytes

    def fault(self) -> str | None:
        fits = self.weights.dtype == torch.uint8 and self.weights.dim() == 3 and self.weights.shape[1] == 2
        fits = fits and self.kept.dtype == torch.int32 and tuple(self.kept.shape) == (len(self.weights),)
        if not fits:
            return "its weights are no masks and signs"
        least = self.thresholds
        wrong = least is not None and (least.dtype != torch.float32 or least.shape != self.kept.shape)
        return "its thresholds are not one per filter" if wrong else self.fault_in_scales(len(self.kept))

    def plan(self, to: Any, *inputs: Value) -> Value:
        ((bits, place),) = inputs
        filters, _, row = self.weights.shape
        if not bits.vector or row_bytes(bits.width) != row:
            raise MptifyError(f"A packed layer reads up to {8 * row} numbers, and was given {bits.channels * bits.width}.")
        one = {"index": to.constant(self.weights), "starts": to.constant(self.kept)}
        fields: dict[str, Any] = {"filters": filters, "in_": place, "length": row}
        if self.thresholds is None:
            return to.add("popcount", Numbers.in_order(filters), one=one, **fields, **self.scales(to))
        one["scratch"] = to.scratch(4 * filters)
        return to.add("popcount", Bits.of_vector(filters), one=one, thresholds=to.constant(self.thresholds), **fields)
