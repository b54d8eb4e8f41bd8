"""Trace, plan, rewrite: an ordinary network goes in, a ticket model comes out."""

from __future__ import annotations

from typing import Any

from torch import nn

from mptify.config import make_config
from mptify.nn.layers import Ticketed, TicketParameter
from mptify.surgery.layer_registry import Handler, register
from mptify.surgery.plan import Plan
from mptify.surgery.planner import make_plan
from mptify.surgery.rewrite import rewrite
from mptify.surgery.trace import trace

__all__ = ["Handler", "Plan", "plan", "register", "ticket_layers", "transform", "with_norms"]


def transform(model: nn.Module, **settings: Any) -> nn.Module:
    """The ticket model of `model`: a new module; the one passed in stays as it is, train/eval modes included.

    The keywords are the fields of [`TicketConfig`][mptify.TicketConfig]: `bits="1/32"`, `prune=0.5`, ...

        ticketed = mptify.transform(torchvision.models.resnet18(), bits="1/1", prune=0.75)
    """
    config = make_config(settings)
    traced = trace(model)
    return rewrite(traced, make_plan(traced, config))


def plan(model: nn.Module, **settings: Any) -> Plan:
    """Look before cutting: what [`transform`][mptify.transform] would do with the same arguments, as plain data."""
    return make_plan(trace(model), make_config(settings))


def with_norms(model: nn.Module) -> nn.Module:
    """The dense network with a BatchNorm before each activation that lacks one: what `bn="insert"` is to be compared with."""
    config = make_config({"bits": "32/32", "prune": 0, "init": "keep", "bias": "learn", "learn_bn": True, "bn": "insert", "exclude": "*"})
    traced = trace(model)
    return rewrite(traced, make_plan(traced, config, needs_layers=False))


def ticket_layers(model: nn.Module) -> dict[str, Any]:
    """The ticket layers of a model by name; each offers `scores`, `mask`, `gain`, `sign` and `ticket_weight()`."""
    return {
        name.removesuffix("_ticket") if isinstance(module, TicketParameter) else name: module
        for name, module in model.named_modules()
        if isinstance(module, Ticketed)
    }
