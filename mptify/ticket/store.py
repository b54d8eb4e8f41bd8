"""From a model to its ticket and back, side by side; and files, written whole or not at all.

A loaded network holds each weight once: its layers are bare, without scores. A ticket that is swapped into a live ticket model
takes the place of scores and weights there: the latter are ± the stored gain, the former 1 where the mask is and 0 elsewhere, so that
mask, gain and effective weight come out of the usual arithmetic, to the bit. Either way no magnitude is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mptify import catalog, randomness
from mptify.errors import BadSpec, DamagedTicket, MptifyError, TicketMismatch
from mptify.files import write_whole
from mptify.layers import Ticketed
from mptify.runtime import pack
from mptify.runtime.library import library
from mptify.spec import TicketSpec
from mptify.surgery import ticket_layers, transform
from mptify.surgery.plan import plan_of
from mptify.ticket.format import Architecture, Ticket, TicketLayer, as_json, from_bytes, to_bytes

__all__ = ["example_of", "load", "read", "read_both", "require_match", "save", "swap_", "ticket_of", "write"]


# -- model -> ticket ---------------------------------------------------------------------------------------------------------


def ticket_of(
    model: nn.Module,
    *,
    architecture: Architecture | None = None,
    standalone: bool = False,
    float16: bool = False,
    notes: dict[str, Any] | None = None,
) -> Ticket:
    """What is left of a ticket model when its scores are thrown away.

    `standalone` stores the survivors' signs although the seed could say them; `float16` halves the floats, at a loss.
    """
    spec = plan_of(model).spec
    layers = {name: _ticket_layer(layer, spec, standalone) for name, layer in _own_layers(model).items()}
    dtype = _one_type(model)
    kind = np.float16 if float16 else np.float64 if dtype == torch.float64 else np.float32
    _check_notes(notes)
    return Ticket(
        spec=spec,
        layers=layers,
        floats={name: _as_array(name, tensor, kind) for name, tensor in _floats(model)},
        architecture=architecture,
        dtype=str(dtype).removeprefix("torch."),
        constants=_constants(model),
        notes=notes or {},
    )


def _one_type(model: nn.Module) -> torch.dtype:
    found = {layer.compute_dtype: name for name, layer in _own_layers(model).items()}
    found = {tensor.dtype: name for name, tensor in _floats(model)} | found
    if len(found) > 1:
        raise BadSpec(f"A ticket's network computes in one type, and this one has {', '.join(f'{n}: {d}' for d, n in found.items())}.")
    return next(iter(found))


def _check_notes(notes: dict[str, Any] | None) -> None:
    try:
        as_json(notes or {}).encode()
    except (TypeError, ValueError) as error:
        raise BadSpec(f"notes hold what JSON can't say: {error}.") from None


def _own_layers(model: nn.Module) -> dict[str, Any]:
    """By name, each once: tied layers share their scores with the one they are tied to."""
    return {layer.ticket_name: layer for layer in ticket_layers(model).values()}


def _ticket_layer(layer: Any, spec: TicketSpec, standalone: bool) -> TicketLayer:
    """With what the seed says left out, if the seed says it: somebody may have put other weights there."""
    mask = layer.mask.cpu().numpy()
    frozen = layer.frozen.detach().cpu().numpy()
    gain = float(layer.gain) if layer.weight_bits == 1 else layer.deviation
    if not standalone and spec.init != "keep":
        found = TicketLayer(layer.ticket_name, mask, gain)
        differs = found.negative(spec.seed) != np.signbit(frozen) if layer.weight_bits == 1 else found.weights(spec) != frozen
        if not (differs & mask).any():
            return found
    survivors = frozen[mask]
    if layer.weight_bits == 32:
        return TicketLayer(layer.ticket_name, mask, values=survivors)
    return TicketLayer(layer.ticket_name, mask, gain, signs=np.signbit(survivors))


def _as_array(name: str, tensor: Tensor, kind: Any) -> np.ndarray:
    wide = tensor.detach().to(device="cpu", dtype=torch.float64 if kind is np.float64 else torch.float32).numpy()
    with np.errstate(over="ignore"):
        array = wide.astype(kind)
    if not np.array_equal(np.isfinite(array), np.isfinite(wide)):
        raise BadSpec(f"{name}: holds numbers too large for 16 bits; save it without float16.")
    return array


def _floats(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every float that the logits depend on, besides the tickets' own: learned ones, statistics, what stayed dense."""
    seen: set[int] = set()
    for name, tensor in _state(model):
        if tensor.is_complex():
            raise BadSpec(f"{name}: complex numbers have no place in a ticket yet.")
        if tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        own = ("scores", "frozen", "bare_gain") if isinstance(module, Ticketed) else ()
        for store, left_out in ((module._parameters, own), (module._buffers, {*own, *module._non_persistent_buffers_set})):
            for name, tensor in store.items():
                if tensor is not None and name not in left_out:
                    yield f"{path}.{name}" if path else name, tensor


def _constants(model: nn.Module) -> str:
    """SHA-256 of the integer buffers with more than one number: index tables, which come with the architecture."""
    whole, any_of_them = hashlib.sha256(), False
    for name, tensor in _state(model):
        if not tensor.is_floating_point() and tensor.numel() > 1:  # single ones are counters
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            whole.update(tensor.detach().cpu().contiguous().numpy().tobytes())
            any_of_them = True
    return whole.hexdigest() if any_of_them else ""


# -- ticket -> model ---------------------------------------------------------------------------------------------------------


def swap_(model: nn.Module, ticket: Ticket | str | Path) -> nn.Module:
    """Put a ticket, or that of a file, into a live ticket model, in place: no tensor moves. On a mismatch nothing has changed.

    Afterwards the model is the ticket's: its settings too, and a threshold that its layers shared is gone.
    """
    ticket = read(ticket) if isinstance(ticket, (str, Path)) else ticket
    require_match(model, ticket)
    for layer in ticket_layers(model).values():
        _hold_(layer, ticket)
    _fill_floats_(model, ticket)
    plan_of(model).spec = ticket.spec
    return model


def _hold_(layer: Any, ticket: Ticket) -> None:
    found = ticket.layers[layer.ticket_name]
    layer.deviation = found.gain if ticket.spec.weight_bits == 32 else layer.deviation
    layer.hold_(torch.from_numpy(found.mask), torch.from_numpy(found.weights(ticket.spec)), found.gain, found.kept)


def _fill_floats_(model: nn.Module, ticket: Ticket) -> None:
    with torch.no_grad():
        for name, tensor in _floats(model):
            tensor.copy_(torch.from_numpy(ticket.floats[name].copy()))


def require_match(model: nn.Module, ticket: Ticket) -> None:
    """Raise `TicketMismatch`, saying where, unless the ticket was cut from such a model."""
    layers, floats = _own_layers(model), dict(_floats(model))
    spec, theirs = plan_of(model).spec, ticket.spec
    for setting in ("bits", "residual", "bn"):  # two networks of different structure may have tensors of the same names
        one, other = getattr(theirs, setting), getattr(spec, setting)
        if one != other:
            raise TicketMismatch(f"The ticket is one of {setting}={one!r}, this model one of {setting}={other!r}.")
    dtype = str(_one_type(model)).removeprefix("torch.")
    if ticket.dtype != dtype:
        raise TicketMismatch(
            f"The ticket's network computes in {ticket.dtype}, this model in {dtype}; model.to(torch.{ticket.dtype}) fits."
        )
    for ours, others, what in ((layers, ticket.layers, "layer"), (floats, ticket.floats, "tensor")):
        for name in others:
            if name not in ours:
                raise TicketMismatch(f"{name}: the ticket holds this {what}, and the model has none of that name.")
        for name, one in ours.items():
            if name not in others:
                raise TicketMismatch(f"{name}: the model has this {what}, and the ticket holds none of that name.")
            want, got = tuple(getattr(one, "frozen", one).shape), others[name].shape
            if want != got:
                raise TicketMismatch(f"{name}: the ticket holds a {what} of shape {got}, this model's has {want}.")
    if ticket.constants != _constants(model):
        raise TicketMismatch("The model's index tables (its integer buffers) are not those of the network that the ticket was cut from.")


def load(
    path: str | Path, model: nn.Module | None = None, device: Any = "cpu", *, runtime: str = "float", example: Tensor | None = None
) -> nn.Module:
    """The ticket model in a file, in `eval()`; with `runtime="packed"` its packed program (see `pack`), made layer by layer.

    Without `model`, the network is built by the name that the file gives, from torchvision's or timm's registry. A `model`
    of yours is converted as the file says, or, where it is a ticket model already, changed in place.
    Unless it was one, its layers hold the weights that they compute with, once, and no scores. `example` is an input of the size that
    a packed program will be used with, if the file does not say it.
    """
    if runtime not in ("float", "packed"):
        raise BadSpec(f"runtime={runtime!r}: there are 'float' and 'packed'.")
    with torch.inference_mode(False):
        if runtime == "packed" and library is not None:
            return _load_packed(read(path), path, model, device, example)
        found = _load(read(path), path, model, device)
        return pack(found, example) if runtime == "packed" else found  # which says that there is no compiler


def _load_packed(ticket: Ticket, path: str | Path, model: nn.Module | None, device: Any, example: Tensor | None) -> nn.Module:
    """Layer by layer: each weight is there while its layer is packed, and no longer."""
    if torch.device(device).type != "cpu":
        raise BadSpec(f"device={device!r}: packed programs run on CPUs.")
    if isinstance(model, nn.Module) and any(isinstance(part, Ticketed) for part in model.modules()):
        raise BadSpec("A packed program is made from a dense model of yours, or from the file alone; mptify.pack takes a ticket model.")
    model = _emptied(_dense(ticket, path, model), ticket)
    _require(model, ticket, path)
    for layer in ticket_layers(model).values():
        found = ticket.layers[layer.ticket_name]
        layer.fetch_(partial(_effective, layer, found, ticket.spec), found.gain, found.kept)
    _fill_floats_(model, ticket)
    program = pack(model.eval(), example_of(ticket) if example is None else example)
    for layer in ticket_layers(program).values():  # what stays float
        _hold_(layer, ticket)
    return program


def _effective(layer: Any, found: TicketLayer, spec: TicketSpec) -> Tensor:
    return layer.bare_weight(torch.from_numpy(found.mask), torch.from_numpy(found.weights(spec)))


def example_of(ticket: Ticket) -> Tensor | None:
    """An image of the size that the ticket was searched on, or that its network is built for."""
    seen, built = ticket.notes.get("input"), ticket.architecture
    if isinstance(seen, dict) and isinstance(seen.get("shape"), list):
        return torch.zeros(1, *seen["shape"])
    if built is None:
        return None
    entry, arguments = catalog.resolve(str(built)), built.arguments
    with torch.device("meta"):
        network = catalog.build(entry, **arguments) if entry.source == "timm" else nn.Identity()
    image = catalog.example_inputs(entry, network, arguments.get("input_size"), arguments.get("in_chans", 3))[0]
    return torch.zeros(1, *image.shape[1:]) if isinstance(image, Tensor) else None


def _load(ticket: Ticket, path: str | Path, model: nn.Module | None, device: Any) -> nn.Module:
    model = _dense(ticket, path, model)
    if not any(isinstance(part, Ticketed) for part in model.modules()):
        model = _emptied(model, ticket)
    _require(model, ticket, path)
    swap_(model, ticket)
    return (model if torch.device(device).type == "cpu" else model.to(device)).eval()


def _dense(ticket: Ticket, path: str | Path, model: nn.Module | None) -> nn.Module:
    """The caller's model, or the one that the file names."""
    if model is None:
        return _build(ticket, path)
    if not isinstance(model, nn.Module):
        raise TicketMismatch(f"{path} is to be loaded into a module, not into {model!r}.")
    return model


def _require(model: nn.Module, ticket: Ticket, path: str | Path) -> None:
    try:
        require_match(model, ticket)
    except TicketMismatch as error:
        raise TicketMismatch(f"{error} `mptify inspect {path}` shows what the ticket was cut from.") from None


def _emptied(model: nn.Module, ticket: Ticket) -> nn.Module:
    """A ticket model of bare layers, ready to be filled; what was on `meta` has memory afterwards."""
    with randomness.undrawn():
        model = transform(model, **dict(ticket.spec) | {"scope": "layer"})  # which layer keeps how many is in the file
    first: dict[str, Any] = {}
    for layer in ticket_layers(model).values():
        layer.bare_(first.get(layer.ticket_name))
        first.setdefault(layer.ticket_name, layer)
    real: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in real:
                    empty = torch.empty_like(parameter, device="cpu")
                    real[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = real[id(parameter)]
        for name, buffer in module._buffers.items():  # of norms that surgery put where weights on `meta` are
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    dtype = getattr(torch, ticket.dtype)
    return model.to(dtype=dtype) if any(tensor.dtype != dtype for _, tensor in _floats(model)) else model


def _build(ticket: Ticket, path: str | Path) -> nn.Module:
    architecture = ticket.architecture
    if architecture is None:
        raise TicketMismatch(f"{path} holds a ticket of a model that no registry knows; pass that model: mptify.load(path, model=...).")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        entry = catalog.resolve(str(architecture))
        _require_size(ticket, entry, path)
        with torch.random.fork_rng(devices=[]):
            return _without_weights(entry, architecture)
    except MptifyError:
        raise
    except Exception as error:  # whatever a builder makes of arguments that it was never built with
        raise TicketMismatch(f"{path}: {architecture} can't be built with {architecture.arguments}: {error}.") from error
    finally:
        torch.set_default_dtype(before)


def _without_weights(entry: catalog.Entry, architecture: Architecture) -> nn.Module:
    """The network with its parameters on `meta`; for real, where its builder looks at their values."""
    try:
        with catalog.hollow():
            network = catalog.build(entry, **architecture.arguments)
        if not any(_computed_on_meta(module) for module in network.modules()):
            return network
    except Exception:  # a builder that computes with its weights; if something else is wrong, it is so again below
        pass
    with catalog.quick_init():
        return catalog.build(entry, **architecture.arguments)


def _computed_on_meta(module: nn.Module) -> bool:
    return any(isinstance(value, Tensor) and value.is_meta for value in (*module._buffers.values(), *vars(module).values()))


def _require_size(ticket: Ticket, entry: catalog.Entry, path: str | Path) -> None:
    """Refuse a small ticket that names a huge network before its memory is taken; what can't be built on `meta` is fixed in size."""
    try:
        with torch.device("meta"):
            network = catalog.build(entry, **ticket.architecture.arguments)  # type: ignore[union-attr]
    except Exception:  # torchvision's regnets and detectors; a wrong argument is told by building it really
        return
    there = sum(parameter.numel() for parameter in network.parameters())
    here = ticket.count + sum(value.size for value in ticket.floats.values())
    if there > 2 * here + (1 << 20):  # biases may have been dropped, and of small networks they are much
        raise TicketMismatch(
            f"{path}: {entry} has {there:,} parameters, and the ticket speaks of {here:,}; it was not cut from that network."
        )


# -- files -------------------------------------------------------------------------------------------------------------------


def save(model: nn.Module, path: str | Path, architecture: str | None = None, **options: Any) -> Ticket:
    """Write a ticket model's ticket to a file, and return it.

    `architecture` names the dense network (`"timm:resnet18"`) and lets `load` build it; `arguments` are those of `num_classes`,
    `in_chans` and `input_size` that it was built with. One built with other arguments is saved without a name.
    The other options are those of `ticket_of`: `standalone`, `float16`, `notes`.
    """
    arguments = options.pop("arguments", {})
    built = None
    if architecture is not None:
        entry = catalog.resolve(architecture)
        built = Architecture(entry.source, entry.name, dict(arguments))
    ticket = ticket_of(model, architecture=built, **options)
    write(ticket, path)
    return ticket


def read(path: str | Path) -> Ticket:
    """The ticket in a file, without building any network."""
    return read_both(path)[0]


def read_both(path: str | Path) -> tuple[Ticket, bytes]:
    """The ticket in a file, and the file."""
    try:
        data = Path(path).read_bytes()
        return from_bytes(data), data
    except OSError as error:
        raise MptifyError(f"{path}: can't be read ({error.strerror}).") from None
    except DamagedTicket as error:
        raise DamagedTicket(f"{path}: {error}") from None


def write(ticket: Ticket, path: str | Path) -> None:
    """Write a ticket's file, whole or not at all."""
    write_whole(Path(path), to_bytes(ticket))
