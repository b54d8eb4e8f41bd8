"""Running a ticket's network on an input that is the same on every machine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mptify.errors import TicketMismatch
from mptify.models import registry
from mptify.nn import init
from mptify.runtime.loading import load
from mptify.ticket.codec import Ticket
from mptify.ticket.state import read

__all__ = ["FixedRun", "rounding_loss", "run_on_fixed_input"]


@dataclass(frozen=True)
class FixedRun:
    """The digest of all outputs, the shape of the input, and the first outputs."""

    digest: str
    shape: tuple[int, ...]
    first: tuple[float, ...]


def run_on_fixed_input(path: str | Path) -> FixedRun:
    """Load a ticket of a named network and run it in `eval()` on a random but fixed input."""
    inputs, outputs = _outputs(load(path), read(path), path)
    whole = hashlib.sha256()
    for output in outputs:
        whole.update(f"{tuple(output.shape)} {output.dtype}\n".encode())
        whole.update(output.contiguous().view(torch.uint8).numpy().tobytes())
    first = tuple(outputs[0].reshape(-1)[:8].float().tolist()) if outputs else ()
    return FixedRun(whole.hexdigest(), tuple(next(registry.tensors_in(inputs)).shape), first)


def rounding_loss(model: nn.Module, path: str | Path) -> float:
    """How far a file's outputs are from those of the model it was saved from.

    Returns:
        The largest difference over the largest output.
    """
    ticket, was = read(path), model.training
    try:
        _, ours = _outputs(model.eval(), ticket, path)
        _, theirs = _outputs(load(path), ticket, path)
    finally:
        model.train(was)
    losses = [0.0]
    for one, two in zip(ours, theirs, strict=True):
        if one.is_floating_point() and one.numel():
            if one.shape != two.shape:  # a detector that finds another number of boxes
                return 1.0
            difference = (one.double() - two.double()).abs().max()
            losses.append(float(difference / one.double().abs().max().clamp_min(1e-30)))
    return max(losses)


def _outputs(model: nn.Module, ticket: Ticket, path: str | Path) -> tuple[Any, list[Tensor]]:
    architecture = ticket.architecture
    if architecture is None:
        raise TicketMismatch(f"{path} names no network to run.")
    given = architecture.arguments
    entry, size = registry.resolve(str(architecture)), given.get("input_size")
    example = registry.example_inputs(entry, model, size, given.get("in_chans", 3))
    inputs = _drawn(example, getattr(torch, ticket.dtype))
    with torch.no_grad():
        return inputs, list(registry.tensors_in(model(*inputs)))


def _drawn(example: Any, dtype: torch.dtype) -> Any:
    """The same structure with random images; boxes and labels, which only training reads, stay."""
    if isinstance(example, (list, tuple)):
        return type(example)(_drawn(one, dtype) for one in example)
    if isinstance(example, Tensor) and example.is_floating_point():
        values = init.scores(0, f"verify {tuple(example.shape)}", example.numel(), 1.7320508)
        return torch.from_numpy(values).reshape(example.shape).to(dtype)
    return example
