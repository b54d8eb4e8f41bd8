"""Dense training, the baseline of a search."""

from __future__ import annotations

import copy

from torch import nn

from mptify.config import SearchConfig
from mptify.errors import MptifyError
from mptify.nn.layers import Ticketed
from mptify.registry import methods
from mptify.surgery import with_norms
from mptify.training.methods.base import SearchMethod

__all__ = ["Dense"]


@methods.register("dense")
class Dense(SearchMethod):
    """Train the weights themselves, on the same images and with the same loop."""

    description = "dense training: learns the weights themselves"
    weight_bits = None
    trains_weights = True

    @classmethod
    def default_lr(cls, optimizer: str, activation_bits: int) -> float:
        return 0.05 if optimizer == "sgd" else 0.001

    def prepare(self, model: nn.Module, config: SearchConfig) -> nn.Module:
        if any(isinstance(layer, Ticketed) for layer in model.modules()):
            raise MptifyError(
                "method='dense' trains weights, and this is a ticket model, whose weights are "
                "frozen."
            )
        if config.ticket.bn == "insert":
            return with_norms(model)
        return copy.deepcopy(model).requires_grad_(True)
