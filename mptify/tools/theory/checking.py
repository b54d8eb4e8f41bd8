"""Check what the theorem promises: the error on the unit ball, the survivors and the failures."""

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

FRACTIONS = (5 / 8, 1 / 2, 7 / 16, 3 / 8)  # of the width; in this range, draws begin to fail
# In all layers. The check reads two signs of each neuron, and keeps up to an eighth of the neurons,
# in 26 bytes each.
_MOST_NEURONS = 10**8
_CORNERS = 4096  # all corners for up to 12 inputs
_ASCENTS, _STEPS, _NUDGE = 16, 60, 1e-7


@dataclass(frozen=True)
class AtFraction:
    """The failures with fewer neurons than the theorem needs, and their exact probability."""

    fraction: float
    width: int
    failed: int
    probability: float


@dataclass(frozen=True)
class Finding:
    r"""The result of a check of one network.

    Attributes:
        shape: The sizes of the layers, from the inputs to the outputs.
        sparsity: The most weights in a row.
        epsilon: The largest error allowed.
        delta: The largest probability of failure allowed.
        neurons: The width $k$ of each random layer.
        gains: The gain of each layer.
        points: The number of points at which the error was measured.
        worst_error: The largest $\lVert G(x) - F(x) \rVert_2$ at any point of any draw; None if
            every draw failed.
        certified_error: An upper bound of the error over the whole ball; None if every draw failed.
        nonzeros: The most survivors of any draw.
        nonzeros_allowed: The theorem's bound of the survivors.
        seeds: The number of draws.
        failed: The number of draws that failed.
        probability: The exact probability of failure.
        least: The width at which the exact probability of failure falls to $\delta$.
        fractions: The failures with fewer neurons.
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
        """Whether the network keeps all promises of the theorem."""
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
    """Check the theorem on a network: draw, mask and evaluate random networks.

    A draw fails if the masks can't be built or the error exceeds ε.

    Args:
        network: The target: weight matrices, an `nn.Sequential` or a `Target`.
        epsilon: The largest error allowed.
        delta: The largest probability of failure allowed.
        sparsity: The most weights in a row; counted by default.
        seeds: Random networks to draw.
        points: Random points on the sphere, and inside it, at which the error is measured.
        fractions: Fractions of the theorem's width, for which failures are counted too.
        tick: Called after each draw.

    Returns:
        The errors, survivors and failures.

    Raises:
        BadConfig: An argument is out of range, or the random network would be too large.
        CannotConvert: The network does not meet the hypotheses of the theorem.
    """
    if seeds < 1 or points < 1:
        raise BadConfig(f"seeds={seeds}, points={points}: at least 1 of each is needed.")
    target = as_target(network, sparsity)
    promised = theorem(epsilon, delta, target.sparsity, target.width, target.depth)
    bounds = layer_bounds(target, epsilon, delta)
    neurons = max(bound.width for bound in bounds)
    if neurons * target.depth > _MOST_NEURONS:
        raise BadConfig(
            f"epsilon={epsilon:g}: the random network would have {neurons:,} neurons in each of "
            f"{target.depth} layers, too many to draw; take a larger ε, a smaller network, or only "
            f"the bounds (`mptify theory --seeds 0`)."
        )
    domain = ball_points(target.inputs, points)
    widths = [int(fraction * neurons) for fraction in fractions]
    narrow_failures, failed, nonzeros = [0] * len(widths), 0, 0
    errors: dict[bytes, tuple[float, float]] = {}
    for seed in range(seeds):
        drawn = RandomNetwork(seed)
        found = construct(target, epsilon, delta, drawn)
        if found is None:
            failed += 1
        else:
            # Draws with equal sums compute the same function, which is evaluated once.
            sums = b"".join(layer.sums.tobytes() for layer in found.layers)
            if sums not in errors:
                worst_error = _worst_error(target, found, domain)
                errors[sums] = worst_error, certified_error(target, found)
            failed += errors[sums][0] > epsilon * (1 + ROUNDING)
            nonzeros = max(nonzeros, found.nonzeros)
        for place, width in enumerate(widths):
            narrow_failures[place] += construct(target, epsilon, delta, drawn, width) is None
        tick()
    worst, certified = (max(column) for column in zip(*errors.values())) if errors else (None, None)
    return Finding(
        shape=(target.inputs, *map(len, target.weights)),
        sparsity=target.sparsity,
        epsilon=epsilon,
        delta=delta,
        neurons=neurons,
        gains=tuple(bound.gain for bound in bounds),
        points=len(domain),
        worst_error=worst,
        certified_error=certified,
        nonzeros=nonzeros,
        nonzeros_allowed=promised.nonzeros,
        seeds=seeds,
        failed=failed,
        probability=failure_probability(target, epsilon, delta, neurons),
        least=least_width(target, epsilon, delta),
        fractions=tuple(
            AtFraction(fraction, width, count, failure_probability(target, epsilon, delta, width))
            for fraction, width, count in zip(fractions, widths, narrow_failures)
        ),
    )


def ball_points(inputs: int, count: int, seed: int = 0) -> np.ndarray:
    """Choose points of the unit ball.

    Args:
        inputs: The dimension.
        count: Random points on the sphere, and as many inside.
        seed: The seed of the random points.

    Returns:
        Points as rows: ± each axis, corners of the inscribed cube, and the random points.
    """
    axes = np.concatenate([np.eye(inputs), -np.eye(inputs)])
    if 2**inputs <= _CORNERS:
        corners = 1.0 - 2.0 * (np.arange(2**inputs)[:, None] >> np.arange(inputs) & 1)
    else:
        corners = 1.0 - 2.0 * signs(seed, "theory.corners", _CORNERS * inputs).reshape(
            _CORNERS, inputs
        )
    shape = (2 * count, inputs)
    normal = frozen_weight(seed, "theory.points", shape, "kaiming_normal", 1.0)
    sphere = _normalized(normal.astype(np.float64))
    uniform = 0.5 + 0.5 * scores(seed, "theory.radii", count, 1.0)[:, None].astype(np.float64)
    sphere[count:] *= uniform ** (1 / inputs)
    return np.concatenate([axes, corners / np.sqrt(inputs), sphere])


def certified_error(target: Target, found: Subnetwork) -> float:
    r"""An upper bound of $\lVert G(x) - F(x) \rVert_2$ over the ball $\lVert x \rVert_2 \le 1$.

    A masked layer computes $V x$ with $V$ = gain · c · sgn(W). If $e$ bounds the error of its
    input, and $g$ the norm of $G$ there, then $\lVert W \rVert e + \lVert V - W \rVert g$ bounds
    the error of its output, since ReLU is 1-Lipschitz. The bound is exact for a single layer.

    Args:
        target: The network $F$.
        found: Its approximation $G$.

    Returns:
        The bound.
    """
    error, size = 0.0, 1.0
    for weight, layer in zip(target.weights, found.layers):
        up, down = layer.gain * layer.sums
        assert (up == -down).all(), "each weight has as many rising as sinking neurons"
        error = spectral_norm(weight) * error + spectral_norm(up - weight) * size
        size *= spectral_norm(up)
    return error


def failure_probability(target: Target, epsilon: float, delta: float, width: int) -> float:
    r"""The exact probability that `construct` finds no masks.

    A block of $m$ neurons suffices for a weight that needs $c$ neurons of either sign if
    $\text{Bin}(\lfloor m/2 \rfloor, 1/4) \ge c$ and $\text{Bin}(\lceil m/2 \rceil, 1/4) \ge c$.
    Blocks are independent, since no two share an entry of $B$ or $U$.

    Args:
        target: The network.
        epsilon: The largest error allowed.
        delta: The largest probability of failure allowed.
        width: Neurons in each layer of the random network.

    Returns:
        The probability.
    """
    success = 0.0
    for weight, bound in zip(target.weights, layer_bounds(target, epsilon, delta)):
        counts = neurons_of(weight, bound.gain)
        size = block_size((weight.shape[0], weight.shape[1]), target.sparsity, width)
        for half in (size // 2, size - size // 2):
            success += _log_success(half, counts[counts > 0])
    return -math.expm1(success)


def least_width(target: Target, epsilon: float, delta: float) -> int:
    """The smallest width at which the construction fails with a probability of at most δ."""
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
    """The log of the product of P(Bin(trials, 1/4) ≥ c) over `counts`, all at least 1."""
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
    """The largest error at the points, and along ascents on the sphere from the worst of them.

    The error is piecewise linear, so differences along the axes give its gradient. A step that does
    not increase the error is halved.
    """

    def error(at: np.ndarray) -> np.ndarray:
        return np.linalg.norm(found(at) - target(at), axis=-1)

    errors = error(points)
    best = np.argsort(errors)[-_ASCENTS:]
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
