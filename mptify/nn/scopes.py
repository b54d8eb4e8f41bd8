"""Pruning scopes: which layers share a budget of survivors, registered by name."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.nn import topk
from mptify.registry import scopes

__all__ = ["GlobalScope", "SharedScope", "per_layer"]


@scopes.register("layer")
def per_layer(layers: list[Any], prune: float, floor: float) -> None:
    """Each layer keeps its own share (the paper's scope)."""


class SharedScope:
    """Base class of scopes that select the survivors of several layers together.

    A subclass implements `select`. Layers that share their scores count once.

    Args:
        layers: The ticket layers, in the order of the network.
        prune: The fraction of all their weights that is removed.
        floor: The share of its weights that every layer keeps at least, and at least one weight.
    """

    def __init__(self, layers: list[Any], prune: float, floor: float):
        self.layers = layers
        self.floor = floor
        self.set_prune_(prune)
        for layer in layers:
            layer.scope = self

    def select(self, scores: list[Tensor], kept: int) -> list[Tensor]:
        """Select the survivors.

        Args:
            scores: The scores of each layer.
            kept: How many weights of all layers survive.

        Returns:
            A boolean mask for each layer, with the shape and device of its scores.
        """
        raise NotImplementedError

    def floor_of(self, count: int) -> int:
        """How many weights a layer of `count` weights keeps at least."""
        return max(1, math.ceil(count * self.floor))

    def set_prune_(self, prune: float) -> None:
        """Change the fraction that is removed."""
        counts = [layer.count for layer in self._owners()]
        self.kept = max(topk.kept_count(sum(counts), prune), sum(map(self.floor_of, counts)))

    @torch.inference_mode(False)
    def refresh_(self) -> None:
        """Select again if the scores of any layer have changed."""
        if all(layer.is_fresh() for layer in self.layers):
            return
        owners = self._owners()
        masks = self.select([layer.scores.detach() for layer in owners], self.kept)
        for layer, mask in zip(owners, masks, strict=True):
            if (
                mask.shape != layer.scores.shape
                or mask.dtype != torch.bool
                or not (mask.is_meta or mask.any())
            ):
                raise MptifyError(
                    f"{layer.ticket_name}: {type(self).__name__}.select must return a boolean mask "
                    f"of shape {tuple(layer.scores.shape)} with at least one survivor."
                )
        by_scores = dict(zip((id(layer.scores) for layer in owners), masks, strict=True))
        for layer in self.layers:
            layer.set_mask_(by_scores[id(layer.scores)])

    def _owners(self) -> list[Any]:
        """One layer for each tensor of scores."""
        owners: dict[int, Any] = {}
        for layer in self.layers:
            owners.setdefault(id(layer.scores), layer)
        return list(owners.values())


@scopes.register("global")
class GlobalScope(SharedScope):
    """One ranking over all layers.

    Each layer first keeps its `floor` of largest |score|, so that none dies. The largest remaining
    |scores| fill the budget; ties go to the earlier layer, then to the lower flat index.
    """

    def select(self, scores: list[Tensor], kept: int) -> list[Tensor]:
        ranked = []
        for values in scores:
            magnitudes = values.abs().contiguous().view(-1)
            safe = topk.select_mask(magnitudes, self.floor_of(values.numel()))
            ranked.append(
                magnitudes.nan_to_num(torch.inf, torch.inf)
                .masked_fill(safe, torch.nan)
                .to(scores[0].device)
            )
        mask = topk.select_mask(torch.cat(ranked), kept)
        parts = mask.split([len(values) for values in ranked])
        return [
            part.view(values.shape).to(values.device)
            for part, values in zip(parts, scores, strict=True)
        ]
