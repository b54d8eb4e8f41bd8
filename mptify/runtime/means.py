"""A classifier behind a global average pool: linear layers that read the means of bit planes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.runtime.bitsliced import fault_in_lists, in_lists
from mptify.runtime.planes import Bits, Layer, Numbers, Value

__all__ = ["MeanLinear", "reads_few_enough"]

_MOST_INPUTS = 1 << 16  # that 16 bits can tell apart


def reads_few_enough(inputs: int, pixels: int) -> bool:
    """Whether survivors fit 16 bits, and sums 32."""
    return inputs <= _MOST_INPUTS and inputs * pixels < 1 << 31


class MeanLinear(Layer):
    """Weights of ±1 on the mean of each plane: M ⊙ B · mean(x). `weight` is M ⊙ B: -1, 0 or 1.

    Sums of ±1 are integers, and so are sums of these: they are divided by the pixels once, at the end. The float path divides first,
    and rounds each of its additions.
    """

    SETTINGS = ("inputs", "weight_count", "survivor_count", "weight_bytes")
    thresholds: None = None  # its numbers are what is wanted
    index: Tensor
    starts: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        filters, self.inputs = weight.shape
        f, channel = np.nonzero(weight.numpy())
        positive = weight.numpy()[f, channel] > 0
        order, starts = in_lists(filters, f, positive, channel)
        self.register_buffer("index", torch.from_numpy(channel[order].astype(np.uint16)))
        self.register_buffer("starts", starts)
        self.weight_count, self.survivor_count, self.weight_bytes = weight.numel(), len(order), self.index.nbytes

    def fault(self) -> str | None:
        if self.index.dtype != torch.uint16 or self.index.dim() != 1 or (self.index.numpy() >= self.inputs).any():
            return "its survivors lie outside of the image"
        filters = (len(self.starts) - 1) // 2
        return fault_in_lists(self.starts, filters, len(self.index)) or self.fault_in_scales(filters)

    def plan(self, to: Any, *inputs: Value) -> Value:
        ((bits, place),) = inputs
        if not isinstance(bits, Bits) or bits.channels != self.inputs:
            raise MptifyError(f"A packed layer reads {self.inputs} channels, and was given {bits.channels}.")
        if not reads_few_enough(bits.channels, bits.height * bits.width):
            raise MptifyError(f"An image of {bits.height}×{bits.width} is too large for a packed program.")
        filters = (len(self.starts) - 1) // 2
        one = {
            "shape": bits.shape, "in_stride": bits.stride, "index": to.constant(self.index), "starts": to.constant(self.starts),
            "scratch": to.scratch(4 * bits.channels),
        }  # fmt: skip
        return to.add("means", Numbers.in_order(filters), filters=filters, in_=place, one=one, **self.scales(to))
