r"""The networks that the theorem speaks of: fully connected, ReLU between the layers, no biases, bounded weights.

$F(x) = W^{(\ell)} \sigma(W^{(\ell-1)} \cdots \sigma(W^{(1)} x))$ on $\lVert x \rVert_2 \le 1$.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from mptify.errors import BadConfig, CannotConvert, first_line
from mptify.nn.init import scores, signs

__all__ = [
    "ROUNDING",
    "Target",
    "as_target",
    "extreme_target",
    "random_target",
    "scaled",
    "spectral_norm",
]

ROUNDING = 1e-9  # what float64 may add to a quantity that meets its bound with equality


@dataclass(frozen=True, eq=False)
class Target:
    r"""A network that meets the hypotheses; `as_target` makes one.

    Of each layer, with $s$ the `sparsity`: at most $s$ weights in a row are not 0, none is above $1/\sqrt{\min(s, \text{inputs})}$, and
    $\lVert W \rVert_2 \le 1$. That is what the proof uses. The theorem asks for more, $1/\sqrt n$ from the second layer on.
    """

    weights: tuple[np.ndarray, ...]
    sparsity: int

    @property
    def depth(self) -> int:
        return len(self.weights)

    @property
    def inputs(self) -> int:
        return self.weights[0].shape[1]

    @property
    def width(self) -> int:
        """The theorem's n: the most rows that a layer has. It is 1 for a single layer with one output."""
        return max(len(weight) for weight in self.weights)

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """F at each row of `points`."""
        for weight in self.weights[:-1]:
            points = np.maximum(points @ weight.T, 0)
        return points @ self.weights[-1].T


def as_target(
    network: Target | nn.Sequential | Iterable[Any], sparsity: int | None = None
) -> Target:
    """A network of your own: weight matrices (numpy or torch), first layer first, or an `nn.Sequential` of `Linear(bias=False)` and `ReLU`.

    `sparsity` is the most weights in a row, counted unless given. What does not meet the hypotheses raises `CannotConvert`.
    """
    if isinstance(network, Target):
        if sparsity is not None and sparsity != network.sparsity:
            return as_target(network.weights, sparsity)
        return network
    weights = _matrices(network)
    counted = max(1, *(int(np.count_nonzero(weight, axis=1).max()) for weight in weights))
    if sparsity is not None and sparsity < 1:
        raise BadConfig(f"sparsity={sparsity}: at least 1 is needed.")
    allowed = counted if sparsity is None else sparsity
    for number, weight in enumerate(weights, 1):
        _check_layer(number, weight, allowed)
    return Target(tuple(weights), allowed)


def scaled(
    network: nn.Sequential | Iterable[Any], sparsity: int | None = None
) -> tuple[Target, float]:
    """The network with each layer divided by what brings it into the hypotheses, and the product of those divisors.

    ReLU networks without biases are positively homogeneous: the network itself is the product times the one returned.
    """
    weights = _matrices(network)
    allowed = sparsity or max(
        1, *(int(np.count_nonzero(weight, axis=1).max()) for weight in weights)
    )
    divisors = [
        max(1.0, spectral_norm(weight), np.abs(weight).max() / _largest(weight, allowed))
        for weight in weights
    ]
    target = as_target([weight / divisor for weight, divisor in zip(weights, divisors)], sparsity)
    return target, math.prod(float(divisor) for divisor in divisors)


def random_target(
    depth: int, width: int, sparsity: int | None = None, inputs: int | None = None, seed: int = 0
) -> Target:
    r"""Uniform weights within the theorem's hypotheses, one output.

    $|W^{(1)}| \le 1/\sqrt s$ and $|W^{(i)}| \le 1/\sqrt n$ behind it, `sparsity` weights in each row at random places, and each layer
    divided by its spectral norm where that is above 1.
    """
    shapes, sparsity = _shapes(depth, width, sparsity, inputs)
    weights = []
    for number, (rows, columns) in enumerate(shapes, 1):
        kept = min(sparsity, columns)
        values = (
            scores(seed, f"theory.target{number}.values", rows * columns, 1.0)
            .reshape(rows, columns)
            .astype(np.float64)
        )
        order = (
            scores(seed, f"theory.target{number}.places", rows * columns, 1.0)
            .reshape(rows, columns)
            .argsort(axis=1)
        )
        np.put_along_axis(values, order[:, kept:], 0.0, axis=1)
        values /= math.sqrt(sparsity if number == 1 else columns)
        weights.append(values / max(1.0, spectral_norm(values)))
    return as_target(weights, sparsity)


def extreme_target(
    depth: int, width: int, sparsity: int | None = None, inputs: int | None = None, seed: int = 0
) -> Target:
    r"""All weights as large as the theorem allows: it takes the most neurons. One output.

    Rows of Hadamard matrices of size $s$ with random signs, times $1/\sqrt s$ in the first layer and $1/\sqrt n$ behind it. They are
    orthogonal, so that with $s = n$ every hypothesis holds with equality. Needs a power of two as sparsity.
    """
    shapes, sparsity = _shapes(depth, width, sparsity, inputs)
    weights = []
    for number, (rows, columns) in enumerate(shapes, 1):
        size = min(sparsity, columns)
        if size & (size - 1):
            raise BadConfig(
                f"{size} weights in a row: the extreme target is made of Hadamard matrices of that size, which should be a power of two."
            )
        hadamard = np.ones((1, 1))
        while len(hadamard) < size:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        values = np.zeros((rows, columns))
        for row in range(
            min(rows, columns // size * size)
        ):  # more rows than that can't be orthogonal, and stay 0
            values[row, row // size * size :][:size] = hadamard[row % size]
        values *= 1.0 - 2.0 * signs(seed, f"theory.target{number}.columns", columns)
        weights.append(values / math.sqrt(sparsity if number == 1 else columns))
    return as_target(weights, sparsity)


def spectral_norm(weight: np.ndarray) -> float:
    """The largest singular value."""
    return float(np.linalg.norm(weight, 2))


def _largest(weight: np.ndarray, sparsity: int) -> float:
    return 1 / math.sqrt(min(sparsity, weight.shape[1]))


def _shapes(
    depth: int, width: int, sparsity: int | None, inputs: int | None
) -> tuple[list[tuple[int, int]], int]:
    """Rows and columns of each layer, and the sparsity: dense rows unless given. There are `width` inputs unless given."""
    inputs = width if inputs is None else inputs
    widest = inputs if depth == 1 else max(inputs, width)
    sparsity = widest if sparsity is None else sparsity
    for name, value in (
        ("depth", depth),
        ("width", width),
        ("inputs", inputs),
        ("sparsity", sparsity),
    ):
        if value < 1:
            raise BadConfig(f"{name}={value}: at least 1 is needed.")
    if sparsity > widest:
        raise BadConfig(
            f"sparsity={sparsity}: no row of this network has more than {widest} weights."
        )
    sizes = [inputs, *[width] * (depth - 1), 1]
    return list(zip(sizes[1:], sizes)), sparsity


def _matrices(network: nn.Sequential | Iterable[Any]) -> list[np.ndarray]:
    """The weights in float64, checked for all that needs no sparsity."""
    given = _linears(network) if isinstance(network, nn.Module) else list(network)
    if not given:
        raise CannotConvert("The network has no layer: at least one weight matrix is needed.")
    weights: list[np.ndarray] = []
    for number, one in enumerate(given, 1):
        try:
            weight = np.array(
                one.detach().cpu().double().numpy() if isinstance(one, Tensor) else one,
                dtype=np.float64,
            )
        except (TypeError, ValueError) as error:
            raise CannotConvert(
                f"layer {number}: a matrix of numbers is needed ({first_line(error)})."
            ) from None
        if weight.ndim != 2 or not weight.size:
            raise CannotConvert(
                f"layer {number}: a matrix of outputs × inputs is needed, this one has the shape {weight.shape}; "
                f"a single layer is passed as [weight]."
            )
        if not np.isfinite(weight).all():
            raise CannotConvert(
                f"layer {number}: its weights should be finite, {int((~np.isfinite(weight)).sum())} are not."
            )
        if weights and weight.shape[1] != len(weights[-1]):
            raise CannotConvert(
                f"layer {number}: it takes {weight.shape[1]} inputs, the layer before it gives {len(weights[-1])}; "
                f"weights are outputs × inputs, so transpose those that are not."
            )
        weights.append(weight)
    return weights


def _linears(network: nn.Module) -> list[Tensor]:
    """The weights of Linear, ReLU, Linear, ..., Linear."""
    if not isinstance(network, nn.Sequential):
        raise CannotConvert(
            f"{type(network).__name__}: an nn.Sequential of Linear(bias=False) and ReLU is needed; or pass the weights as a list."
        )
    weights: list[Tensor] = []
    for place, (name, module) in enumerate(network.named_children()):
        wanted = nn.Linear if place % 2 == 0 else nn.ReLU
        if not isinstance(module, wanted):
            raise CannotConvert(
                f"layer {name!r}: {wanted.__name__} is expected there, {type(module).__name__} came; the theorem knows no other."
            )
        if isinstance(module, nn.Linear):
            if module.bias is not None:
                raise CannotConvert(
                    f"layer {name!r}: it has a bias, which the theorem's networks have not; build it with bias=False."
                )
            weights.append(module.weight)
    if weights and len(network) % 2 == 0:
        raise CannotConvert(
            "The network ends with ReLU; the theorem's networks end with Linear: leave the last ReLU out."
        )
    return weights


def _check_layer(number: int, weight: np.ndarray, sparsity: int) -> None:
    counts = np.count_nonzero(weight, axis=1)
    if counts.max() > sparsity:
        raise CannotConvert(
            f"layer {number}: row {int(counts.argmax())} has {counts.max()} weights, sparsity={sparsity} allows that many at most; "
            f"raise it to {counts.max()}."
        )
    largest, found = _largest(weight, sparsity), float(np.abs(weight).max())
    if found > largest * (1 + ROUNDING):
        raise CannotConvert(
            f"layer {number}: its largest weight is {found:.6g}, at most 1/√{min(sparsity, weight.shape[1])} = {largest:.6g} is allowed; "
            f"divide the layer by {found / largest:.6g}, or let theory.scaled do it."
        )
    norm = spectral_norm(weight)
    if norm > 1 + ROUNDING:
        raise CannotConvert(
            f"layer {number}: its spectral norm is {norm:.6g}, at most 1 is allowed; "
            f"divide the layer by {norm:.6g}, or let theory.scaled do it."
        )
