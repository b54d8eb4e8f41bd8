"""Schedules of the learning rate and of the pruned fraction, in epochs."""

from __future__ import annotations

import math

from mptify.config import SearchConfig

__all__ = ["learning_rate", "prune_share"]


def learning_rate(config: SearchConfig, time: float) -> float:
    r"""The learning rate at `time`, in epochs.

    It rises linearly over the warm-up. Then it is $\frac{lr}{2}(1 + \cos \pi t)$, with $t$ from 0
    to 1 over the rest, or constant.
    """
    if time < config.warmup:
        return config.lr * time / config.warmup
    if config.schedule == "constant":
        return config.lr
    rest = max(config.epochs - config.warmup, 1e-9)
    return 0.5 * config.lr * (1 + math.cos(math.pi * min((time - config.warmup) / rest, 1.0)))


def prune_share(config: SearchConfig, time: float) -> float:
    r"""The share of the final pruned fraction: $1 - (1 - t)^3$ over the ramp, then 1.

    Zhu and Gupta, "To prune, or not to prune", 2017.
    """
    if time >= config.prune_ramp:
        return 1.0
    return 1 - (1 - time / config.prune_ramp) ** 3
