"""Tickets for other programs: a plain state dict of the dense network, or ONNX. Each is compared with the ticket before it is kept."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from mptify.errors import MptifyError
from mptify.files import check_writable, write_whole
from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.runtime.loading import as_packed_file, example_of, load
from mptify.surgery import ticket_layers
from mptify.ticket.codec import Ticket
from mptify.ticket.state import read

__all__ = ["Exported", "export", "to_onnx"]

TOLERANCE = 1e-4  # of the largest output


@dataclass(frozen=True)
class Exported:
    """A file that was written, its size, and how far its outputs are from the ticket's, as a share of the largest."""

    path: Path
    size: int
    difference: float


def export(path: str | Path, to: str, out: str | Path) -> Exported:
    """Write the ticket in a file as `dense` (safetensors, for the network that it was cut from), as `onnx`, or as a `packed` program.

    `dense` is for 32-bit activations, `packed` for tickets of 1/1 bits. What the other program computes is compared with the ticket's own
    outputs first; nothing is written unless they agree to a ten-thousandth.
    """
    writers = {"onnx": _onnx, "dense": _dense, "packed": _packed}
    if to not in writers:
        raise MptifyError(f"--to {to}: there are {', '.join(writers)}.")
    check_writable(Path(out))
    ticket = read(path)
    image = example_of(ticket)
    if ticket.architecture is None:
        raise MptifyError(f"{path}: holds a ticket of a model that no registry knows; only named networks can be exported.")
    if image is None:
        raise MptifyError(f"{path}: {ticket.architecture} does not take one image at a time, and can't be exported.")
    # Numbers whose sums are the same in any order: a first layer's sum that is rounded otherwise may have another sign.
    images = torch.randint(-24, 25, (2, *image.shape[1:]), generator=torch.Generator().manual_seed(0)) / 8
    data, difference = writers[to](ticket, load(path), images)
    if not difference <= TOLERANCE:
        raise MptifyError(f"{path}: what was exported gives other outputs than the ticket (by {difference:.1e} of the largest); not kept.")
    write_whole(Path(out), data)
    return Exported(Path(out), len(data), difference)


# -- dense -------------------------------------------------------------------------------------------------------------------


def _dense(ticket: Ticket, model: nn.Module, images: Tensor) -> tuple[bytes, float]:
    if ticket.config.activation_bits == 1:
        raise MptifyError(f"A ticket of {ticket.config.bits} bits has signs where its dense network has activations; --to onnx keeps them.")
    assert ticket.architecture is not None
    with InitMode("constant"):
        network = registry.build(registry.resolve(str(ticket.architecture)), **ticket.architecture.arguments).eval()
    state = _state_for(network, model)
    network.load_state_dict(state)
    return safetensors.torch.save(state, {"format": "pt"}), _difference(model, network, images)


def _state_for(network: nn.Module, model: nn.Module) -> dict[str, Tensor]:
    """The dense network's state, from the ticket model: biases that the ticket dropped are 0."""
    found: dict[str, Tensor] = {}
    ours, layers = model.state_dict(), {layer.ticket_name: layer for layer in ticket_layers(model).values()}
    for name, tensor in network.state_dict().items():
        layer = layers.get(name) or (layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None)
        if layer is not None:
            found[name] = layer.ticket_weight().detach().reshape(tensor.shape).contiguous().clone()
        elif name in ours and ours[name].shape == tensor.shape:
            found[name] = ours[name].detach().contiguous().clone()
        elif name.endswith("bias"):
            found[name] = torch.zeros_like(tensor)
        else:
            raise MptifyError(f"{name}: the ticket has nothing to put there; its network is not the dense one with other weights.")
    extra = [name for name in ours if name.endswith("running_mean") and name not in found]
    if extra:
        raise MptifyError(f"{extra[0].rpartition('.')[0]}: the ticket's network has a norm that the dense one lacks; --to onnx keeps it.")
    return found


# -- packed ------------------------------------------------------------------------------------------------------------------


def _packed(ticket: Ticket, model: nn.Module, images: Tensor) -> tuple[bytes, float]:
    data = as_packed_file(ticket, "the ticket", images)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ticket.packed"
        path.write_bytes(data)
        program = load(path)
        difference = _difference(model, program, images)
        del program  # which the file is mapped for
    return data, difference


# -- ONNX --------------------------------------------------------------------------------------------------------------------


def _onnx(ticket: Ticket, model: nn.Module, images: Tensor) -> tuple[bytes, float]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        raise MptifyError('ONNX needs its libraries: pip install "mptify[onnx]", or in a clone pip install ".[onnx]".') from None
    with tempfile.TemporaryDirectory() as folder, _sums_as_they_are(model):
        path = Path(folder) / "ticket.onnx"
        to_onnx(model, images, path, dynamic=True)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

        def run(some: Tensor) -> Tensor:
            return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: some.numpy()})[0])

        # Another number of images too: the file must not remember how many it was made with.
        return path.read_bytes(), max(_difference(model, run, some) for some in (images, torch.cat([images, images[:1]])))


@contextlib.contextmanager
def _sums_as_they_are(model: nn.Module) -> Iterator[None]:
    """Let layers clip their sums to what float32 can hold anyway.

    Otherwise an optimizer would merge the norm behind a layer into its weights, whose sums are rounded then: one that should be 0 is
    not, and has another sign.
    """
    layers = {layer for layer in ticket_layers(model).values() if layer.gain_outside}
    try:
        for layer in layers:
            layer.finish = partial(_finish_clipped, layer)
        yield
    finally:
        for layer in layers:
            del layer.finish


def _finish_clipped(layer: Any, y: Tensor, gain: Tensor) -> Tensor:
    return type(layer).finish(layer, y.clamp(-3e38, 3e38), gain)


def to_onnx(model: nn.Module, images: Tensor, path: Path, *, dynamic: bool) -> None:
    """Write a network as ONNX, in one file; `dynamic` lets it take any number of images."""
    shapes = ({0: torch.export.Dim("batch", min=1, max=1 << 20)},) if dynamic else None
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (images,), str(path), dynamo=True, dynamic_shapes=shapes, external_data=False, verbose=False)


def _difference(model: nn.Module, other: Any, images: Tensor) -> float:
    """The largest difference of the first outputs, over the largest output."""
    with torch.no_grad():
        one, two = (next(registry.tensors_in(run(images))).double() for run in (model, other))
    if one.shape != two.shape:
        return float("inf")
    return float((one - two).abs().max() / one.abs().max().clamp_min(1e-30))
