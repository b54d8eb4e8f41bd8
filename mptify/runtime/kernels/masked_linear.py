"""Linear layers on one vector of numbers: two masks for each filter say what it adds."""

from __future__ import annotations

from math import inf, prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.kernel import Candidate, NativeKernel
from mptify.runtime.lane_fusion import LanePattern
from mptify.runtime.validation import (
    count_bits,
    same_numbers,
    validate_floats,
    validate_halves,
    validate_levels,
    validate_range,
    validate_step,
)
from mptify.runtime.values import Numbers, Value

__all__ = ["MaskedLinear"]

_WEIGHT_NS = 0.03  # it reads two bits for each weight


@kernels.register("masked_linear")
class MaskedLinear(NativeKernel):
    """sum(±x) · scale + bias, clipped to a range.

    Args:
        weight: M ⊙ B: -1, 0 or 1, [filters][inputs].
        scale: What multiplies the sums.
        levels: How inputs are rounded to the levels that are added: the inverse of the step, the
            lowest and the highest level. None if they are added as they are.
        bias: One number per filter.
        range: The lowest and highest output.
    """

    SETTINGS: ClassVar = {
        "inputs": int,
        "weight_count": int,
        "survivor_count": int,
        "weight_bytes": int,
    }
    BUFFERS = ("weights", "scale")
    OPTIONAL_BUFFERS = ("levels", "bias", "range")
    ON_LANES = True
    weights: Tensor
    scale: Tensor
    levels: Any
    bias: Any
    range: Any

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        levels: tuple[float, float, float] | None = None,
        bias: Tensor | None = None,
        range: Tensor | None = None,
    ):
        super().__init__()
        filters, self.inputs = weight.shape
        signs = np.zeros((filters, -(-self.inputs // 64) * 64), np.int8)
        signs[:, : self.inputs] = weight.numpy()
        bits = [np.packbits(half, axis=1, bitorder="little") for half in (signs > 0, signs < 0)]
        self.register_buffer("weights", torch.from_numpy(np.stack(bits, axis=1)))
        self.register_buffer("scale", scale.detach().reshape(1).float())
        self.register_buffer("levels", None if levels is None else torch.tensor(levels))
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self.register_buffer("range", range)
        self.weight_count, self.survivor_count = weight.numel(), int((weight != 0).sum())
        self.weight_bytes = self.weights.nbytes

    @classmethod
    def matches(cls, pattern: LanePattern) -> bool:
        return pattern.is_vector

    @classmethod
    def candidate(cls, pattern: LanePattern) -> Candidate | None:
        return Candidate(pattern.weight().numel() * _WEIGHT_NS, lambda: cls.of(pattern))

    @classmethod
    def of(cls, pattern: LanePattern) -> MaskedLinear:
        levels = None if pattern.levels is None else pattern.levels[:3]
        bias, clipped = (pattern.epilogue.get(name) for name in ("bias", "range"))
        return cls(pattern.weight()[:, :, 0, 0], pattern.scale(), levels, bias, clipped)

    def suits(self, pattern: Any) -> bool:
        if not isinstance(pattern, LanePattern) or not self.matches(pattern):
            return False
        levels = None if pattern.levels is None else pattern.levels[:3]
        return (
            pattern.layer.shape == (len(self.weights), self.inputs)
            and same_numbers(self.levels, levels)
            and same_numbers(self.range, pattern.epilogue.get("range"))
            and (self.bias is None) == ("bias" not in pattern.epilogue)
        )

    def validate(self) -> None:
        filters = self.weight_count // max(1, self.inputs)
        if not filters or filters * self.inputs != self.weight_count:
            raise ValueError("its sizes do not fit each other")
        validate_halves(self.weights, filters, 2, -(-self.inputs // 64) * 8)
        positive, negative = self.weights[:, 0], self.weights[:, 1]
        survivors = count_bits(positive) + count_bits(negative)
        if survivors != self.survivor_count or count_bits(positive & negative):
            raise ValueError("it has other survivors than it says")
        if self.weight_bytes != self.weights.nbytes:
            raise ValueError("its weights have another size than it says")
        validate_floats("scale", self.scale, 1)
        validate_floats("bias", self.bias, filters)
        validate_range(self.range)
        validate_floats("levels", self.levels, 3)
        if self.levels is not None:
            inverse, lowest, highest = self.levels.tolist()
            validate_step("inverse", inverse)
            validate_levels(lowest, highest)

    def readable(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def emit(self, builder: Any, *inputs: Value) -> Value:
        ((form, buffer),) = inputs
        if not isinstance(form, Numbers) or prod(form.shape) != self.inputs:
            raise MptifyError(f"A packed layer reads {self.inputs} numbers, not {form.shape}.")
        filters, _, mask_bytes = self.weights.shape
        low, high = (-inf, inf) if self.range is None else self.range.tolist()
        lanes = {"factors": builder.constant(torch.tensor([1.0, 1, 1, low, high, 1, 0, 0]))}
        if self.levels is not None:
            lanes["levels"] = builder.constant(self.levels)
        fields: dict[str, Any] = {"gain": builder.constant(self.scale)}
        if self.bias is not None:
            fields["bias"] = builder.constant(self.bias.contiguous())
        weights = builder.constant(self.weights.contiguous())
        conv = {"weights": weights, "stride": mask_bytes}
        fields |= {"conv": conv, "lanes": lanes, "filters": filters, "length": self.inputs}
        return builder.add("masked_linear", Numbers.contiguous(filters), input=buffer, **fields)
