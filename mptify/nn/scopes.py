"""One ranking over many layers, for `scope="global"`."""

from __future__ import annotations

import math
from typing import Any

import torch

from mptify.nn import functional

__all__ = ["SharedThreshold"]


class SharedThreshold:
    """`scope="global"`: the layers' masks come from one ranking over all of them.

    Each layer first keeps its share `floor` of largest |score| (one weight at least), so that none dies; the rest of
    the budget goes to the largest |score| of all. Ties go to the earlier layer, then to the lower flat index.
    """

    def __init__(self, layers: list, prune: float, floor: float):
        self.layers = layers
        self.floor = floor
        self.set_prune_(prune)
        for layer in layers:
            layer.threshold = self

    def set_prune_(self, prune: float) -> None:
        """Remove another fraction from now on."""
        floors = sum(self._floor_of(layer) for layer in self._owners())
        self.kept = max(functional.kept_count(sum(layer.count for layer in self._owners()), prune), floors)

    def _owners(self) -> list:
        """The layers without those whose scores are another's."""
        owners: dict = {}
        for layer in self.layers:
            owners.setdefault(id(layer.scores), layer)
        return list(owners.values())

    def _floor_of(self, layer: Any) -> int:
        return max(1, math.ceil(layer.count * self.floor))

    @torch.inference_mode(False)
    def refresh_(self) -> None:
        """Rank again if the scores of any layer changed since the last time."""
        if all(layer._is_fresh() for layer in self.layers):
            return
        ranked = []
        for layer in self._owners():
            magnitudes = layer.scores.detach().abs().contiguous().view(-1)
            safe = functional.select_mask(magnitudes, self._floor_of(layer))
            ranked.append(magnitudes.nan_to_num(torch.inf, torch.inf).masked_fill(safe, torch.nan).to(self.layers[0].scores.device))
        mask = functional.select_mask(torch.cat(ranked), self.kept)
        parts = dict(zip((id(layer.scores) for layer in self._owners()), mask.split([len(r) for r in ranked]), strict=True))
        for layer in self.layers:
            own = parts[id(layer.scores)].view(layer.scores.shape).to(layer.scores.device)
            layer.take_mask_(own)
