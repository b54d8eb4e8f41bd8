"""From a file to a network that runs: built by name, without weights of its own, and filled; or packed, layer by layer."""

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
from mptify.runtime.packed_file import is_packed, open_packed, packed_bytes, program_in
from mptify.surgery import ticket_layers
from mptify.surgery.plan import plan_of
from mptify.ticket.building import build, emptied
from mptify.ticket.codec import Ticket, TicketLayer
from mptify.ticket.state import fill_floats_, hold_, read, require_match, swap_

__all__ = ["as_packed_file", "example_of", "load"]


def load(
    path: str | Path, model: nn.Module | None = None, device: Any = "cpu", *, runtime: str | None = None, example: Any = None
) -> nn.Module:
    """The ticket model in a file, in `eval()`; with `runtime="packed"` its packed program (see `pack`), made layer by layer.

    Of a packed file, which `mptify export --to packed` writes, the program in it.

    Without `model`, the network is built by the name that the file gives, from torchvision's or timm's registry. A `model`
    of yours is converted as the file says, or, where it is a ticket model already, changed in place.
    Unless it was one, its layers hold the weights that they compute with, once, and no scores. `example` is an input of the size that
    a packed program will be used with, if the file does not say it.
    """
    if runtime not in (None, "float", "packed"):
        raise BadConfig(f"runtime={runtime!r}: there are 'float' and 'packed'.")
    _require_device(device)
    with torch.inference_mode(False):
        if is_packed(path):
            if model is not None or torch.device(device).type != "cpu" or runtime == "float":
                only = "it takes no model, and runs on CPUs only and not as float"
                raise BadConfig(f"{path} is a packed file: {only}; load the ticket that it was made of.")
            return program_in(open_packed(path))
        if runtime == "packed" and library is not None:
            return _load_packed(read(path), path, model, device, example)[0]
        found = _load(read(path), path, model, device)
        return pack(found, example) if runtime == "packed" else found  # which says that there is no compiler


def _require_device(device: Any) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # the second from builds of torch that know no such device
        raise BadConfig(f"device={shown(device)}: there is no such device ({first_line(error)}).") from None


def _load_packed(ticket: Ticket, path: str | Path, model: nn.Module | None, device: Any, example: Any) -> tuple[nn.Module, nn.Module]:
    """A program, layer by layer: each weight is there while its layer is packed, and no longer; and the model that it was made from."""
    if torch.device(device).type != "cpu":
        raise BadConfig(f"device={device!r}: packed programs run on CPUs.")
    if isinstance(model, nn.Module) and any(isinstance(part, Ticketed) for part in model.modules()):
        raise BadConfig("A packed program is made from a dense model of yours, or from the file alone; mptify.pack takes a ticket model.")
    model = emptied(_dense(ticket, path, model), ticket)
    _require(model, ticket, path)
    for layer in ticket_layers(model).values():
        found = ticket.layers[layer.ticket_name]
        layer.load_lazily_(partial(_effective, layer, found, ticket.config), found.gain, found.kept)
    fill_floats_(model, ticket)
    program = pack(model.eval(), _usual_arguments(ticket) if example is None else example)
    for layer in ticket_layers(program).values():  # what stays float
        hold_(layer, ticket)
    return program, model


def as_packed_file(ticket: Ticket, path: str | Path, image: Tensor) -> bytes:
    """The packed file of a ticket, for such images first of all."""
    if library is None:
        raise MptifyError("mptify was installed without a C++ compiler: there is nothing to make packed files with.")
    program, model = _load_packed(ticket, path, None, "cpu", image)
    if not isinstance(model, fx.GraphModule):
        raise MptifyError(f"{ticket.architecture}: only parts of this network have a graph, and packed files hold whole ones.")
    return packed_bytes(ticket, program, model, image)


def _effective(layer: Any, found: TicketLayer, config: TicketConfig) -> Tensor:
    return layer.effective_weight(torch.from_numpy(found.mask), torch.from_numpy(found.weights(config)))


def _usual_arguments(ticket: Ticket) -> Any:
    """All that the ticket's network takes, for an example."""
    image = example_of(ticket)
    if image is not None or ticket.architecture is None:
        return image
    arguments = registry.example_inputs(registry.resolve(str(ticket.architecture)), nn.Identity())
    return arguments[:1] if isinstance(arguments[0], list) else arguments  # a detector's targets are for training


def example_of(ticket: Ticket) -> Tensor | None:
    """An image of the size that the ticket was searched on, or that its network is built for; None where it takes something else."""
    seen, built = ticket.notes.get("input"), ticket.architecture
    if isinstance(seen, dict) and "shape" in seen:
        return torch.zeros(1, *_sizes(seen["shape"]))
    if built is None:
        return None
    entry, arguments = registry.resolve(str(built)), built.arguments
    with torch.device("meta"):
        network = registry.build(entry, **arguments) if entry.source == "timm" else nn.Identity()
    image, *more = registry.example_inputs(entry, network, arguments.get("input_size"), arguments.get("in_chans", 3))
    return torch.zeros(1, *image.shape[1:]) if isinstance(image, Tensor) and not more else None


def _sizes(shape: Any) -> list[int]:
    if isinstance(shape, list) and shape and all(type(size) is int and 0 < size <= _MOST_PIXELS for size in shape):
        return shape
    raise DamagedTicket(f"The ticket's notes say of its images that their shape is {shown(shape)}, which is none.")


_MOST_PIXELS = 1 << 14


def _load(ticket: Ticket, path: str | Path, model: nn.Module | None, device: Any) -> nn.Module:
    by_name = model is None
    model = _dense(ticket, path, model)
    if not any(isinstance(part, Ticketed) for part in model.modules()):
        model = emptied(model, ticket)
    _require(model, ticket, path)
    swap_(model, ticket)
    plan_of(model).architecture = ticket.architecture if by_name else None
    return (model if torch.device(device).type == "cpu" else model.to(device)).eval()


def _dense(ticket: Ticket, path: str | Path, model: nn.Module | None) -> nn.Module:
    """The caller's model, or the one that the file names."""
    if model is None:
        return build(ticket, path, ticket.count + sum(value.size for value in ticket.floats.values()))
    if not isinstance(model, nn.Module):
        raise TicketMismatch(f"{path} is to be loaded into a module, not into {shown(model)}.")
    return model


def _require(model: nn.Module, ticket: Ticket, path: str | Path) -> None:
    try:
        require_match(model, ticket)
    except TicketMismatch as error:
        raise TicketMismatch(f"{error} `mptify inspect {path}` shows what the ticket was cut from.") from None
