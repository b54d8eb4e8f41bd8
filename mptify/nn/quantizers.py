"""Activation quantizers. A quantizer is registered by the name that `quantizer=` takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mptify.errors import BadConfig
from mptify.nn import native, topk
from mptify.nn.leaf import recorded_call
from mptify.registry import quantizers

__all__ = ["InputQuantizer", "Sign", "check_quantizer", "sign"]


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width):
        ctx.save_for_backward(x)
        ctx.width = width
        return native.sign(x) if native.can_map(x) else topk.sign(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if not torch.is_grad_enabled() and native.can_map(x, grad):
            return native.sign_gradient(grad, x, ctx.width), None
        slope = x.abs().mul_(-2 / ctx.width**2).add_(2 / ctx.width).relu_()
        return slope.mul_(grad), None


@quantizers.register("sign")
def sign(x: Tensor, *, width: float = 1.0) -> Tensor:
    r"""One bit, with the derivative of a spline as its estimator.

    Forward: $\mathrm{sign}(x)$, with $\mathrm{sign}(0) = +1$. Backward:
    $s_t'(x) = \max(0, \tfrac{2}{t}(1 - |x|/t))$ with $t$ = `width` (paper, appendix A).
    """
    return _Sign.apply(x, width)


def check_quantizer(name: str) -> None:
    """Raise unless the quantizer of this name maps to ±1, as the layers behind it expect.

    Raises:
        BadConfig: There is no such quantizer, or its outputs are others.
    """
    probe = torch.tensor([-2.0, -0.5, -0.0, 0.0, 0.5, 2.0], device="cpu")
    with torch.no_grad():
        found = quantizers[name](probe, width=1.0)
    if not torch.equal(found, topk.sign(probe)):
        raise BadConfig(
            f"quantizer={name!r}: with 1-bit activations it must return -1 for negative inputs and "
            f"+1 for others; for {probe.tolist()} it returned {found.tolist()}."
        )


class Sign(nn.Module):
    """A 1-bit quantizer as a module.

    Args:
        width: The half-width of the range in which a gradient passes.
        quantizer: The registered name of the quantizer.
    """

    def __init__(self, width: float = 1.0, quantizer: str = "sign"):
        super().__init__()
        self.width, self.quantizer = width, quantizer
        self._quantize = quantizers[quantizer]

    def forward(self, x: Tensor) -> Any:
        if isinstance(x, Tensor):
            return self._quantize(x, width=self.width)
        return recorded_call(self, (x,), {})

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_quantize"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._quantize = quantizers[self.quantizer]

    def extra_repr(self) -> str:
        shown = {"width": (self.width, 1.0), "quantizer": (self.quantizer, "sign")}
        return ", ".join(
            f"{key}={value}" for key, (value, usual) in shown.items() if value != usual
        )


class InputQuantizer(nn.Sequential):
    """BatchNorm → quantizer inside a ticket layer, for code that cannot be traced."""
