"""The optimizer of a search."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mptify.config import SearchConfig
from mptify.surgery.trainable import parameter_kinds

__all__ = ["make_optimizer"]


def make_optimizer(network: nn.Module, config: SearchConfig) -> torch.optim.Optimizer:
    """The optimizer of all parameters that require grad; kinds named by `decays` decay.

    A group's `scale` multiplies its learning rate. Adam's steps have one size for all layers, but
    initial scores lie within ±1/√(fan-in): steps that suit a layer of 27 inputs overturn one of
    8,192 at once. With `relative`, a layer's steps are therefore multiplied by the largest of its
    initial scores. This does not change what a layer can learn, since a mask does not depend on the
    scale of the scores.
    """
    kinds = parameter_kinds(network)
    relative = config.relative and config.optimizer != "sgd"
    found: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            kind = "bias" if kinds[name] == "dense" and parameter.dim() <= 1 else kinds[name]
            decay = config.weight_decay if kind in config.decays else 0.0
            scale = _size(parameter) if relative and kinds[name] == "scores" else 1.0
            found.setdefault((decay, scale), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": these, "weight_decay": decay, "scale": scale}
        for (decay, scale), these in found.items()
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov
        )
    maker = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return maker(groups, lr=config.lr, betas=(config.momentum, 0.999))


def _size(scores: Tensor) -> float:
    """The largest score, to two digits, so that layers of equal fan-in share a group."""
    return float(f"{float(scores.detach().abs().max()):.2g}")
