"""A ticket layer's weight in the hands of other code than the layer's own `forward`."""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F

from mptify.errors import CannotConvert

__all__ = ["CONTRACTIONS", "PRODUCTS", "QuantizingWeight"]

CONTRACTIONS = {
    F.linear, F.conv1d, F.conv2d, F.conv3d,
    F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
}  # fmt: skip
# By name, since they are methods too:
PRODUCTS = {"matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear", "rmatmul"}
_CASTS = {"to", "type_as", "float", "half", "bfloat16", "double", "contiguous"}
_ATTRIBUTES = {
    "shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout",
    "size", "dim", "numel", "is_floating_point", "stride",
}  # fmt: skip


class QuantizingWeight:
    """A weight that quantizes the input of the operation it enters.

    `F.linear(x, weight)` and `F.conv*(x, weight)` compute what the layer itself would. Any other
    operation is an error, since its input could not be quantized. This is not a tensor, but
    torch's functions accept it as one.
    """

    def __init__(self, layer: Any):
        self._layer = layer

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function not in CONTRACTIONS:
            values = (*args, *kwargs.values())
            weight = next(value for value in values if isinstance(value, QuantizingWeight))
            weight._refuse(getattr(function, "__name__", str(function)))
        x = args[0] if args else kwargs.pop("input")
        weight = args[1] if len(args) > 1 else kwargs.pop("weight")
        bias = args[2] if len(args) > 2 else kwargs.pop("bias", None)
        layer = weight._layer
        if bias is None:  # a bias moved to `output_bias` reads as None
            bias = layer.output_bias
        return layer.run(function, x, bias, *args[3:], **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            return getattr(self._layer.operand(), name)
        if name in _CASTS:
            return lambda *args, **kwargs: self  # `operand()` comes in the layer's own dtype
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    def _refuse(self, name: str) -> Any:
        layer = self._layer.ticket_name
        raise CannotConvert(
            f"{layer}: its weight goes into {name}(), where mptify can't quantize the input; "
            f"exclude={layer!r} leaves the layer dense."
        )
