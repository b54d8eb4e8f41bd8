"""Check that a name fits the network of a ticket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mptify.errors import BadConfig, MptifyError, TicketMismatch, first_line, shown
from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.models.registry import Architecture
from mptify.nn.layers import Ticketed
from mptify.surgery.graphs import TicketGraph
from mptify.surgery.plans import plan_of

__all__ = ["architecture_named", "require_fit"]


def architecture_named(name: Any, arguments: Any = None) -> Architecture:
    """The architecture of a name, built with these arguments."""
    if not isinstance(name, str):
        raise BadConfig(f"architecture={shown(name)}: a name is needed, such as 'timm:resnet18'.")
    arguments = {} if arguments is None else arguments
    known = ("num_classes", "in_chans", "input_size")
    if not isinstance(arguments, Mapping) or not all(key in known for key in arguments):
        raise BadConfig(
            f"arguments={shown(arguments)}: a mapping is needed, of {', '.join(known)}."
        )
    entry = registry.resolve(name)
    return Architecture(entry.source, entry.name, dict(arguments))


def require_fit(model: nn.Module, architecture: Architecture) -> nn.Module:
    """The dense network of a name, on the meta device where possible.

    Raises:
        TicketMismatch: Its weights, or for timm and torchvision its class, are not those of the
            ticket model. (A ResNet of timm has the weights of torchvision's.)
    """
    built = _built(architecture)
    dense = _weights(built)
    for name, shape in _weights_of(model):
        found = [tuple(weight.shape) for key, weight in dense.items() if name in (key, _owner(key))]
        if shape not in found:
            _refuse(architecture, name, found[0] if found else None, shape)
    plan = plan_of(model)
    ours = (
        {layer.name for layer in plan.layers}
        | {layer.name for layer in plan.left_dense}
        | {*plan.dropped, *_weights(model)}
    )
    # Shared ones under any name.
    known = {id(weight) for name, weight in dense.items() if name in ours or _owner(name) in ours}
    for name, weight in dense.items():
        if id(weight) not in known:
            _refuse(architecture, name, tuple(weight.shape), None)
    kind, named = _class_of(model), f"{type(built).__module__}.{type(built).__qualname__}"
    if kind != named and kind.startswith(("timm.", "torchvision.")):
        raise TicketMismatch(
            f"architecture={str(architecture)!r}: that network is a {named}, and the model was a "
            f"{kind}."
        )
    return built


def _class_of(model: nn.Module) -> str:
    if isinstance(model, TicketGraph):
        return f"{model.original_module}.{model.original_name}"
    original = getattr(type(model), "original_type", type(model))
    return f"{original.__module__}.{original.__qualname__}"


def _weights_of(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The weights that tickets cover, and others of two or more dimensions."""
    yield from ((layer.name, layer.shape) for layer in plan_of(model).layers if not layer.tied_to)
    tickets = [module for module in model.modules() if isinstance(module, Ticketed)]
    # Graphs may hold them under a second name.
    own = {id(parameter) for module in tickets for parameter in module._parameters.values()}
    for name, weight in _weights(model).items():
        if id(weight) not in own:
            yield name, tuple(weight.shape)


def _weights(network: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of two or more dimensions, shared ones by every name."""
    found = network.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in found if parameter.dim() > 1}


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _built(architecture: Architecture) -> nn.Module:
    entry = registry.resolve(str(architecture))
    try:
        try:
            with torch.device("meta"):
                return registry.build(entry, **architecture.arguments)
        except MptifyError:
            raise
        except Exception:  # torchvision's regnets and detectors compute with their weights
            with InitMode("constant"):
                return registry.build(entry, **architecture.arguments)
    except MptifyError:
        raise
    except Exception as error:  # any error of a builder about unusual arguments
        raise BadConfig(
            f"{architecture} can't be built with {architecture.arguments}: {first_line(error)}."
        ) from error


def _refuse(
    architecture: Architecture,
    name: str,
    theirs: tuple[int, ...] | None,
    ours: tuple[int, ...] | None,
) -> None:
    given = (
        ", ".join(f"{key}={value}" for key, value in architecture.arguments.items())
        or "no arguments"
    )
    raise TicketMismatch(
        f"architecture={str(architecture)!r}: that network, built with {given}, is not the model: "
        f"its {name} is {_sizes(theirs)}, the model's {_sizes(ours)}; give its name and arguments, "
        "or no name."
    )


def _sizes(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape))
