"""Take the ticket of a model, and put a ticket into a model; read and write files.

A loaded network holds each weight once, without scores. `swap_` puts a ticket into a ticket model
that has scores: weights become ± the stored gain, and scores 1 for survivors and 0 elsewhere. The
usual arithmetic then gives the same mask, gain and effective weight, bit for bit. Neither draws
magnitudes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mptify.config import TicketConfig
from mptify.errors import BadConfig, DamagedTicket, MptifyError, TicketMismatch, shown
from mptify.files import as_path, write_whole
from mptify.models.recognition import structure_digest
from mptify.models.registry import Architecture
from mptify.nn.layers import Ticketed
from mptify.nn.quantizers import Quantizer, Sign
from mptify.surgery import ticket_layers
from mptify.surgery.plans import plan_of
from mptify.surgery.trainable import let_train_
from mptify.ticket.codec import Ticket, TicketLayer, as_json, from_bytes, to_bytes
from mptify.ticket.fit import architecture_named, require_fit

__all__ = [
    "fill_floats_",
    "floats_of",
    "hold_",
    "read",
    "read_both",
    "require_match",
    "save",
    "swap_",
    "ticket_of",
    "write",
]


# -- model -> ticket -------------------------------------------------------------------------------


def ticket_of(
    model: nn.Module,
    *,
    architecture: Architecture | None = None,
    standalone: bool = False,
    float16: bool = False,
    notes: dict[str, Any] | None = None,
) -> Ticket:
    """The ticket of a ticket model: everything but the scores.

    Args:
        model: A ticket model, or one wrapped as `save` accepts it.
        architecture: How to build the dense network.
        standalone: Whether to store the survivors' signs even if the seed determines them.
        float16: Whether to store other floats in 16 bits, at a loss.
        notes: Further information, as JSON values.

    Raises:
        BadConfig: An argument is invalid, or the model's floats cannot be stored.
        MptifyError: The model has lost ticket layers.
    """
    if architecture is not None and not isinstance(architecture, Architecture):
        raise BadConfig(
            f"architecture={shown(architecture)}: an Architecture is needed; mptify.save takes "
            "names."
        )
    model = _unwrapped(model)
    config = plan_of(model).config
    _require_whole(model)
    layers = {
        name: _ticket_layer(layer, config, standalone) for name, layer in _own_layers(model).items()
    }
    dtype = _one_type(model)
    kind = np.float16 if float16 else np.float64 if dtype == torch.float64 else np.float32
    _check_notes(notes)
    return Ticket(
        config=config,
        layers=layers,
        floats={name: _as_array(name, tensor, kind) for name, tensor in floats_of(model)},
        architecture=architecture,
        dtype=str(dtype).removeprefix("torch."),
        constants=_constants(model),
        notes=notes or {},
    )


def _unwrapped(model: Any) -> Any:
    """The ticket model inside DataParallel, DistributedDataParallel, torch.compile or Lightning."""
    if not isinstance(model, nn.Module) or "ticket_plan" in vars(model):
        return model
    inside = [part for part in model.modules() if "ticket_plan" in vars(part)]
    return inside[0] if len(inside) == 1 else model


def _require_whole(model: nn.Module) -> None:
    """Raise unless the model has all layers of its plan; packed programs, for instance, do not."""
    lost = sorted({layer.name for layer in plan_of(model).layers} - set(ticket_layers(model)))
    if lost:
        more = f" and {len(lost) - 1} others" if len(lost) > 1 else ""
        raise MptifyError(
            f"The model has lost the ticket layer {lost[0]}{more}, so its ticket can't be saved; "
            "save the ticket model that a packed program was made from, or transform the network "
            "after changing its layers."
        )


def _one_type(model: nn.Module) -> torch.dtype:
    found = {layer.compute_dtype: name for name, layer in _own_layers(model).items()}
    found = {tensor.dtype: name for name, tensor in floats_of(model)} | found
    if len(found) > 1:
        mixed = ", ".join(f"{name}: {dtype}" for dtype, name in found.items())
        raise BadConfig(f"A ticket's network must compute in one dtype, and this one has {mixed}.")
    return next(iter(found))


def _check_notes(notes: dict[str, Any] | None) -> None:
    try:
        as_json(notes or {}).encode()
    except (TypeError, ValueError) as error:
        raise BadConfig(f"notes can't be written as JSON: {error}.") from None


def _own_layers(model: nn.Module) -> dict[str, Any]:
    """By name, each once; tied layers share scores."""
    return {layer.ticket_name: layer for layer in ticket_layers(model).values()}


def _ticket_layer(layer: Any, config: TicketConfig, standalone: bool) -> TicketLayer:
    """The survivors of a layer; signs and values only where the seed does not determine them."""
    mask = layer.mask.cpu().numpy()
    survivors = layer.survivor_values().cpu().numpy()
    gain = float(layer.gain) if layer.weight_bits == 1 else layer.init_std
    if not standalone and config.init != "keep":
        drawn = TicketLayer(layer.ticket_name, mask, gain)
        if layer.weight_bits == 1:
            differ = drawn.negative(config.seed)[mask] != np.signbit(survivors)
        else:
            differ = drawn.weights(config)[mask] != survivors
        if not differ.any():
            return drawn
    if layer.weight_bits == 32:
        return TicketLayer(layer.ticket_name, mask, values=survivors)
    return TicketLayer(layer.ticket_name, mask, gain, signs=np.signbit(survivors))


def _as_array(name: str, tensor: Tensor, kind: Any) -> np.ndarray:
    wide = (
        tensor.detach()
        .to(device="cpu", dtype=torch.float64 if kind is np.float64 else torch.float32)
        .numpy()
    )
    with np.errstate(over="ignore"):
        array = wide.astype(kind)
    if not np.array_equal(np.isfinite(array), np.isfinite(wide)):
        raise BadConfig(f"{name}: holds numbers too large for 16 bits; save it without float16.")
    return array


def floats_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All floats besides weights and scores: learned ones, statistics, and dense layers."""
    seen: set[int] = set()
    for name, tensor in _state(model):
        if tensor.is_complex():
            raise BadConfig(f"{name}: complex numbers have no place in a ticket yet.")
        if tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        own = (
            ("scores", "frozen", "fixed_weight", "fixed_gain")
            if isinstance(module, Ticketed)
            else ()
        )
        for store, left_out in (
            (module._parameters, own),
            (module._buffers, {*own, *module._non_persistent_buffers_set}),
        ):
            for name, tensor in store.items():
                if tensor is not None and name not in left_out:
                    yield f"{path}.{name}" if path else name, tensor


def _constants(model: nn.Module) -> str:
    """SHA-256 of the integer buffers with several elements: the architecture's index tables."""
    whole, any_of_them = hashlib.sha256(), False
    for name, tensor in _state(model):
        if not tensor.is_floating_point() and tensor.numel() > 1:  # single elements are counters
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            whole.update(tensor.detach().cpu().contiguous().numpy().tobytes())
            any_of_them = True
    return whole.hexdigest() if any_of_them else ""


# -- ticket -> model -------------------------------------------------------------------------------


def swap_(model: nn.Module, ticket: Ticket | str | Path) -> nn.Module:
    """Put a ticket into a ticket model, in place.

    The model takes over the ticket's settings. A scope that its layers share is dropped.

    Args:
        model: A ticket model of the same network.
        ticket: A ticket, or its file.

    Returns:
        The model.

    Raises:
        TicketMismatch: The ticket is of another network. The model has not changed then.

    Example:
        mptify.swap_(model, "other.ticket")
    """
    ticket = read(ticket) if isinstance(ticket, (str, Path)) else ticket
    require_match(model, ticket)
    for layer in ticket_layers(model).values():
        hold_(layer, ticket)
    fill_floats_(model, ticket)
    plan_of(model).config = ticket.config
    _apply_settings_(model, ticket.config)
    return model


def _apply_settings_(model: nn.Module, config: TicketConfig) -> None:
    """Set what layers and quantizers know of the settings."""
    for module in model.modules():
        if isinstance(module, Ticketed):
            module.score_grad = config.score_grad
        elif isinstance(module, Quantizer):
            module.set_function_(config.quantizer)
            if isinstance(module, Sign):
                module.width = config.sign_width
    let_train_(model, plan_of(model))


def hold_(layer: Any, ticket: Ticket) -> None:
    found = ticket.layers[layer.ticket_name]
    layer.init_std = found.gain if ticket.config.weight_bits == 32 else layer.init_std
    layer.set_ticket_(
        torch.from_numpy(found.mask),
        torch.from_numpy(found.weights(ticket.config)),
        found.gain,
        found.kept,
    )


def fill_floats_(model: nn.Module, ticket: Ticket) -> None:
    with torch.no_grad():
        for name, tensor in floats_of(model):
            tensor.copy_(torch.from_numpy(ticket.floats[name].copy()))


def require_match(model: nn.Module, ticket: Ticket) -> None:
    """Raise `TicketMismatch` unless the ticket fits the model."""
    if not isinstance(model, nn.Module):
        raise TicketMismatch(f"A ticket model is needed, not {shown(model)}.")
    if not isinstance(ticket, Ticket):
        raise TicketMismatch(f"A ticket or the name of its file is needed, not {shown(ticket)}.")
    layers, floats = _own_layers(model), dict(floats_of(model))
    config, theirs = plan_of(model).config, ticket.config
    # Two networks of different structure may have tensors of the same names.
    for setting in ("bits", "residual", "bn"):
        one, other = getattr(theirs, setting), getattr(config, setting)
        if one != other:
            raise TicketMismatch(
                f"The ticket has {setting}={one!r}, but this model has {setting}={other!r}."
            )
    dtype = str(_one_type(model)).removeprefix("torch.")
    if ticket.dtype != dtype:
        raise TicketMismatch(
            f"The ticket's network computes in {ticket.dtype}, this model in {dtype}; "
            f"model.to(torch.{ticket.dtype}) fits."
        )
    for ours, others, what in ((layers, ticket.layers, "layer"), (floats, ticket.floats, "tensor")):
        for name in others:
            if name not in ours:
                raise TicketMismatch(
                    f"{name}: the ticket holds this {what}, but the model has none of that name."
                )
        for name, one in ours.items():
            if name not in others:
                raise TicketMismatch(
                    f"{name}: the model has this {what}, but the ticket holds none of that name."
                )
            want, got = tuple(one.shape), others[name].shape
            if want != got:
                raise TicketMismatch(
                    f"{name}: the ticket holds a {what} of shape {got}, but this model's has "
                    f"{want}."
                )
    if ticket.constants != _constants(model):
        raise TicketMismatch(
            "The model's index tables (its integer buffers) are not those of the ticket's network."
        )


# -- files -----------------------------------------------------------------------------------------


def save(
    model: nn.Module,
    path: str | Path,
    architecture: str | None = None,
    *,
    arguments: Mapping[str, int] | None = None,
    standalone: bool = False,
    float16: bool = False,
    notes: dict[str, Any] | None = None,
) -> Ticket:
    """Write a ticket model's ticket to a file.

    Args:
        model: A ticket model, or one inside DataParallel, DistributedDataParallel or a Lightning
            module.
        path: The file.
        architecture: The name of the dense network, such as `"timm:resnet18"`, by which `load`
            builds it. By default the name that `transform` was given, or that it has recognized
            in a timm model, if the model is still that network.
        arguments: The `num_classes`, `in_chans` and `input_size` that the network was built with.
            A network built with other arguments is saved without a name.
        standalone: Whether to store the survivors' signs too, so that no seed is needed.
        float16: Whether to store other floats in 16 bits, at a loss.
        notes: Further information for the file, as JSON values.

    Returns:
        The ticket that was written.

    Raises:
        TicketMismatch: The network of that name is not the model.

    Example:
        mptify.save(mptify.transform("resnet18", prune=0.8), "resnet18.ticket")
    """
    path = as_path(path)
    built = (
        _remembered(model) if architecture is None else architecture_named(architecture, arguments)
    )
    ticket = ticket_of(
        model, architecture=built, standalone=standalone, float16=float16, notes=notes
    )
    if architecture is not None and built is not None:
        require_fit(_unwrapped(model), built)
    write(ticket, path)
    return ticket


def _remembered(model: nn.Module) -> Architecture | None:
    """The architecture that the model's plan remembers, if the model is still that network."""
    whole = _unwrapped(model)
    plan = getattr(whole, "ticket_plan", None)
    built = getattr(plan, "architecture", None)
    if plan is None or built is None:
        return None
    try:
        dense = require_fit(whole, built)
    except (TicketMismatch, BadConfig):
        return None
    return built if plan.structure in ("", structure_digest(dense)) else None


def read(path: str | Path) -> Ticket:
    """Read a ticket file, without building a network.

    Raises:
        DamagedTicket: The file is not a valid ticket.
        MptifyError: The file can't be read.
    """
    return read_both(path)[0]


def read_both(path: str | Path) -> tuple[Ticket, bytes]:
    """The ticket in a file, and the file's bytes."""
    try:
        data = as_path(path).read_bytes()
        return from_bytes(data), data
    except IsADirectoryError:
        best = Path(path) / "best.ticket"
        hint = f"; its ticket is {best}" if best.is_file() else ", not a ticket"
        raise MptifyError(f"{path}: is a folder{hint}.") from None
    except OSError as error:
        raise MptifyError(f"{path}: can't be read ({error.strerror}).") from None
    except DamagedTicket as error:
        raise DamagedTicket(f"{path}: {error}") from None


def write(ticket: Ticket, path: str | Path) -> None:
    """Write a ticket's file atomically."""
    write_whole(as_path(path), to_bytes(ticket))
