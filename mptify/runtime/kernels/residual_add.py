"""Two binary layers whose outputs are added before a sign, as where a ResNet's stages begin."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.bitsliced_tables import Tables
from mptify.runtime.fusion import Pattern
from mptify.runtime.geometry import fits
from mptify.runtime.kernel import Candidate, NativeKernel
from mptify.runtime.kernels.bitsliced_conv import BitslicedConv, addition_cost
from mptify.runtime.survivors import max_kept
from mptify.runtime.values import Bits, Value

__all__ = ["ResidualAdd"]


@kernels.register("residual_add")
class ResidualAdd(NativeKernel):
    """+1 where the sum of `first` reaches a threshold that depends on the sum of `second`.

    Args:
        first: The larger layer, without thresholds.
        second: The other layer, without thresholds.
        least: [filters][sums of `second`, from the smallest possible one on].
    """

    SETTINGS: ClassVar = {"span": int}
    BUFFERS = ("least",)
    SUB_KERNELS: ClassVar = {"first": BitslicedConv, "second": BitslicedConv}
    least: Tensor
    first: BitslicedConv
    second: BitslicedConv

    def __init__(self, first: BitslicedConv, second: BitslicedConv, least: Tensor):
        super().__init__()
        self.first, self.second, self.span = first, second, least.shape[1]
        self.register_buffer("least", least.reshape(-1).to(torch.int16))

    @classmethod
    def matches(cls, pattern: Pattern) -> bool:
        if pattern.other is None or not pattern.reads_signs or not pattern.other_reads_signs:
            return False
        return pattern.branch.pads_with_zeros and pattern.other.pads_with_zeros

    @classmethod
    def candidate(cls, pattern: Pattern) -> Candidate | None:
        assert pattern.other is not None
        geometry, other = pattern.branch.geometry(), pattern.other.geometry()
        weight, other_weight = pattern.weight, pattern.other_weight
        if not fits(geometry, max_kept(weight)) or not fits(other, max_kept(other_weight)):
            return None
        found = pattern.thresholds
        if found is None:
            return None

        def make() -> ResidualAdd:
            first = BitslicedConv(pattern.rising_weight, None, geometry)
            return cls(first, BitslicedConv(other_weight, None, other), found.least)

        return Candidate(addition_cost(weight, geometry) + addition_cost(other_weight, other), make)

    def validate(self) -> None:
        self.first.validate()
        self.second.validate()
        first, second = self.first, self.second
        if first.thresholds is not None or second.thresholds is not None:
            raise ValueError("its layers have thresholds of their own")
        if first.filters != second.filters:
            raise ValueError("its layers have different numbers of filters")
        if self.least.dtype != torch.int16 or self.least.numel() != first.filters * self.span:
            raise ValueError("its thresholds are not those of each filter")
        if self.span // 2 < second.max_kept or self.span % 2 == 0:
            raise ValueError("it has too few thresholds per filter")

    def emit(self, builder: Any, *inputs: Value) -> Value:
        (bits, buffer), (second_bits, second_buffer) = inputs
        assert isinstance(bits, Bits)
        assert isinstance(second_bits, Bits)
        first, second = Tables(self.first, bits), Tables(self.second, second_bits)
        sizes = [tables.geometry.out_size for tables in (first, second)]
        if sizes[0] != sizes[1]:
            shown = " and ".join(f"{height}×{width}" for height, width in sizes)
            raise MptifyError(f"Outputs of {shown} pixels can't be added.")
        return builder.add(
            "residual_add",
            Bits(self.first.filters, *sizes[0], bits.tokens),
            filters=self.first.filters,
            input=buffer,
            second_input=second_buffer,
            conv=first.arguments(builder),
            second_conv=second.arguments(builder),
            table=builder.constant(self.least),
            span=self.span,
        )
