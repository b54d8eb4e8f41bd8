"""Diagnostics: do processes agree, do masks still change, is a layer dead?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mptify.errors import Disagreement
from mptify.surgery import ticket_layers
from mptify.training.evaluation import evaluating

__all__ = ["Masks", "constant_layers", "require_agreement"]


class Masks:
    """The masks at the end of the last epoch, and for how many epochs each has not changed."""

    def __init__(self, model: nn.Module):
        self.layers = {layer.ticket_name: layer for layer in ticket_layers(model).values()}
        self.packed = self._now()
        self.still = dict.fromkeys(self.layers, 0)

    def _now(self) -> dict[str, np.ndarray]:
        return {
            name: np.packbits(layer.mask.cpu().numpy(), bitorder="little")
            for name, layer in self.layers.items()
        }

    def update(self) -> float:
        """Record the masks at the end of an epoch; return the share of survivors that is new."""
        now, fresh = self._now(), 0
        for name, bits in now.items():
            fresh += int(np.unpackbits(bits & ~self.packed[name]).sum())
            self.still[name] = (
                self.still[name] + 1 if np.array_equal(bits, self.packed[name]) else 0
            )
        self.packed = now
        return fresh / max(1, sum(layer.kept for layer in self.layers.values()))

    def stuck(self, epochs: int) -> list[str]:
        """The layers whose survivors have never changed, although they could."""
        return [
            name
            for name, layer in self.layers.items()
            if epochs >= 3 and self.still[name] >= epochs - 1 and layer.kept < layer.count
        ]

    def hashes(self) -> Tensor:
        """A digest of each layer's mask."""
        digests = [hashlib.sha256(bits.tobytes()).digest() for bits in self.packed.values()]
        return torch.tensor(
            [int.from_bytes(digest[:8], "little", signed=True) for digest in digests],
            dtype=torch.int64,
        )

    def digest(self) -> str:
        """A digest of all masks."""
        return hashlib.sha256(b"".join(bits.tobytes() for bits in self.packed.values())).hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """The state for a checkpoint."""
        return {f"masks.{name}": torch.from_numpy(bits) for name, bits in self.packed.items()}

    def restore_(self, tensors: dict[str, Tensor], still: dict[str, int]) -> None:
        """Restore the state from a checkpoint."""
        self.packed = {name: tensors[f"masks.{name}"].numpy() for name in self.packed}
        self.still = dict(still)


def require_agreement(
    masks: Masks, gather: Callable[[Tensor], Tensor], world: int, device: Any
) -> None:
    """Raise `Disagreement` unless every process holds the masks of process 0."""
    if world == 1:
        return
    mine = masks.hashes().to(device)
    if not len(mine):
        return
    everyone = gather(mine).view(world, -1).cpu()
    wrong = [
        (rank, int(index))
        for rank in range(1, world)
        for index in (everyone[rank] != everyone[0]).nonzero().flatten()
    ]
    if wrong:
        rank, index = wrong[0]
        layers = sum(1 for other, _ in wrong if other == rank)
        name = list(masks.layers)[index]
        raise Disagreement(
            f"Process {rank} holds other masks than process 0 in {layers} layers, first in {name}; "
            "their scores differ."
        )


def constant_layers(model: nn.Module, images: Tensor) -> list[str]:
    """The ticket layers whose output is the same for every image."""
    found: dict[str, bool] = {}
    handles = []
    for name, layer in ticket_layers(model).items():

        def look(module: Any, inputs: Any, output: Any, name: str = name) -> None:
            if isinstance(output, Tensor) and len(output) > 1 and len(output) == len(images):
                found[name] = found.get(name, True) and bool((output == output[:1]).all())

        handles.append(layer.register_forward_hook(look))
    try:
        with evaluating(model):
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return [name for name, constant in found.items() if constant]
