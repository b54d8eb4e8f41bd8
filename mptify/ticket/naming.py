"""Whether a ticket model is the network that a name stands for."""

from __future__ import annotations

import torch
from torch import nn

from mptify import catalog
from mptify.errors import BadSpec, MptifyError, first_line
from mptify.init_mode import InitMode
from mptify.layers import Ticketed, TicketParameter
from mptify.surgery.graphs import TicketGraph
from mptify.surgery.trace import join
from mptify.ticket.format import Architecture

__all__ = ["require_named"]


def require_named(model: nn.Module, architecture: Architecture) -> None:
    """Raise `BadSpec`, saying where, unless the weights of `model` are those of the network that `architecture` names."""
    given = "".join(f", {key}={value}" for key, value in architecture.arguments.items())
    named = _built(architecture, given)
    ours, theirs, every = _weights_of_ticket_model(model), _weights(named), _weights(named, remove_duplicate=False)
    layers = {name.rpartition(".")[0] for name in ours}  # a layer may have folded further tensors into its weight
    expected = {name for name in theirs if name in ours or name.rpartition(".")[0] not in layers}
    differ = next((name for name in sorted(ours.keys() | expected) if ours.get(name) != every.get(name)), None)
    if differ is not None:
        raise BadSpec(
            f"architecture={str(architecture)!r}{given}: {differ} is {_in_words(every.get(differ))} there and "
            f"{_in_words(ours.get(differ))} in this model; name the network that it was made of, with the arguments="
            "{'num_classes': ...} that it was built with, or none."
        )
    kind, other = _class_of(model), f"{type(named).__module__}.{type(named).__qualname__}"
    if kind != other and kind.startswith(("timm.", "torchvision.")):
        raise BadSpec(f"architecture={str(architecture)!r}: that is a {other}, and this model was a {kind}.")


def _built(architecture: Architecture, given: str) -> nn.Module:
    entry = catalog.resolve(str(architecture))
    try:
        try:
            with torch.device("meta"):
                return catalog.build(entry, **architecture.arguments)
        except Exception:  # builders that compute with their weights; a wrong argument is wrong again below
            with InitMode():
                return catalog.build(entry, **architecture.arguments)
    except MptifyError:
        raise
    except Exception as error:  # whatever a builder makes of its arguments
        raise BadSpec(f"architecture={str(architecture)!r}{given}: can't be built: {first_line(error)}.") from None


def _weights(network: nn.Module, remove_duplicate: bool = True) -> dict[str, tuple[int, ...]]:
    named = network.named_parameters(remove_duplicate=remove_duplicate)
    return {name: tuple(one.shape) for name, one in named if one.dim() > 1}


def _weights_of_ticket_model(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The same of the network that `model` was made of."""
    weights: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        if isinstance(module, TicketParameter):
            weights[path.removesuffix("_ticket")] = tuple(module.frozen.shape)
        elif isinstance(module, Ticketed):
            weights[f"{path}.{module._weight_name}"] = tuple(module.frozen.shape)
        else:
            weights |= {join(path, name): tuple(one.shape) for name, one in module.named_parameters(recurse=False) if one.dim() > 1}
    return weights


def _class_of(model: nn.Module) -> str:
    if isinstance(model, TicketGraph):
        return f"{model.original_module}.{model.original_name}"
    original = getattr(type(model), "original_type", type(model))
    return f"{original.__module__}.{original.__qualname__}"


def _in_words(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape))
