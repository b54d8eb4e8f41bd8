"""Packed files: programs as the runtime holds them, mapped into memory and ready to run.

A packed file is a safetensors file. `kernel.NAME.BUFFER` are the buffers of kernels, `state.NAME`
the tensors of what torch runs, and of the quantizers that the compiler replaces. The graph is not
stored: the network is built by its name, without weights, and compiled with the kernels in place of
the layers that their names say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, fx, nn

from mptify.errors import BadConfig, DamagedTicket, MptifyError, TicketMismatch
from mptify.files import as_path
from mptify.nn.quantizers import Quantizer, RunningQuantizer
from mptify.runtime.calibration import round_inputs_
from mptify.runtime.compiler import compile_graph
from mptify.runtime.kernel import Kernel
from mptify.runtime.library import library
from mptify.runtime.serialize import deserialize, serialize, stored_kernels
from mptify.runtime.subgraphs import with_graphs
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
)

__all__ = ["PackedFile", "build_program", "is_packed", "open_packed", "packed_bytes"]

KEY = "mptify_packed"
VERSION = 5
_KEYS = {
    "version",
    "architecture",
    "config",
    "dtype",
    "notes",
    "rounded",
    "input",
    "parameters",
    "kernels",
    "shapes",
    "kept",
    "sha256",
}


@dataclass(frozen=True)
class PackedFile:
    """An opened file.

    Attributes:
        ticket: What the file was made from, without masks and floats.
        tensors: Mapped into memory, not read.
    """

    path: Path
    ticket: Ticket
    description: dict[str, Any]
    tensors: dict[str, Tensor]


# -- writing -----------------------------------------------------------------------------------


def packed_bytes(
    ticket: Ticket,
    program: nn.Module,
    model: fx.GraphModule,
    image: Tensor,
    rounded: Sequence[str] = (),
) -> bytes:
    """The file of a program.

    Args:
        ticket: The ticket.
        program: The program that was compiled from the ticket's `model`.
        model: The ticket model, whose nodes know their shapes for `image`.
        image: An image of the usual size.
        rounded: The layers that were given 8-bit inputs after the search.
    """
    assert ticket.architecture is not None
    kernels = stored_kernels(program)
    tensors = {
        f"kernel.{name}.{buffer}": tensor
        for name, (_, kernel) in kernels.items()
        for buffer, tensor in kernel.state_dict().items()
    }
    state = _quantizer_state(model) | _state(program, kernels)
    tensors |= {f"state.{name}": tensor for name, tensor in state.items()}
    # Tensors that share memory are stored one by one.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    shapes = {
        node.name: list(node.meta["tensor_meta"].shape)
        for node in model.graph.nodes
        if hasattr(node.meta.get("tensor_meta"), "shape")
    }
    floats = sum(value.size for value in ticket.floats.values())
    description = {
        "version": VERSION,
        "architecture": vars(ticket.architecture),
        "config": config_as_json(ticket.config),
        "dtype": ticket.dtype,
        "notes": ticket.notes,
        "rounded": list(rounded),
        "input": list(image.shape[1:]),
        "parameters": ticket.count + floats,
        "kernels": {name: serialize(kernel) for name, (_, kernel) in kernels.items()},
        "shapes": shapes,
        "kept": {layer.ticket_name: layer.kept for layer in ticket_layers(program).values()},
    }
    description["sha256"] = _digest(description, tensors)
    return safetensors.torch.save(tensors, {KEY: as_json(description)})


def _digest(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Over the description, then each tensor's name, type, shape and bytes, sorted by name."""
    rest = {key: value for key, value in description.items() if key != "sha256"}
    digest = hashlib.sha256(as_json(rest).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        data: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        digest.update(data)
    return digest.hexdigest()


def _state(program: nn.Module, kernels: Mapping[str, tuple[str, Kernel]]) -> dict[str, Tensor]:
    """The tensors of everything but the kernels."""
    prefixes = tuple(f"{path}." for path, _ in kernels.values())
    return {
        name: tensor
        for name, tensor in program.state_dict().items()
        if not name.startswith(prefixes)
    }


def _quantizer_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of quantizers, by which the compiler decides what is levels."""
    return {
        f"{path}.{name}": tensor
        for path, module in model.named_modules()
        if isinstance(module, (Quantizer, RunningQuantizer))
        for name, tensor in module.state_dict().items()
    }


# -- reading -----------------------------------------------------------------------------------


def is_packed(path: str | Path) -> bool:
    """Whether a file says that it is a packed file."""
    try:
        return KEY in read_metadata(_header(as_path(path)))
    except (OSError, DamagedTicket):
        return False


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), MOST_HEADER))


def open_packed(path: str | Path) -> PackedFile:
    """Open and check a packed file.

    Raises:
        DamagedTicket: It is damaged, not a packed file, or one of another version.
        MptifyError: It can't be read.
    """
    path = Path(path)
    try:
        description = _require_version(read_metadata(_header(path)).get(KEY))
        with safetensors.safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if description["sha256"] != _digest(description, tensors):
            raise DamagedTicket("The file is damaged: its SHA-256 is not the one it names.")
        if description["dtype"] != "float32" or not isinstance(description["notes"], dict):
            raise DamagedTicket("The file's description has a type or notes that none can have.")
        ticket = Ticket(
            config=read_config(description["config"]),
            layers={},
            architecture=read_architecture(description["architecture"]),
            dtype=description["dtype"],
            notes=description["notes"],
        )
    except OSError as error:
        raise MptifyError(f"{path}: can't be read ({error.strerror}).") from None
    except safetensors.SafetensorError:  # the header was fine: what follows it is not
        raise DamagedTicket(
            f"{path}: This packed file is cut short or damaged; export the ticket again."
        ) from None
    except DamagedTicket as error:
        raise DamagedTicket(f"{path}: {error}") from None
    return PackedFile(path, ticket, description, tensors)


def _require_version(description: dict[str, Any] | None) -> dict[str, Any]:
    if description is None:
        raise DamagedTicket("This is not a packed file.")
    version = description.get("version")
    if version != VERSION:
        raise DamagedTicket(
            f"This packed file has format version {version}, but this mptify reads version "
            f"{VERSION}; make it again: `mptify export TICKET --to packed`."
        )
    if set(description) != _KEYS:
        differing = ", ".join(sorted(set(description) ^ _KEYS))
        raise DamagedTicket(f"The file's description lacks or adds {differing}.")
    return description


def build_program(file: PackedFile) -> nn.Module:
    """The program of a file. Everything large stays in the mapped file.

    Raises:
        DamagedTicket: The file describes what no kernel can be.
        TicketMismatch: It does not fit the network as this installation builds it.
        MptifyError: mptify was installed without a compiler, or lacks a kernel of the file.
    """
    if library is None:
        raise MptifyError(
            f"{file.path}: packed files need mptify's C++ library, but mptify was installed "
            "without a compiler; load the ticket instead."
        )
    kernels = _read_kernels(file)
    limit = MOST_WEIGHTS + WEIGHTS_PER_BYTE * file.path.stat().st_size
    parameters = min(_count(file.description["parameters"]), limit)
    model = emptied(build(file.ticket, file.path, parameters), file.ticket)
    try:
        round_inputs_(model, file.description["rounded"])
        model = with_graphs(model.eval())
        if not isinstance(model, fx.GraphModule):
            raise KeyError("it has no graph")
        state = _fill_(model, file)
        for node in model.graph.nodes:
            shape = file.description["shapes"].get(node.name)
            node.meta["tensor_meta"] = SimpleNamespace(shape=torch.Size(shape or ()))
        program = compile_graph(model, kernels)
        placed = stored_kernels(program)
        if placed.keys() != kernels.keys():
            unplaced = sorted(kernels.keys() ^ placed.keys())
            raise KeyError(f"the network has no layer for {unplaced[0]}")
        _require_state(state, model, program, placed)
        for layer in ticket_layers(program).values():
            layer.kept = _count(file.description["kept"][layer.ticket_name])
    except DamagedTicket:
        raise
    except Exception as error:  # whatever a description that does not fit leads to
        raise TicketMismatch(
            f"{file.path}: does not fit {file.ticket.architecture} as it is built here ({error}). "
            "It was made with another version of that network: export the ticket again."
        ) from None
    return program


def _read_kernels(file: PackedFile) -> dict[str, Kernel]:
    prefix = "kernel."
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in file.tensors.items()
        if name.startswith(prefix)
    }
    try:
        described = file.description["kernels"].items()
        return {name: deserialize(kernel, tensors, name) for name, kernel in described}
    except BadConfig as error:
        raise MptifyError(
            f"{file.path}: {error} If a package of yours registers it, import that package first, "
            "or name it: mptify --plugin PACKAGE."
        ) from None
    except (ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise DamagedTicket(f"{file.path}: {error}.") from None


def _fill_(model: nn.Module, file: PackedFile) -> set[str]:
    """Set what the program takes over from the model; returns the names of these tensors."""
    prefix = "state."
    state = {
        name.removeprefix(prefix): tensor
        for name, tensor in file.tensors.items()
        if name.startswith(prefix)
    }
    expected = model.state_dict()
    for name, tensor in state.items():
        if (tensor.dtype, tensor.shape) != (expected[name].dtype, expected[name].shape):
            raise KeyError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}")
    model.load_state_dict(state, strict=False, assign=True)
    return set(state)


def _require_state(
    found: set[str], model: nn.Module, program: nn.Module, placed: Mapping[str, tuple[str, Kernel]]
) -> None:
    """Raise unless the file has all tensors of a program that its kernels lack, and no others."""
    differing = (_quantizer_state(model).keys() | _state(program, placed).keys()) ^ found
    if differing:
        raise KeyError(sorted(differing)[0])


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise DamagedTicket(f"The file's description has {value!r} where a count should be.")
    return value
