"""Checkpoints: everything the next step depends on, as named tensors, without pickle."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mptify.surgery import ticket_layers
from mptify.surgery.trainable import parameter_kinds

__all__ = ["changing", "fingerprint", "optimizer_state", "restore_optimizer_"]


def changing(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors that a step may change."""
    frozen = {name for name, kind in parameter_kinds(network).items() if kind == "frozen"}
    yield from (
        (name, parameter) for name, parameter in network.named_parameters() if name not in frozen
    )
    yield from network.named_buffers()


def fingerprint(network: nn.Module) -> str:
    """A fingerprint of what a checkpoint relies on: frozen weights, and names and shapes."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in changing(network):
        found.update(f"{name} {tuple(tensor.shape)};".encode())
    for layer in {layer.ticket_name: layer for layer in ticket_layers(network).values()}.values():
        found.update(layer.frozen.detach().cpu().numpy())
    return found.hexdigest()


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of an optimizer: named tensors, and other values."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{number}.{key}"] = value
            else:
                plain[f"optimizer.{number}.{key}"] = value
    return tensors, plain


def restore_optimizer_(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], plain: dict[str, Any]
) -> None:
    """Restore what `optimizer_state` returned."""
    parameters = _parameters(optimizer)
    for name, value in [*tensors.items(), *plain.items()]:
        if name.startswith("optimizer."):
            _, number, key = name.split(".", 2)
            parameter = parameters[int(number)]
            if isinstance(value, Tensor):
                # Torch counts steps on the CPU.
                value = value.clone() if key == "step" else value.to(parameter.device)
            optimizer.state[parameter][key] = value
