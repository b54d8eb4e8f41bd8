"""A ticket's weight used by other code than its layer's own `forward`: by `F.linear`, by attention, by a wrapped function."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from mptify.errors import CannotConvert

__all__ = ["CONTRACTIONS", "PRODUCTS", "EscapedWeight", "along", "apply_to_prepared", "apply_weight"]

CONTRACTIONS = {F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
PRODUCTS = {"matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear", "rmatmul"}  # by name, since they are methods too
_ON_THE_WAY = {"to", "type_as", "float", "half", "bfloat16", "double", "contiguous"}  # what it stays the same weight through
_LOOKS = {"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "size", "dim", "numel", "is_floating_point", "stride"}


class EscapedWeight:
    """A ticket's weight in the hands of other code than its layer's: binarizes the input of the operation it enters.

    `F.linear(x, weight)` and `F.conv*(x, weight)` then compute what the layer itself would. Where it goes into anything
    else, nobody could tell which input to binarize, and that is an error. No tensor, only something that torch's functions
    accept for one.
    """

    def __init__(self, layer: Any, weight: Tensor):
        self._layer, self._weight = layer, weight

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if function not in CONTRACTIONS:
            escaped = next(one for one in (*args, *kwargs.values()) if isinstance(one, EscapedWeight))
            escaped._refuse(getattr(function, "__name__", str(function)))
        x = args[0] if args else kwargs.pop("input")
        weight = args[1] if len(args) > 1 else kwargs.pop("weight")
        bias = args[2] if len(args) > 2 else kwargs.pop("bias", None)
        own = weight._layer.offset if bias is None else bias  # its bias was moved there, so the caller read None
        return apply_weight(weight._layer, function, x, own, *args[3:], **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _LOOKS:
            return getattr(self._weight, name)
        if name in _ON_THE_WAY:
            return lambda *args, **kwargs: EscapedWeight(self._layer, getattr(self._weight, name)(*args, **kwargs))
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    def _refuse(self, name: str) -> Any:
        raise CannotConvert(
            f"{self._layer.ticket_name}: its weight goes into {name}(), where mptify can't make the input ±1; "
            f"exclude={self._layer.ticket_name!r} leaves the layer dense."
        )


def apply_weight(layer: Any, function: Any, x: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
    """Run `function(x, layer's weight, ...)` as the layer itself would: input binarized, gain on the output.

    `function` is one of torch.nn.functional's, or its name.
    """
    return apply_to_prepared(layer, function, layer._prepare(x), bias, *args, **kwargs)


def apply_to_prepared(layer: Any, function: Any, x: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
    """The same for an input that is binarized already, or was never to be."""
    function = getattr(F, function) if isinstance(function, str) else function
    weight = layer._compute_weight().to(layer.compute_dtype)
    if not layer.gain_outside:
        return function(x, weight, bias, *args, **kwargs)
    y = function(x, weight, None, *args, **kwargs)
    y = y * layer.gain.to(y.dtype)
    return y if bias is None else y + along(bias, layer).to(y.dtype)


def along(vector: Tensor, layer: Any) -> Tensor:
    return vector if layer.channel_axis == -1 else vector.view(-1, *[1] * (layer.frozen.dim() - 2))
