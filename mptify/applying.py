"""A ticket's weight used by other code than its layer's own `forward`: by `F.linear`, by attention, by a wrapped function."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

__all__ = ["EscapedWeight", "along", "apply_weight"]


class EscapedWeight(Tensor):
    """A ticket's weight in the hands of code that can't be traced: binarizes the input of the operation it enters.

    `F.linear(x, weight)` and `F.conv*(x, weight)` then compute what the layer itself would.
    """

    _layer: Any

    @staticmethod
    def of(weight: Tensor, layer: Any) -> Tensor:
        escaped = weight.as_subclass(EscapedWeight)
        escaped._layer = layer
        return escaped

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _CONTRACTIONS:
            x = args[0] if args else kwargs.pop("input")
            weight = args[1] if len(args) > 1 else kwargs.pop("weight")
            bias = args[2] if len(args) > 2 else kwargs.pop("bias", None)
            own = weight._layer.offset if bias is None else bias  # its bias was moved there, so the caller read None
            return apply_weight(weight._layer, function, x, own, *args[3:], **kwargs)
        plain = [a.as_subclass(Tensor) if isinstance(a, EscapedWeight) else a for a in args]
        return function(*plain, **kwargs)


_CONTRACTIONS = {F.linear, F.conv1d, F.conv2d, F.conv3d}


def apply_weight(layer: Any, function: Any, x: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
    """Run `function(x, layer's weight, ...)` as the layer itself would: input binarized, gain on the output.

    `function` is one of torch.nn.functional's, or its name.
    """
    function = getattr(F, function) if isinstance(function, str) else function
    x = layer._prepare(x)
    weight = layer._compute_weight(scaled=not layer.gain_outside).to(layer.compute_dtype)
    if not layer.gain_outside:
        return function(x, weight, bias, *args, **kwargs)
    y = layer._scaled(function(x, weight, None, *args, **kwargs))
    return y if bias is None else y + along(bias, layer).to(y.dtype)


def along(vector: Tensor, layer: Any) -> Tensor:
    return vector if layer.channel_axis == -1 else vector.view(-1, *[1] * (layer.frozen.dim() - 2))
