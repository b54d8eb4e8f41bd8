"""Build the network that a file names, without its initial weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mptify.errors import MptifyError, TicketMismatch
from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.models.registry import Architecture
from mptify.nn import init
from mptify.surgery import ticket_layers, transform
from mptify.ticket.codec import Ticket
from mptify.ticket.state import floats_of

__all__ = ["build", "emptied"]


def emptied(model: nn.Module, ticket: Ticket) -> nn.Module:
    """A ticket model without scores, with memory for all tensors, to be filled from a file."""
    with init.undrawn():
        # The file says how many each layer keeps.
        model = transform(model, **dict(ticket.config) | {"scope": "layer"})
    first: dict[str, Any] = {}
    for layer in ticket_layers(model).values():
        layer.drop_scores_(first.get(layer.ticket_name))
        first.setdefault(layer.ticket_name, layer)
    real: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in real:
                    empty = torch.empty_like(parameter, device="cpu")
                    real[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = real[id(parameter)]
        for name, buffer in module._buffers.items():  # of norms that surgery has inserted
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    dtype = getattr(torch, ticket.dtype)
    return (
        model.to(dtype=dtype)
        if any(tensor.dtype != dtype for _, tensor in floats_of(model))
        else model
    )


def build(ticket: Ticket, path: str | Path, parameters: int) -> nn.Module:
    """The dense network that a file names.

    Raises:
        TicketMismatch: The file names no network, or one with many more than `parameters`.
    """
    architecture = ticket.architecture
    if architecture is None:
        raise TicketMismatch(
            f"{path} holds a ticket of a model that no registry knows; pass that model: "
            "mptify.load(path, model=...)."
        )
    try:
        entry = registry.resolve(str(architecture))
        _require_size(architecture, entry, path, parameters)
        return _without_weights(entry, architecture)
    except MptifyError:
        raise
    except Exception as error:  # any error of a builder about unusual arguments
        raise TicketMismatch(
            f"{path}: {architecture} can't be built with {architecture.arguments}: {error}."
        ) from error


def _without_weights(entry: registry.Entry, architecture: Architecture) -> nn.Module:
    """The network with its parameters on `meta`, unless its builder computes with their values."""
    blank = InitMode("blank")
    try:
        with blank:
            network = registry.build(entry, **architecture.arguments)
    except Exception:  # the builder needs weights; other errors recur below
        blank.read_blank = True
    if not blank.read_blank:
        return _emptied_parameters_(network)
    with InitMode():
        return registry.build(entry, **architecture.arguments)


def _emptied_parameters_(network: nn.Module) -> nn.Module:
    """Move parameters to `meta`, which takes no memory; shared ones stay shared."""
    empty: dict[int, nn.Parameter] = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in empty:
                    empty[id(parameter)] = nn.Parameter(
                        parameter.detach().to("meta"), requires_grad=parameter.requires_grad
                    )
                module._parameters[name] = empty[id(parameter)]
    return network


def _require_size(
    architecture: Architecture, entry: registry.Entry, path: str | Path, here: int
) -> None:
    """Refuse a small file that names a huge network, before allocating its memory."""
    try:
        with torch.device("meta"):
            network = registry.build(entry, **architecture.arguments)
    except (
        Exception
    ):  # torchvision's regnets and detectors can't be built there; wrong arguments fail later
        return
    there = sum(parameter.numel() for parameter in network.parameters())
    if there > 2 * here + (1 << 20):  # biases may have been dropped
        raise TicketMismatch(
            f"{path}: {entry} has {there:,} parameters, but the file describes {here:,}; it was "
            "not made from that network."
        )
