"""Two binary layers whose outputs are added before a sign, as at the first block of each of a ResNet's stages."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from mptify.runtime.bitsliced import BitslicedConv, runs_of
from mptify.runtime.library import Join, library
from mptify.runtime.planes import Planes, Prepared

__all__ = ["JoinedConv"]


class JoinedConv(Prepared):
    """+1 where the sum of `one` reaches `least` [filters][sums of `other`], which begins with the least sum that `other` can have."""

    least: Tensor

    def __init__(self, one: BitslicedConv, other: BitslicedConv, least: Tensor):
        super().__init__()
        self.one, self.other, self.span = one, other, least.shape[1]
        self.register_buffer("least", torch.cat([least.reshape(-1), least.new_zeros(1)]).to(torch.int16))  # the kernel may read one more

    def forward(self, x: Planes, y: Planes) -> Planes:
        tables = self.tables_for(x, y)
        out = Planes.empty(x.images, self.one.filters, *self.one.geometry.out_size, x.tokens)
        assert library is not None
        for image in range(x.images):
            tables.one.conv_of(x, image)
            tables.other.conv_of(y, image)
            tables.join.out = out.address_of(image)
            library.mptify_packed_join(tables.join, self.one.which_cpu, torch.get_num_threads())
        return out

    def tables_for(self, x: Planes, y: Planes) -> Any:
        """Ready for images of this size."""
        one, other = self.one.tables_for(x), self.other.tables_for(y)
        if self._tables is None or self._tables.one is not one or self._tables.other is not other:
            self._tables = _Tables(self, one, other)
        return self._tables


class _Tables:
    def __init__(self, layer: JoinedConv, one: Any, other: Any):
        assert layer.one.geometry.out_size == layer.other.geometry.out_size
        self.one, self.other = one, other
        self.runs = runs_of(one.classes, other.classes)
        self.join = Join(
            one=ctypes.pointer(one.conv), other=ctypes.pointer(other.conv), table=layer.least.data_ptr(), runs=self.runs.ctypes.data,
            span=layer.span, run_count=len(self.runs), filters=layer.one.filters, stride=one.job.stride,
        )  # fmt: skip
