"""The optimizer of a search."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mptify.config import SearchConfig
from mptify.surgery.trainable import parameter_kinds

__all__ = ["make_optimizer"]


def make_optimizer(network: nn.Module, config: SearchConfig) -> torch.optim.Optimizer:
    """Over what requires grad; the kinds of parameters that `decays` names decay, the others don't.

    A group's `scale` multiplies its learning rate. A mask does not change when all of its layer's scores are scaled, but
    Adam's steps have one size everywhere, and first scores lie within ±1/√(fan-in): steps that suit a layer of 27 inputs
    overturn one of 8,192 at once. So with `relative`, a layer's steps are counted in the largest of its first scores.
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
    """The largest, to two digits: layers of the same fan-in then share a group, and the optimizer's loop stays short."""
    return float(f"{float(scores.detach().abs().max()):.2g}")
