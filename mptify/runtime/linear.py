"""Linear layers on signs: of tokens as bit planes, of one vector by counting bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from mptify.runtime.library import Popcount, library
from mptify.runtime.planes import Planes

__all__ = ["PopcountLinear"]


class PopcountLinear(nn.Module):
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
        self.which_cpu = -1  # the best

    def forward(self, x: Planes) -> Tensor:
        """Images × filters, as float32."""
        assert library is not None
        filters, _, row = self.weights.shape
        sums = torch.empty((x.images, filters))
        job = Popcount(weights=self.weights.data_ptr(), kept=self.kept.data_ptr(), bytes=row)
        for image, out in enumerate(sums):
            job.input, job.out = x.address_of(image), out.data_ptr()
            library.mptify_packed_popcount(job, filters, self.which_cpu, torch.get_num_threads())
        return sums
