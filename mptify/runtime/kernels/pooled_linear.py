"""Linear layers behind a global average pool of signs."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.fusion import Pattern
from mptify.runtime.kernel import Candidate, LayerKernel
from mptify.runtime.nodes import shape_of
from mptify.runtime.survivors import list_survivors, validate_starts
from mptify.runtime.values import Bits, Numbers, Value

__all__ = ["PooledLinear"]

_MAX_INPUTS = 1 << 16  # what 16 bits can tell apart
_SURVIVOR_NS, _BYTE_NS = 0.3, 0.5  # for each survivor, and for each byte of the planes


@kernels.register("pooled_linear")
class PooledLinear(LayerKernel):
    """A binary linear layer on the mean of each plane: M ⊙ B · mean(x).

    Sums of ±1 are integers, and so are sums of these: the kernel divides once, at the end. The
    float path divides first, and rounds each of its additions.

    Args:
        weight: M ⊙ B: -1, 0 or 1.
    """

    SETTINGS: ClassVar = {
        "inputs": int,
        "weight_count": int,
        "survivor_count": int,
        "weight_bytes": int,
    }
    BUFFERS = ("index", "starts")
    OPTIONAL_BUFFERS = ("gain", "bias")
    thresholds: None = None
    index: Tensor
    starts: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        filters, self.inputs = weight.shape
        f, channel = np.nonzero(weight.numpy())
        positive = weight.numpy()[f, channel] > 0
        order, starts = list_survivors(filters, f, positive, channel)
        self.register_buffer("index", torch.from_numpy(channel[order].astype(np.uint16)))
        self.register_buffer("starts", starts)
        self.weight_count, self.survivor_count = weight.numel(), len(order)
        self.weight_bytes = self.index.nbytes

    @classmethod
    def matches(cls, pattern: Pattern) -> bool:
        return pattern.reads_signs and pattern.averages and not pattern.makes_signs

    @classmethod
    def candidate(cls, pattern: Pattern) -> Candidate | None:
        _, channels, height, width = shape_of(pattern.source)
        weight = pattern.weight
        if weight.shape[1] != channels or not _fits(channels, height * width):
            return None
        survivors, size = int((weight != 0).sum()), channels * height * -(-width // 8)
        cost = survivors * _SURVIVOR_NS + size * _BYTE_NS
        return Candidate(cost, lambda: cls(weight).scaled_for(pattern))

    @property
    def filters(self) -> int:
        return (len(self.starts) - 1) // 2

    def validate(self) -> None:
        if self.index.dtype != torch.uint16 or self.index.dim() != 1:
            raise ValueError("its survivors are not 16-bit numbers")
        if (self.index.numpy() >= self.inputs).any():
            raise ValueError("its survivors lie outside of the image")
        validate_starts(self.starts, self.filters, len(self.index))
        self.validate_scales(self.filters)

    def emit(self, builder: Any, *inputs: Value) -> Value:
        ((bits, buffer),) = inputs
        if not isinstance(bits, Bits) or bits.channels != self.inputs:
            given = bits.channels if isinstance(bits, Bits) else bits.shape[0]
            raise MptifyError(f"A packed layer reads {self.inputs} channels, not {given}.")
        if not _fits(bits.channels, bits.height * bits.width):
            size = f"{bits.height}×{bits.width}"
            raise MptifyError(f"An image of {size} is too large for a packed program.")
        conv = {
            "shape": bits.shape,
            "in_stride": bits.stride,
            "index": builder.constant(self.index),
            "starts": builder.constant(self.starts),
            "workspace": builder.workspace(4 * bits.channels),
        }
        fields = {"filters": self.filters, "input": buffer, "conv": conv, **self.scales(builder)}
        return builder.add("pooled_linear", Numbers.contiguous(self.filters), **fields)


def _fits(inputs: int, pixels: int) -> bool:
    """Whether 16 bits hold a survivor's input, and 32 bits a sum."""
    return inputs <= _MAX_INPUTS and inputs * pixels < 1 << 31
