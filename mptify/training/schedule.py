"""How the learning rate and the pruned fraction change over a search. Time is counted in epochs, whole or not."""

from __future__ import annotations

import math

from mptify.config import SearchSpec

__all__ = ["learning_rate", "prune_share"]


def learning_rate(spec: SearchSpec, time: float) -> float:
    r"""Linear from 0 over the warm-up, then $\frac{lr}{2}(1 + \cos \pi t)$ with t from 0 to 1 over the rest, or constant."""
    if time < spec.warmup:
        return spec.lr * time / spec.warmup
    if spec.schedule == "constant":
        return spec.lr
    rest = max(spec.epochs - spec.warmup, 1e-9)
    return 0.5 * spec.lr * (1 + math.cos(math.pi * min((time - spec.warmup) / rest, 1.0)))


def prune_share(spec: SearchSpec, time: float) -> float:
    r"""The share of the final pruned fraction: $1 - (1 - t)^3$ over the ramp (Zhu and Gupta, 2017), 1 without or behind it."""
    if time >= spec.prune_ramp:
        return 1.0
    return 1 - (1 - time / spec.prune_ramp) ** 3
