"""What a ticket layer saves for backward: its weight and its input in as few bits as hold them.

Autograd saves the input and the weight of a layer's operation. The weight follows from a bit per
weight and from frozen weights that the layer holds anyway. An input of few-bit levels takes as many
bits per number instead of 32. Both are the same to the bit when backward reads them, and whatever
is not of this kind is saved as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mptify.nn import native
from mptify.nn.quantizers import RunningQuantizer, level_range
from mptify.nn.topk import Compact

__all__ = ["saved_compactly"]

_SAMPLE = 4096  # numbers from which to guess the step of levels


@dataclass(frozen=True)
class _AsIs:
    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:  # torch does not check where there are hooks
            raise RuntimeError(
                "A tensor that backward needs was modified in place: a "
                f"{tuple(self.tensor.shape)} tensor is at version {self.tensor._version}, and "
                f"version {self.version} is expected."
            )
        return self.tensor


@dataclass(frozen=True)
class _PackedView:
    """A view of a tensor that `restore` makes again from its packed form."""

    packed: Tensor
    restore: Callable[[Tensor], Tensor]
    size: torch.Size
    stride: tuple[int, ...]

    def unpack(self) -> Tensor:
        with torch.no_grad():
            return self.restore(self.packed).as_strided(self.size, self.stride)


@contextlib.contextmanager
def saved_compactly(
    layer: Any, x: Any, effective: Tensor, compact: Compact | None
) -> Iterator[None]:
    """A context in which the operation of `layer` saves its weight and its input in few bits.

    Args:
        layer: The ticket layer.
        x: The input of the operation.
        effective: The effective weight that the operation takes.
        compact: The same in a bit per weight, if there is such a form.
    """
    operands = _Operands(layer, x, effective, compact)
    with torch.autograd.graph.saved_tensors_hooks(operands.pack, _unpack):
        yield
    operands.forget()  # since autograd keeps `pack`


class _Operands:
    def __init__(self, layer: Any, x: Any, effective: Tensor, compact: Compact | None):
        self.layer, self.x = layer, x if isinstance(x, Tensor) and native.can_map(x) else None
        self.effective, self.compact = effective, compact

    def forget(self) -> None:
        self.__dict__.clear()

    def pack(self, tensor: Tensor) -> _AsIs | _PackedView:
        found = self._packed(tensor)
        if found is None:
            return _AsIs(tensor, tensor._version)
        return _PackedView(*found, tensor.shape, tensor.stride())

    def _packed(self, tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
        x = self.x
        if type(tensor) is not Tensor or tensor.dtype != torch.float32:
            return None
        if self.compact is not None and tensor.data_ptr() == self.effective.data_ptr():
            return self.compact.bits, partial(_expanded, self.compact, self.layer.frozen)
        if x is not None and tensor.data_ptr() == x.data_ptr() and tensor.numel() == x.numel():
            levels = _levels_of(x.detach(), self.layer)
            packed = None if levels is None else native.pack_levels(x, levels)
            if levels is not None and packed is not None:
                return packed, partial(_unpacked, levels, x.shape, x.stride())
        return None


def _unpack(saved: _AsIs | _PackedView) -> Tensor:
    return saved.unpack()


def _expanded(compact: Compact, frozen: Tensor, _: Tensor) -> Tensor:
    return compact.expand(frozen)


def _unpacked(
    levels: native.Levels, size: torch.Size, stride: tuple[int, ...], packed: Tensor
) -> Tensor:
    out = native.empty_strided(size, stride)
    native.unpack_levels(packed, levels, out)
    return out


def _levels_of(x: Tensor, layer: Any) -> native.Levels | None:
    """The levels that `x` probably holds; packing finds out whether it does."""
    bits, quantizer = layer.activation_bits, layer.input_quantizer
    if bits == 32:
        return None
    if bits == 1:
        return native.Levels(1, 0, 1.0)
    if isinstance(quantizer, RunningQuantizer):
        step = 1.0 if layer.scales_output else float(quantizer.step)
        return native.Levels(bits, level_range(bits, bool(quantizer.is_signed))[0], step)
    # The quantizer is elsewhere in the network: the smallest magnitude is its step.
    count = x.numel()
    stride = max(1, count // _SAMPLE)
    sample = x.as_strided((-(-count // stride),), (stride,))
    magnitudes = sample.abs()
    nonzero = magnitudes[magnitudes > 0]
    step = float(nonzero.min()) if len(nonzero) else 1.0
    return native.Levels(bits, level_range(bits, bool((sample < 0).any()))[0], step)
