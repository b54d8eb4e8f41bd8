"""Linear layers on signs: of tokens as bit planes, of one vector by counting bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from mptify.runtime.library import Popcount, library
from mptify.runtime.planes import Planes

__all__ = ["PopcountLinear"]

_BLOCK = 256  # inputs, whose mask and signs lie side by side


class PopcountLinear(nn.Module):
    """The sums of a binary layer that sees one pixel: kept - 2 · popcount(mask & (input ^ sign)). `weight` is M ⊙ B: -1, 0 or 1."""

    weights: Tensor
    kept: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        filters, inputs = weight.shape
        blocks = -(-inputs // _BLOCK)
        signs = np.zeros((filters, blocks * _BLOCK), np.int8)
        signs[:, :inputs] = weight.numpy()
        halves = [np.packbits(part, axis=1, bitorder="little").reshape(filters, blocks, 1, -1) for part in (signs != 0, signs > 0)]
        self.register_buffer("weights", torch.from_numpy(np.concatenate(halves, axis=2)))
        self.register_buffer("kept", (weight != 0).sum(1).to(torch.int32))
        self.which_cpu = -1  # the best

    def forward(self, x: Planes) -> Tensor:
        """Images × filters, as float32."""
        assert library is not None
        filters, blocks = self.weights.shape[:2]
        sums = torch.empty((x.images, filters))
        job = Popcount(weights=self.weights.data_ptr(), kept=self.kept.data_ptr(), blocks=blocks)
        for bits, out in zip(x.bits, sums, strict=True):
            job.input, job.out = bits.data_ptr(), out.data_ptr()
            library.mptify_packed_popcount(job, filters, self.which_cpu, torch.get_num_threads())
        return sums
