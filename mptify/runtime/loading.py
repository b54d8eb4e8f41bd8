"""From a file to a network that runs: as float modules, or as a packed program."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from mptify.config import TicketConfig
from mptify.errors import BadConfig, DamagedTicket, MptifyError, TicketMismatch, first_line, shown
from mptify.models import registry
from mptify.nn.layers import Ticketed
from mptify.runtime.compiler import pack
from mptify.runtime.library import library
from mptify.runtime.packed_file import build_program, is_packed, open_packed, packed_bytes
from mptify.runtime.subgraphs import with_graphs
from mptify.surgery import ticket_layers
from mptify.surgery.plans import plan_of
from mptify.ticket.building import build, emptied
from mptify.ticket.codec import Ticket, TicketLayer
from mptify.ticket.state import fill_floats_, hold_, read, require_match, swap_

__all__ = ["as_packed_file", "example_of", "load"]


def load(
    path: str | Path,
    model: nn.Module | None = None,
    device: Any = "cpu",
    *,
    runtime: str | None = None,
    example: Any = None,
) -> nn.Module:
    """The ticket model in a file, in `eval()`; or its packed program.

    The layers hold the weights that they compute with, once, and no scores.

    Args:
        path: A ticket file, or a packed file (`mptify export --to packed`), which holds a program.
        model: A model of yours. It is converted as the file says; if it is a ticket model
            already, it is changed in place. Without it, the network that the file names is built.
        device: Where to put the model.
        runtime: "float", or "packed" for a packed program (see `pack`), made layer by layer.
        example: An input of the usual size for a packed program, if the file does not say it.

    Raises:
        BadConfig: The arguments contradict each other, or there is no such device.
        DamagedTicket: The file is not a ticket, or is damaged.
        TicketMismatch: The ticket and the model don't belong together.
    """
    if runtime not in (None, "float", "packed"):
        raise BadConfig(f"runtime={runtime!r}: there are 'float' and 'packed'.")
    _require_device(device)
    with torch.inference_mode(False):
        if is_packed(path):
            if model is not None or torch.device(device).type != "cpu" or runtime == "float":
                raise BadConfig(
                    f"{path} is a packed file: it takes no model, and runs on CPUs only and not "
                    "as float; load the ticket that it was made from."
                )
            return build_program(open_packed(path))
        if runtime == "packed" and library is not None:
            return _load_packed(read(path), path, model, device, example)
        found = _load(read(path), path, model, device)
        return pack(found, example) if runtime == "packed" else found  # warns: no compiler


def _require_device(device: Any) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch raises all three
        why = first_line(error)
        raise BadConfig(f"device={shown(device)}: there is no such device ({why}).") from None


def _load_packed(
    ticket: Ticket, path: str | Path, model: nn.Module | None, device: Any, example: Any
) -> nn.Module:
    """A packed program; a weight exists while its layer is packed."""
    if torch.device(device).type != "cpu":
        raise BadConfig(f"device={device!r}: packed programs run on CPUs.")
    if isinstance(model, nn.Module) and _is_ticketed(model):
        raise BadConfig(
            "runtime='packed' takes a dense model, or none; mptify.pack takes a ticket model."
        )
    model = emptied(_dense(ticket, path, model), ticket)
    _require(model, ticket, path)
    for layer in ticket_layers(model).values():
        found = ticket.layers[layer.ticket_name]
        layer.load_lazily_(partial(_effective, layer, found, ticket.config), found.gain, found.kept)
    fill_floats_(model, ticket)
    program = pack(model.eval(), _usual_arguments(ticket) if example is None else example)
    for layer in ticket_layers(program).values():  # those that stay float
        hold_(layer, ticket)
    return program


def as_packed_file(ticket: Ticket, model: nn.Module, image: Tensor) -> bytes:
    """The packed file of a ticket, optimized for images of this size.

    Args:
        ticket: The ticket.
        model: Its model in `eval()`, whose layers may have been given 8-bit inputs.
        image: An image.
    """
    if library is None:
        raise MptifyError("mptify was installed without a C++ compiler: it can't pack tickets.")
    bits = ticket.config.activation_bits
    layers = ticket_layers(model)
    rounded = [name for name, layer in layers.items() if layer.activation_bits != bits]
    graph = with_graphs(model)
    if not isinstance(graph, fx.GraphModule):
        raise MptifyError(
            f"{ticket.architecture}: only parts of this network have a graph; a packed file needs "
            "a graph of the whole network."
        )
    return packed_bytes(ticket, pack(graph, image), graph, image, rounded)


def _effective(layer: Any, found: TicketLayer, config: TicketConfig) -> Tensor:
    mask, weights = torch.from_numpy(found.mask), torch.from_numpy(found.weights(config))
    return layer.effective_weight(mask, weights)


def _usual_arguments(ticket: Ticket) -> Any:
    """An example of all arguments that the ticket's network takes."""
    image = example_of(ticket)
    if image is not None or ticket.architecture is None:
        return image
    arguments = registry.example_inputs(registry.resolve(str(ticket.architecture)), nn.Identity())
    takes_targets = isinstance(arguments[0], list)  # a detector, in training
    return arguments[:1] if takes_targets else arguments


def example_of(ticket: Ticket) -> Tensor | None:
    """An image of the size that the ticket was searched on, or that its network is built for.

    None if the network does not take one image.
    """
    seen, built = ticket.notes.get("input"), ticket.architecture
    if isinstance(seen, dict) and "shape" in seen:
        return torch.zeros(1, *_sizes(seen["shape"]))
    if built is None:
        return None
    entry, arguments = registry.resolve(str(built)), built.arguments
    with torch.device("meta"):
        network = registry.build(entry, **arguments) if entry.source == "timm" else nn.Identity()
    size, channels = arguments.get("input_size"), arguments.get("in_chans", 3)
    image, *more = registry.example_inputs(entry, network, size, channels)
    return torch.zeros(1, *image.shape[1:]) if isinstance(image, Tensor) and not more else None


def _sizes(shape: Any) -> list[int]:
    is_list = isinstance(shape, list) and len(shape) > 0
    if is_list and all(type(size) is int and 0 < size <= _MAX_PIXELS for size in shape):
        return shape
    raise DamagedTicket(f"The ticket's notes give its images a shape of {shown(shape)}.")


_MAX_PIXELS = 1 << 14


def _load(ticket: Ticket, path: str | Path, model: nn.Module | None, device: Any) -> nn.Module:
    by_name = model is None
    model = _dense(ticket, path, model)
    if not _is_ticketed(model):
        model = emptied(model, ticket)
    _require(model, ticket, path)
    swap_(model, ticket)
    plan_of(model).architecture = ticket.architecture if by_name else None
    return (model if torch.device(device).type == "cpu" else model.to(device)).eval()


def _dense(ticket: Ticket, path: str | Path, model: nn.Module | None) -> nn.Module:
    """The caller's model, or the one that the file names."""
    if model is None:
        floats = sum(value.size for value in ticket.floats.values())
        return build(ticket, path, ticket.count + floats)
    if not isinstance(model, nn.Module):
        raise TicketMismatch(f"{path} can be loaded into a module, not into {shown(model)}.")
    return model


def _require(model: nn.Module, ticket: Ticket, path: str | Path) -> None:
    try:
        require_match(model, ticket)
    except TicketMismatch as error:
        hint = f"`mptify inspect {path}` shows which model the ticket was made from."
        raise TicketMismatch(f"{error} {hint}") from None


def _is_ticketed(model: nn.Module) -> bool:
    return any(isinstance(module, Ticketed) for module in model.modules())
