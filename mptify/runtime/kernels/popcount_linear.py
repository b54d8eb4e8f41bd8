"""Linear layers on one vector of signs: they count bits."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.fusion import Pattern
from mptify.runtime.kernel import Candidate, LayerKernel
from mptify.runtime.values import Bits, Numbers, Value, row_bytes

__all__ = ["PopcountLinear"]

_BLOCK_NS = 1.0  # for 256 weights


@kernels.register("popcount_linear")
class PopcountLinear(LayerKernel):
    """A binary linear layer: kept - 2 · popcount(mask & (input ^ sign)).

    Args:
        weight: M ⊙ B: -1, 0 or 1.
        thresholds: [filters]; the result is +1 where a sum reaches its filter's threshold.
            Without them the result is the sums.
    """

    SETTINGS: ClassVar = {"weight_count": int, "survivor_count": int, "weight_bytes": int}
    BUFFERS = ("weights", "kept")
    weights: Tensor
    kept: Tensor

    def __init__(self, weight: Tensor, thresholds: Tensor | None = None):
        super().__init__()
        filters, inputs = weight.shape
        signs = np.zeros((filters, 8 * row_bytes(inputs)), np.int8)
        signs[:, :inputs] = weight.numpy()
        bits = [np.packbits(half, axis=1, bitorder="little") for half in (signs != 0, signs > 0)]
        self.register_buffer("weights", torch.from_numpy(np.stack(bits, axis=1)))
        self.register_buffer("kept", (weight != 0).sum(1).to(torch.int32))
        self.register_buffer("thresholds", None if thresholds is None else thresholds.float())
        self.weight_count, self.survivor_count = weight.numel(), int(self.kept.sum())
        self.weight_bytes = self.weights.nbytes

    @classmethod
    def matches(cls, pattern: Pattern) -> bool:
        return pattern.reads_signs and pattern.branch.layout == "vectors" and pattern.is_plain

    @classmethod
    def candidate(cls, pattern: Pattern) -> Candidate | None:
        filters, inputs = pattern.weight.shape
        found = pattern.thresholds
        if pattern.makes_signs and found is None:
            return None
        thresholds = None if found is None else found.least[0]
        return Candidate(
            filters * -(-inputs // 256) * _BLOCK_NS,
            lambda: cls(pattern.rising_weight, thresholds).scaled_for(pattern),
        )

    def validate(self) -> None:
        weights, kept = self.weights, self.kept
        if weights.dtype != torch.uint8 or weights.dim() != 3 or weights.shape[1] != 2:
            raise ValueError("its weights are not masks and signs")
        if kept.dtype != torch.int32 or kept.shape != (len(weights),):
            raise ValueError("it does not say how many weights each filter keeps")
        least = self.thresholds
        if least is not None and (least.dtype != torch.float32 or least.shape != kept.shape):
            raise ValueError("its thresholds are not one per filter")
        self.validate_scales(len(kept))

    def emit(self, builder: Any, *inputs: Value) -> Value:
        ((bits, buffer),) = inputs
        assert isinstance(bits, Bits)
        filters, _, row = self.weights.shape
        if not bits.vector or row_bytes(bits.width) != row:
            given = bits.channels * bits.width
            raise MptifyError(f"A packed layer reads up to {8 * row} numbers, not {given}.")
        conv = {"weights": builder.constant(self.weights), "kept": builder.constant(self.kept)}
        fields: dict[str, Any] = {"filters": filters, "input": buffer, "length": row, "conv": conv}
        if self.thresholds is None:
            fields |= self.scales(builder)
            return builder.add("popcount_linear", Numbers.contiguous(filters), **fields)
        conv["workspace"] = builder.workspace(4 * filters)
        fields["thresholds"] = builder.constant(self.thresholds)
        return builder.add("popcount_linear", Bits.of_vector(filters), **fields)
