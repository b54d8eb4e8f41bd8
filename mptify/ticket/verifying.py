"""Running a ticket's network on an input that is the same on every machine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mptify import catalog, randomness
from mptify.errors import TicketMismatch
from mptify.ticket.store import load, read

__all__ = ["FixedRun", "run_on_fixed_input"]


@dataclass(frozen=True)
class FixedRun:
    """What came out: the digest of all outputs, the shape of what went in, and the first outputs themselves."""

    digest: str
    shape: tuple[int, ...]
    first: tuple[float, ...]


def run_on_fixed_input(path: str | Path) -> FixedRun:
    """Load a ticket of a named network and run it in `eval()` on numbers drawn as its weights are."""
    ticket = read(path)
    architecture = ticket.architecture
    if architecture is None:
        raise TicketMismatch(f"{path} names no network to run.")
    model = load(path)
    entry = catalog.resolve(str(architecture))
    given = architecture.arguments
    example = catalog.example_inputs(entry, model, given.get("input_size"), given.get("in_chans", 3))
    inputs = _drawn(example, getattr(torch, ticket.dtype))
    with torch.no_grad():
        outputs = list(catalog.tensors_in(model(*inputs)))
    whole = hashlib.sha256()
    for output in outputs:
        whole.update(f"{tuple(output.shape)} {output.dtype}\n".encode())
        whole.update(output.contiguous().view(torch.uint8).numpy().tobytes())
    first = tuple(outputs[0].reshape(-1)[:8].float().tolist()) if outputs else ()
    return FixedRun(whole.hexdigest(), tuple(next(catalog.tensors_in(inputs)).shape), first)


def _drawn(example: Any, dtype: torch.dtype) -> Any:
    """The same structure with every image redrawn; boxes and labels, which only training reads, stay."""
    if isinstance(example, (list, tuple)):
        return type(example)(_drawn(one, dtype) for one in example)
    if isinstance(example, Tensor) and example.is_floating_point():
        values = randomness.scores(0, f"verify {tuple(example.shape)}", example.numel(), 1.7320508)
        return torch.from_numpy(values).reshape(example.shape).to(dtype)
    return example
