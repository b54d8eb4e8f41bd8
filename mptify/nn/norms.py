"""Activations of one bit, and the norms put before them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from mptify.nn import functional

__all__ = ["Binarize", "ChannelBatchNorm", "ScalarBatchNorm", "Sign", "TokenBatchNorm", "recorded_call"]


def recorded_call(module: Any, args: tuple, kwargs: dict[str, Any], *tensors: Any) -> fx.Proxy | None:
    """One node for a call of `module` if some fx tracer runs it, so that it is a leaf for every tracer; else None.

    A tracer shows proxies for the network's inputs, and for the module's own `tensors` where the call's arguments are constants.
    """
    proxy: Any = next((one for one in (*args, *kwargs.values(), *tensors) if isinstance(one, fx.Proxy)), None)
    if proxy is None:
        return None
    return proxy.tracer.create_proxy("call_module", proxy.tracer.path_of_module(module), args, kwargs)


class Sign(nn.Module):
    r"""$\mathrm{sign}(x)$ with $\mathrm{sign}(0) = +1$; backward $\max(0, \tfrac{2}{t}(1 - |x|/t))$, t = `width`."""

    def __init__(self, width: float = 1.0):
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Any:
        return functional.sign_ste(x, self.width) if isinstance(x, Tensor) else recorded_call(self, (x,), {})

    def extra_repr(self) -> str:
        return "" if self.width == 1 else f"width={self.width}"


class Binarize(nn.Sequential):
    """BatchNorm → Sign, as a layer has it that binarizes its own input."""


class ChannelBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm over dimension 1, whatever the number of dimensions behind it."""

    def forward(self, input: Tensor) -> Any:
        return super().forward(input) if isinstance(input, Tensor) else recorded_call(self, (input,), {})

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")


class TokenBatchNorm(nn.Module):
    """BatchNorm over the last dimension: every token of every sample counts as one observation."""

    def __init__(self, features: int, eps: float = 1e-5, affine: bool = False, device: Any = None, dtype: Any = None):
        super().__init__()
        self.norm = nn.BatchNorm1d(features, eps=eps, affine=affine, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, x.shape[-1])).view(x.shape)


class ScalarBatchNorm(nn.Module):
    """BatchNorm with one mean and variance for the whole tensor: for values whose channels can't be told."""

    def __init__(self, eps: float = 1e-5, affine: bool = False, device: Any = None, dtype: Any = None):
        super().__init__()
        self.norm = nn.BatchNorm1d(1, eps=eps, affine=affine, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, 1)).view(x.shape)
