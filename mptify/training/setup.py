"""Set up a search: build its network, and check that the images fit it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from mptify.config import Recipe, SearchConfig
from mptify.errors import BadConfig, BadData, MptifyError, TicketMismatch, first_line
from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.models.registry import Architecture
from mptify.registry import methods
from mptify.surgery import ticket_layers
from mptify.ticket.codec import Ticket
from mptify.ticket.state import read, require_match
from mptify.training.data import Images, first_images, sizes
from mptify.training.evaluation import evaluating, logits_of

__all__ = [
    "architecture_of",
    "begin_with_",
    "build_network",
    "classes_of",
    "matching_architecture",
    "require_images_fit",
    "start_from_",
]


def architecture_of(entry: registry.Entry, images: Images) -> Architecture:
    """The named network, built for these images."""
    shape = images.shape()
    arguments = {"num_classes": images.classes, "input_size": shape[-1]} | (
        {} if shape[0] == 3 else {"in_chans": shape[0]}
    )
    return Architecture(entry.source, entry.name, arguments)


def matching_architecture(
    name: str, network: nn.Module, images: Images, config: SearchConfig, device: Any
) -> Architecture:
    """The architecture of `name`, if it builds `network`.

    Raises:
        BadConfig: It builds another network.
    """
    entry = registry.resolve(name)
    plain = architecture_of(entry, images)
    built = Architecture(
        entry.source,
        entry.name,
        plain.arguments | {"num_classes": classes_of(network, images, device)},
    )
    given = ", ".join(f"{key}={value}" for key, value in built.arguments.items())
    try:
        with InitMode():
            other = methods[config.method]().prepare(
                registry.build(entry, **built.arguments), config
            )
    except MptifyError:
        raise
    except Exception as error:  # any error of a builder about unusual sizes
        raise BadConfig(
            f"architecture={name!r}: that network can't be built for {given}: {first_line(error)}."
        ) from error
    ours, theirs = (
        {key: tuple(value.shape) for key, value in one.state_dict().items()}
        for one in (network, other)
    )
    differ = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if differ:
        first = differ[0]
        raise BadConfig(
            f"architecture={name!r}: that network, built for {given}, is not the model: "
            f"its {first} is {_shape(theirs.get(first))}, the model's {_shape(ours.get(first))}."
        )
    return built


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else sizes(shape) or "one number"


def build_network(architecture: Architecture, recipe: Recipe) -> nn.Module:
    """Build the dense network of a recipe, from its seed."""
    with InitMode(seed=recipe.ticket.seed):
        try:
            return registry.build(registry.resolve(str(architecture)), **architecture.arguments)
        except MptifyError:
            raise
        except Exception as error:  # any error of a builder about unusual sizes
            raise BadConfig(
                f"{architecture} can't be built with {architecture.arguments}: {first_line(error)}."
            ) from error


def start_from_(model: nn.Module, path: str) -> None:
    """Start a fresh ticket model from the ticket in a file.

    Raises:
        TicketMismatch: The ticket is not one of this network.
    """
    try:
        begin_with_(model, read(path))
    except TicketMismatch as error:
        raise TicketMismatch(f"{path} does not fit the network for these images: {error}") from None


def begin_with_(model: nn.Module, ticket: Ticket) -> None:
    """Start a fresh ticket model from a ticket's masks and floats.

    Survivors get the largest magnitudes of the initial scores.
    """
    require_match(model, ticket)
    layers = list({one.ticket_name: one for one in ticket_layers(model).values()}.values())
    for layer in layers:
        _require_same_weights(layer, ticket)
    together = (
        [layers]
        if any(layer.scope is not None for layer in layers)
        else [[layer] for layer in layers]
    )
    with torch.no_grad():
        for some in together:  # layers that are ranked together
            scores = torch.cat([layer.scores.reshape(-1) for layer in some])
            mask = torch.cat(
                [
                    torch.from_numpy(ticket.layers[layer.ticket_name].mask).reshape(-1)
                    for layer in some
                ]
            )
            magnitudes = scores.abs().sort(descending=True).values
            order = (scores.abs() + 2 * mask * magnitudes[0]).argsort(descending=True, stable=True)
            ranked = torch.empty_like(scores)
            ranked[order] = magnitudes
            parts = torch.copysign(ranked, scores).split([layer.count for layer in some])
            for layer, part in zip(some, parts, strict=True):
                layer.scores.copy_(part.reshape(layer.scores.shape))
        state = model.state_dict()
        for name, value in ticket.floats.items():
            state[name].copy_(torch.from_numpy(value.copy()))


def _require_same_weights(layer: Any, ticket: Ticket) -> None:
    """Raise if the ticket's survivors are not weights of this network."""
    stored = ticket.layers[layer.ticket_name]
    frozen = layer.frozen.detach().cpu().numpy()[stored.mask]
    other_signs = stored.signs is not None and (np.signbit(frozen) != stored.signs).any()
    if other_signs or (stored.values is not None and (frozen != stored.values).any()):
        raise TicketMismatch(
            f"{layer.ticket_name}: the ticket has other weights than this network starts with, and "
            "its file holds only the survivors; "
            "a search cannot continue from this ticket."
        )


def require_images_fit(network: nn.Module, images: Images, device: Any) -> None:
    """Raise `BadData` if the images do not fit the network."""
    classes = classes_of(network, images, device)
    if classes < images.classes:
        raise BadData(f"The data has {images.classes} classes, but the network has only {classes}.")


def classes_of(network: nn.Module, images: Images, device: Any) -> int:
    """How many classes the network has.

    Raises:
        BadData: It cannot take such images.
    """
    sample = first_images(images, 2, device)
    with evaluating(network):
        try:
            logits = logits_of(network(sample))
        except MptifyError:
            raise
        except Exception as error:  # any error of torch about a wrong shape
            raise BadData(
                f"The network can't take images of {sizes(tuple(sample.shape[1:]))}: "
                f"{first_line(error)}."
            ) from error
    return logits.shape[1]
