"""Two binary layers whose outputs are added before a sign, as at the first block of each of a ResNet's stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.runtime.bitsliced import BitslicedConv, Tables
from mptify.runtime.planes import Bits, Kernel, Value

__all__ = ["JoinedConv"]


class JoinedConv(Kernel):
    """+1 where the sum of `one` reaches `least` [filters][sums of `other`], which begins with the least sum that `other` can have."""

    SETTINGS = ("span",)
    least: Tensor

    def __init__(self, one: BitslicedConv, other: BitslicedConv, least: Tensor):
        super().__init__()
        self.one, self.other, self.span = one, other, least.shape[1]
        self.register_buffer("least", least.reshape(-1).to(torch.int16))

    def fault(self) -> str | None:
        fault = self.one.fault() or self.other.fault()
        if fault:
            return fault
        if self.one.filters != self.other.filters or self.one.thresholds is not None or self.other.thresholds is not None:
            return "its two layers can't be added"
        if self.least.dtype != torch.int16 or self.least.numel() != self.one.filters * self.span:
            return "its thresholds are not those of each filter"
        return None if self.span // 2 >= self.other.most_kept and self.span % 2 else "it has too few thresholds per filter"

    def plan(self, to: Any, *inputs: Value) -> Value:
        (bits, place), (their_bits, their_place) = inputs
        one, other = Tables(self.one, bits), Tables(self.other, their_bits)
        if one.geometry.out_size != other.geometry.out_size:
            raise MptifyError(f"Outputs of {one.geometry.out_size} and {other.geometry.out_size} pixels can't be added.")
        return to.add(
            "join", Bits(self.one.filters, *one.geometry.out_size, bits.tokens), filters=self.one.filters, in_=place, second=their_place,
            one=one.put(to), other=other.put(to), table=to.constant(self.least), span=self.span,
        )  # fmt: skip
