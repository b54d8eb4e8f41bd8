"""Which parameters of a ticket model are trained, and how its norms start."""

from __future__ import annotations

import torch
from torch import nn

from mptify.nn.layers import Ticketed
from mptify.nn.quantizers import UniformQuantizer
from mptify.surgery import layer_registry
from mptify.surgery.plans import Plan

__all__ = ["is_norm", "let_train_", "parameter_kinds", "reset_norms_"]


def reset_norms_(model: nn.Module) -> None:
    """Reset all norms, since their statistics and scales belong to other weights."""
    for module in model.modules():
        if is_norm(module):
            for name, value in (
                ("weight", 1.0),
                ("bias", 0.0),
                ("running_mean", 0.0),
                ("running_var", 1.0),
            ):
                tensor = getattr(module, name, None)
                if isinstance(tensor, torch.Tensor):
                    with torch.no_grad():
                        tensor.fill_(value)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm of torch, or is named so and has vectors as parameters."""
    if isinstance(module, (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)):
        return True
    if (
        isinstance(module, Ticketed)
        or "norm" not in type(module).__name__.lower()
        or any(True for _ in module.children())
    ):
        return False
    return all(
        parameter is None or parameter.dim() <= 1 for parameter in module._parameters.values()
    )


def let_train_(model: nn.Module, plan: Plan) -> None:
    """Let the parameters that the config names require grad, unless the caller froze them."""
    kinds, config = parameter_kinds(model), plan.config
    allowed = {
        "scores": True,
        "norm": config.learn_bn,
        "bias": config.bias == "learn",
        "clip": True,
        "other": config.other == "learn",
        "dense": True,
    }
    for name, parameter in model.named_parameters():
        held = name in plan.held and kinds[name] in ("other", "dense")
        parameter.requires_grad_(allowed.get(kinds[name], False) and not held)


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """The kind of each parameter: scores, frozen, bias, norm, clip, dense or other."""
    kinds = {}
    for prefix, module in model.named_modules():
        composite = layer_registry.find_composite(module)
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{prefix}.{name}" if prefix else name
            if isinstance(module, Ticketed):
                kinds[full] = {
                    "scores": "scores",
                    "frozen": "frozen",
                    "fixed_weight": "frozen",
                }.get(name, "bias")
            elif isinstance(module, UniformQuantizer):
                kinds[full] = "clip"
            elif composite is not None and name in composite.biases:
                kinds[full] = "bias"
            elif layer_registry.find(module) is not None:
                kinds[full] = "dense"
            else:
                kinds[full] = "norm" if is_norm(module) else "other"
    return kinds
