"""What the theorem promises, measured: the error on the unit ball, the survivors, and how often a draw fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from mptify.errors import BadConfig
from mptify.nn.init import frozen_weight, scores, signs
from mptify.tools.theory.bounds import theorem
from mptify.tools.theory.construction import (
    RandomNetwork,
    Subnetwork,
    block_size,
    construct,
    layer_bounds,
    neurons_of,
)
from mptify.tools.theory.targets import ROUNDING, Target, as_target, spectral_norm

__all__ = [
    "FRACTIONS",
    "AtFraction",
    "Finding",
    "ball_points",
    "certified_error",
    "check",
    "failure_probability",
    "least_width",
]

FRACTIONS = (
    5 / 8,
    1 / 2,
    7 / 16,
    3 / 8,
)  # of the width: around the place where draws begin to fail
_MOST_NEURONS = (
    10**8
)  # of all layers: two signs of each are looked at, and an eighth may survive, at 26 bytes each
_CORNERS = 4096  # all of them up to 12 inputs
_CLIMBS, _STEPS, _NUDGE = 16, 60, 1e-7


@dataclass(frozen=True)
class AtFraction:
    """Draws that failed with fewer neurons than the theorem asks for, and the exact probability that one does."""

    fraction: float
    width: int
    failed: int
    probability: float


@dataclass(frozen=True)
class Finding:
    r"""One network, measured over `seeds` draws.

    `shape` are the sizes from the inputs to the outputs. `neurons` is the width $k$ of each random layer, and `least` the width at which
    the exact probability of failure falls to $\delta$. `worst_error` is the largest $\lVert G(x) - F(x) \rVert_2$ at any point of any
    draw, `certified_error` a bound of it over the whole ball; both are None if every draw failed.
    """

    shape: tuple[int, ...]
    sparsity: int
    epsilon: float
    delta: float
    neurons: int
    gains: tuple[float, ...]
    points: int
    worst_error: float | None
    certified_error: float | None
    nonzeros: int
    nonzeros_allowed: float
    seeds: int
    failed: int
    probability: float
    least: int
    fractions: tuple[AtFraction, ...]

    @property
    def holds(self) -> bool:
        """Whether all that the theorem promises was found so."""
        small = self.worst_error is None or self.worst_error <= self.epsilon * (1 + ROUNDING)
        sparse = self.nonzeros <= self.nonzeros_allowed * (1 + ROUNDING)
        return small and sparse and self.failed <= self.delta * self.seeds


def check(
    network: Target | nn.Sequential | Iterable[Any],
    epsilon: float,
    delta: float,
    *,
    sparsity: int | None = None,
    seeds: int = 200,
    points: int = 2000,
    fractions: Sequence[float] = FRACTIONS,
    tick: Callable[[], object] = lambda: None,
) -> Finding:
    """Run the theorem on a network: draw, mask and evaluate `seeds` random networks, and count those that fail with fewer neurons.

    A draw fails when the masks can't be built or the error exceeds ε. `tick` is called after every seed.
    """
    if seeds < 1 or points < 1:
        raise BadConfig(f"seeds={seeds}, points={points}: at least 1 of each is needed.")
    target = as_target(network, sparsity)
    promised = theorem(epsilon, delta, target.sparsity, target.width, target.depth)
    bounds = layer_bounds(target, epsilon, delta)
    neurons = max(bound.width for bound in bounds)
    if neurons * target.depth > _MOST_NEURONS:
        raise BadConfig(
            f"epsilon={epsilon:g}: the random network would have {neurons:,} neurons in each of {target.depth} layers, too many to draw; "
            f"take a larger ε, a smaller network, or the bounds alone (`mptify theory --seeds 0`)."
        )
    domain = ball_points(target.inputs, points)
    widths = [int(fraction * neurons) for fraction in fractions]
    misses, failed, nonzeros = [0] * len(widths), 0, 0
    errors: dict[bytes, tuple[float, float]] = {}
    for seed in range(seeds):
        drawn = RandomNetwork(seed)
        found = construct(target, epsilon, delta, drawn)
        if found is None:
            failed += 1
        else:
            function = b"".join(
                layer.sums.tobytes() for layer in found.layers
            )  # equal sums are one function: evaluated once
            if function not in errors:
                errors[function] = (
                    _worst_error(target, found, domain),
                    certified_error(target, found),
                )
            failed += errors[function][0] > epsilon * (1 + ROUNDING)
            nonzeros = max(nonzeros, found.nonzeros)
        for place, width in enumerate(widths):
            misses[place] += construct(target, epsilon, delta, drawn, width) is None
        tick()
    worst, certified = (max(column) for column in zip(*errors.values())) if errors else (None, None)
    return Finding(
        (target.inputs, *map(len, target.weights)), target.sparsity, epsilon, delta, neurons, tuple(bound.gain for bound in bounds),
        len(domain), worst, certified, nonzeros, promised.nonzeros, seeds, failed,
        failure_probability(target, epsilon, delta, neurons), least_width(target, epsilon, delta),
        tuple(AtFraction(*one, failure_probability(target, epsilon, delta, one[1])) for one in zip(fractions, widths, misses)),
    )  # fmt: skip


def ball_points(inputs: int, count: int, seed: int = 0) -> np.ndarray:
    """Points of the unit ball: ± each axis, the corners of the cube inside it, `count` on the sphere and `count` within."""
    axes = np.concatenate([np.eye(inputs), -np.eye(inputs)])
    if 2**inputs <= _CORNERS:
        corners = 1.0 - 2.0 * (np.arange(2**inputs)[:, None] >> np.arange(inputs) & 1)
    else:
        corners = 1.0 - 2.0 * signs(seed, "theory.corners", _CORNERS * inputs).reshape(
            _CORNERS, inputs
        )
    sphere = frozen_weight(
        seed, "theory.points", (2 * count, inputs), "kaiming_normal", 1.0
    ).astype(np.float64)
    sphere = _normalized(sphere)
    sphere[count:] *= (
        0.5 + 0.5 * scores(seed, "theory.radii", count, 1.0)[:, None].astype(np.float64)
    ) ** (1 / inputs)
    return np.concatenate([axes, corners / np.sqrt(inputs), sphere])


def certified_error(target: Target, found: Subnetwork) -> float:
    r"""A bound of $\lVert G(x) - F(x) \rVert_2$ over the whole ball $\lVert x \rVert_2 \le 1$; exact for a single layer.

    Behind the masks a layer is $V x$ with $V$ = gain · c · sgn(W). If $e$ bounds the error before it and $g$ the size of $G$ there, then
    $\lVert W \rVert e + \lVert V - W \rVert g$ bounds the error behind it, as ReLU stretches nothing.
    """
    error, size = 0.0, 1.0
    for weight, layer in zip(target.weights, found.layers):
        up, down = layer.gain * layer.sums
        assert (up == -down).all(), "as many neurons rise as sink"
        error = spectral_norm(weight) * error + spectral_norm(up - weight) * size
        size *= spectral_norm(up)
    return error


def failure_probability(target: Target, epsilon: float, delta: float, width: int) -> float:
    r"""That `construct` finds no masks for this target in a random network with `width` neurons in each layer: exactly.

    A block of $m$ neurons serves a weight that needs $c$ on either side if $\text{Bin}(\lfloor m/2 \rfloor, 1/4) \ge c$ and
    $\text{Bin}(\lceil m/2 \rceil, 1/4) \ge c$. No two blocks share an entry of $B$ or $U$, so they are independent.
    """
    success = 0.0
    for weight, bound in zip(target.weights, layer_bounds(target, epsilon, delta)):
        counts = neurons_of(weight, bound.gain)
        size = block_size((weight.shape[0], weight.shape[1]), target.sparsity, width)
        for half in (size // 2, size - size // 2):
            success += _log_success(half, counts[counts > 0])
    return -math.expm1(success)


def least_width(target: Target, epsilon: float, delta: float) -> int:
    """The fewest neurons for which the construction fails with a probability of at most δ."""
    low, high = 0, max(bound.width for bound in layer_bounds(target, epsilon, delta))
    assert failure_probability(target, epsilon, delta, high) <= delta, "the theorem"
    while high - low > 1:
        middle = (low + high) // 2
        if failure_probability(target, epsilon, delta, middle) <= delta:
            high = middle
        else:
            low = middle
    return high


def _log_success(trials: int, counts: np.ndarray) -> float:
    """log of the product of P(Bin(trials, 1/4) ≥ c) over `counts`, all of which are at least 1."""
    if not counts.size:
        return 0.0
    if counts.max() > trials:
        return -math.inf
    hits = np.arange(1, counts.max())
    steps = np.log((trials - hits + 1) / hits) - math.log(3)  # from P(hits - 1) to P(hits)
    chances = trials * math.log(0.75) + np.concatenate([[0.0], np.cumsum(steps)])
    fewer = np.minimum(np.logaddexp.accumulate(chances), 0.0)[counts - 1]  # log P(Bin < c)
    with np.errstate(divide="ignore"):
        return float(np.log1p(-np.exp(fewer)).sum())


def _worst_error(target: Target, found: Subnetwork, points: np.ndarray) -> float:
    """The largest error at the points, and at those on the sphere that climbs from the worst of them reach.

    The error is linear in pieces: differences along the axes give its gradient. A step that leads down is halved.
    """

    def error(at: np.ndarray) -> np.ndarray:
        return np.linalg.norm(found(at) - target(at), axis=-1)

    errors = error(points)
    best = np.argsort(errors)[-_CLIMBS:]
    here, height, step = points[best], errors[best], np.ones((len(best), 1))
    for _ in range(_STEPS):
        nudged = here[:, None] + _NUDGE * np.eye(target.inputs)
        uphill = error(nudged.reshape(-1, target.inputs)).reshape(len(here), -1) - height[:, None]
        ahead = _normalized(here + step * _normalized(uphill))
        better = error(ahead) > height
        here = np.where(better[:, None], ahead, here)
        step = np.where(better[:, None], step, step / 2)
        height = error(here)
    return float(height.max())


def _normalized(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)
