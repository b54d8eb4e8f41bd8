"""Packed files: programs as the runtime holds them, memory-mapped, ready without decoding. Larger than a ticket, sooner to run.

A safetensors file. `kernel.NAME.BUFFER` are the kernels' own tensors, `state.NAME` those of what torch still does. The graph is not
stored: the network is built by its name, without weights, and the kernels take the places that their names say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, fx, nn

from mptify.errors import DamagedTicket, MptifyError, TicketMismatch
from mptify.files import as_path
from mptify.runtime.compiler import compiled
from mptify.runtime.describing import describe, restore, stored_kernels
from mptify.runtime.library import library
from mptify.surgery import ticket_layers
from mptify.ticket.building import build, emptied
from mptify.ticket.codec import (
    MOST_HEADER,
    MOST_WEIGHTS,
    WEIGHTS_PER_BYTE,
    Ticket,
    as_json,
    config_as_json,
    read_architecture,
    read_config,
    read_metadata,
)  # fmt: skip

__all__ = ["PackedFile", "is_packed", "open_packed", "packed_bytes", "program_in"]

KEY = "mptify_packed"
VERSION = 3
_KEYS = {"version", "architecture", "config", "dtype", "notes", "input", "parameters", "kernels", "shapes", "kept", "sha256"}


@dataclass(frozen=True)
class PackedFile:
    """An opened file. `ticket` says what it was made from, without masks and floats."""

    path: Path
    ticket: Ticket
    description: dict[str, Any]
    tensors: dict[str, Tensor]  # mapped, not read


# -- program -> file ---------------------------------------------------------------------------------------------------------


def packed_bytes(ticket: Ticket, program: nn.Module, model: fx.GraphModule, image: Tensor) -> bytes:
    """The file of a program that was compiled from a ticket's `model`, whose nodes know their shapes for such an image."""
    assert ticket.architecture is not None
    kernels = stored_kernels(program)
    tensors = {f"kernel.{name}.{buffer}": tensor for name, kernel in kernels.items() for buffer, tensor in kernel.state_dict().items()}
    tensors |= {f"state.{name}": tensor for name, tensor in program.state_dict().items() if ".kernels." not in name}
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}  # tied ones, each for itself
    shapes = {
        node.name: list(node.meta["tensor_meta"].shape) for node in model.graph.nodes if hasattr(node.meta.get("tensor_meta"), "shape")
    }
    description = {
        "version": VERSION,
        "architecture": vars(ticket.architecture),
        "config": config_as_json(ticket.config),
        "dtype": ticket.dtype,
        "notes": ticket.notes,
        "input": list(image.shape[1:]),
        "parameters": ticket.count + sum(value.size for value in ticket.floats.values()),
        "kernels": {name: describe(kernel) for name, kernel in kernels.items()},
        "shapes": shapes,
        "kept": {layer.ticket_name: layer.kept for layer in ticket_layers(program).values()},
    }
    description["sha256"] = _digest(description, tensors)
    return safetensors.torch.save(tensors, {KEY: as_json(description)})


def _digest(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Over the description, then each tensor's name, type, shape and bytes, by name."""
    whole = hashlib.sha256(as_json({key: value for key, value in description.items() if key != "sha256"}).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        data: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        whole.update(data)
    return whole.hexdigest()


# -- file -> program ---------------------------------------------------------------------------------------------------------


def is_packed(path: str | Path) -> bool:
    """Whether a file says that it is a packed one."""
    try:
        return KEY in read_metadata(_beginning(as_path(path)))
    except (OSError, DamagedTicket):
        return False


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), MOST_HEADER))


def open_packed(path: str | Path) -> PackedFile:
    """A packed file, checked: damaged ones are refused."""
    path = Path(path)
    try:
        description = read_metadata(_beginning(path)).get(KEY)
        if description is None:
            raise DamagedTicket("This is no packed file.")
        version = description.get("version")
        if version != VERSION:
            raise DamagedTicket(
                f"This packed file has format version {version}, and this mptify reads version {VERSION}; export the ticket again."
            )
        if set(description) != _KEYS:
            raise DamagedTicket(f"The file's description lacks or adds something: {sorted(set(description) ^ _KEYS)}.")
        with safetensors.safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if description["sha256"] != _digest(description, tensors):
            raise DamagedTicket("The file is damaged: what it holds is not what was written (its SHA-256 differs).")
        if description["dtype"] != "float32" or not isinstance(description["notes"], dict):
            raise DamagedTicket("The file's description has a type or notes that no packed file has.")
        ticket = Ticket(
            config=read_config(description["config"]), layers={}, architecture=read_architecture(description["architecture"]),
            dtype=description["dtype"], notes=description["notes"],
        )  # fmt: skip
    except OSError as error:
        raise MptifyError(f"{path}: can't be read ({error.strerror}).") from None
    except safetensors.SafetensorError:  # its header was read before: what follows is not what it says
        raise DamagedTicket(f"{path}: This packed file is cut short or damaged; export the ticket again.") from None
    except DamagedTicket as error:
        raise DamagedTicket(f"{path}: {error}") from None
    return PackedFile(path, ticket, description, tensors)


def program_in(file: PackedFile) -> nn.Module:
    """The program: its network is built without weights, and everything that is large stays in the mapped file."""
    if library is None:
        raise MptifyError(
            f"{file.path}: packed files need mptify's C++ library, and it was installed without a compiler; load the ticket instead."
        )
    try:
        kernels = {name: restore(kernel, _part(file, f"kernel.{name}."), name) for name, kernel in file.description["kernels"].items()}
    except (ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise DamagedTicket(f"{file.path}: {error}.") from None
    most = MOST_WEIGHTS + WEIGHTS_PER_BYTE * file.path.stat().st_size
    model = emptied(build(file.ticket, file.path, min(_whole(file.description["parameters"]), most)), file.ticket).eval()
    try:
        if not isinstance(model, fx.GraphModule):
            raise KeyError("it has no graph")
        for node in model.graph.nodes:
            shape = file.description["shapes"].get(node.name)
            node.meta["tensor_meta"] = SimpleNamespace(shape=torch.Size(shape or ()))
        program = compiled(model, kernels)
        if stored_kernels(program).keys() != kernels.keys():
            raise KeyError("some kernels found no place")
        _fill_(program, file)
    except DamagedTicket:
        raise
    except Exception as error:  # whatever a description that fits nothing leads to
        raise TicketMismatch(
            f"{file.path}: does not fit {file.ticket.architecture} as it is built here ({error}); "
            "it was made by another version of that network: export the ticket again."
        ) from None
    return program


def _fill_(program: nn.Module, file: PackedFile) -> None:
    state = _part(file, "state.", strip=True)
    missing = {name for name in program.state_dict() if ".kernels." not in name} ^ state.keys()
    if missing:
        raise KeyError(sorted(missing)[0])
    program.load_state_dict(state, strict=False, assign=True)
    for layer in ticket_layers(program).values():
        layer.kept = _whole(file.description["kept"][layer.ticket_name])


def _part(file: PackedFile, prefix: str, strip: bool = False) -> dict[str, Tensor]:
    """Tensors whose names begin so; of a kernel's, what is behind `kernel.`."""
    cut = len(prefix) if strip else len("kernel.")
    return {name[cut:]: tensor for name, tensor in file.tensors.items() if name.startswith(prefix)}


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise DamagedTicket(f"The file's description has {value!r} where a number should be.")
    return value
