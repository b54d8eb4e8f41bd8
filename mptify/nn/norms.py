"""BatchNorms for values of any layout, put before quantizers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mptify.nn.leaf import recorded_call

__all__ = ["ChannelBatchNorm", "ScalarBatchNorm", "TokenBatchNorm"]


class ChannelBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm over dimension 1, with any number of dimensions after it."""

    def forward(self, input: Tensor) -> Any:
        if isinstance(input, Tensor):
            return super().forward(input)
        return recorded_call(self, (input,), {})

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")


class TokenBatchNorm(nn.Module):
    """BatchNorm over the last dimension: each token of each sample is one observation."""

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        affine: bool = False,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.norm = nn.BatchNorm1d(features, eps=eps, affine=affine, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, x.shape[-1])).view(x.shape)


class ScalarBatchNorm(nn.Module):
    """BatchNorm with one mean and variance for the whole tensor, where channels are unknown."""

    def __init__(
        self, eps: float = 1e-5, affine: bool = False, device: Any = None, dtype: Any = None
    ):
        super().__init__()
        self.norm = nn.BatchNorm1d(1, eps=eps, affine=affine, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, 1)).view(x.shape)
