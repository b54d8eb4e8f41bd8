r"""The theorem's networks: fully connected, with ReLU, without biases, with bounded weights.

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

ROUNDING = 1e-9  # relative tolerance in float64 for quantities that equal their bounds


@dataclass(frozen=True, eq=False)
class Target:
    r"""A network that meets the hypotheses; `as_target` creates one.

    In each layer, a row has at most $s$ non-zero weights, no weight exceeds
    $1/\sqrt{\min(s, \text{inputs})}$, and $\lVert W \rVert_2 \le 1$. The proof uses only this. The
    theorem demands more: at most $1/\sqrt n$ from the second layer on.

    Attributes:
        weights: The weight matrices, outputs × inputs.
        sparsity: $s$.
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
        """The theorem's n: the most outputs of a layer, 1 for a single layer with one output."""
        return max(len(weight) for weight in self.weights)

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """F at each row of `points`."""
        for weight in self.weights[:-1]:
            points = np.maximum(points @ weight.T, 0)
        return points @ self.weights[-1].T


def as_target(
    network: Target | nn.Sequential | Iterable[Any], sparsity: int | None = None
) -> Target:
    """Check that a network meets the hypotheses of the theorem.

    Args:
        network: Weight matrices (numpy or torch), first layer first, or an `nn.Sequential` of
            `Linear(bias=False)` and `ReLU`.
        sparsity: The most weights in a row; counted by default.

    Returns:
        The network as a target.

    Raises:
        BadConfig: `sparsity` is below 1.
        CannotConvert: The network does not meet the hypotheses.
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
    """Scale each layer down until the network meets the hypotheses.

    ReLU networks without biases are positively homogeneous, so the network equals the returned
    factor times the target.

    Args:
        network: Weight matrices or an `nn.Sequential`, as for `as_target`.
        sparsity: The most weights in a row; counted by default.

    Returns:
        The target, and the product of the divisors.
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
    r"""Draw a target with uniform weights and one output.

    $|W^{(1)}| \le 1/\sqrt s$, and $|W^{(i)}| \le 1/\sqrt n$ in later layers. Each row has
    `sparsity` weights at random places. A layer with a spectral norm above 1 is divided by it.

    Args:
        depth: Layers.
        width: Neurons in each hidden layer.
        sparsity: Weights in each row; rows are dense by default.
        inputs: Inputs; `width` by default.
        seed: The seed of the weights.

    Returns:
        The target.
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
    r"""Draw a target with the largest weights allowed and one output. It needs the most neurons.

    The rows are those of Hadamard matrices of size $s$ with random signs, times $1/\sqrt s$ in the
    first layer and $1/\sqrt n$ in later ones. They are orthogonal, so for $s = n$ every hypothesis
    holds with equality.

    Args:
        depth: Layers.
        width: Neurons in each hidden layer.
        sparsity: Weights in each row, a power of two; rows are dense by default.
        inputs: Inputs; `width` by default.
        seed: The seed of the signs.

    Returns:
        The target.
    """
    shapes, sparsity = _shapes(depth, width, sparsity, inputs)
    weights = []
    for number, (rows, columns) in enumerate(shapes, 1):
        size = min(sparsity, columns)
        if size & (size - 1):
            raise BadConfig(
                f"{size} weights in a row: the extreme target consists of Hadamard matrices of "
                f"that size, which should be a power of two."
            )
        hadamard = np.ones((1, 1))
        while len(hadamard) < size:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        values = np.zeros((rows, columns))
        orthogonal = columns // size * size  # any further rows stay 0
        for row in range(min(rows, orthogonal)):
            values[row, row // size * size :][:size] = hadamard[row % size]
        values *= 1.0 - 2.0 * signs(seed, f"theory.target{number}.columns", columns)
        weights.append(values / math.sqrt(sparsity if number == 1 else columns))
    return as_target(weights, sparsity)


def spectral_norm(weight: np.ndarray) -> float:
    """The largest singular value."""
    return float(np.linalg.norm(weight, 2))


def _largest(weight: np.ndarray, sparsity: int) -> float:
    """The largest weight that the hypotheses allow."""
    return 1 / math.sqrt(min(sparsity, weight.shape[1]))


def _shapes(
    depth: int, width: int, sparsity: int | None, inputs: int | None
) -> tuple[list[tuple[int, int]], int]:
    """The shape of each layer, and the sparsity. Defaults are `width` inputs and dense rows."""
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
    """The weights in float64, after all checks that do not depend on the sparsity."""
    given = _linears(network) if isinstance(network, nn.Module) else list(network)
    if not given:
        raise CannotConvert("The network has no layers; at least one weight matrix is needed.")
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
                f"layer {number}: a matrix of outputs × inputs is needed, but this one has the "
                f"shape {weight.shape}; pass a single layer as [weight]."
            )
        if not np.isfinite(weight).all():
            count = int((~np.isfinite(weight)).sum())
            raise CannotConvert(
                f"layer {number}: its weights should be finite, but {count} are not."
            )
        if weights and weight.shape[1] != len(weights[-1]):
            raise CannotConvert(
                f"layer {number}: it takes {weight.shape[1]} inputs, but the layer before it has "
                f"{len(weights[-1])} outputs; transpose matrices that are inputs × outputs."
            )
        weights.append(weight)
    return weights


def _linears(network: nn.Module) -> list[Tensor]:
    """The weights of Linear, ReLU, Linear, ..., Linear."""
    if not isinstance(network, nn.Sequential):
        raise CannotConvert(
            f"{type(network).__name__}: an nn.Sequential of Linear(bias=False) and ReLU is needed, "
            f"or a list of weights."
        )
    weights: list[Tensor] = []
    for place, (name, module) in enumerate(network.named_children()):
        expected = nn.Linear if place % 2 == 0 else nn.ReLU
        if not isinstance(module, expected):
            raise CannotConvert(
                f"layer {name!r}: should be {expected.__name__}, not {type(module).__name__}; "
                f"the theorem's networks alternate Linear and ReLU."
            )
        if isinstance(module, nn.Linear):
            if module.bias is not None:
                raise CannotConvert(
                    f"layer {name!r}: the theorem's networks have no biases; "
                    f"build it with bias=False."
                )
            weights.append(module.weight)
    if weights and len(network) % 2 == 0:
        raise CannotConvert(
            "The network ends with ReLU, but the theorem's networks end with Linear; "
            "leave out the last ReLU."
        )
    return weights


def _check_layer(number: int, weight: np.ndarray, sparsity: int) -> None:
    counts = np.count_nonzero(weight, axis=1)
    if counts.max() > sparsity:
        raise CannotConvert(
            f"layer {number}: row {int(counts.argmax())} has {counts.max()} weights, but "
            f"sparsity={sparsity} allows {sparsity}; raise it to {counts.max()}."
        )
    allowed, largest = _largest(weight, sparsity), float(np.abs(weight).max())
    if largest > allowed * (1 + ROUNDING):
        raise CannotConvert(
            f"layer {number}: its largest weight is {largest:.6g}, but at most "
            f"1/√{min(sparsity, weight.shape[1])} = {allowed:.6g} is allowed; "
            f"divide the layer by {largest / allowed:.6g}, or let theory.scaled do it."
        )
    norm = spectral_norm(weight)
    if norm > 1 + ROUNDING:
        raise CannotConvert(
            f"layer {number}: its spectral norm is {norm:.6g}, but at most 1 is allowed; "
            f"divide the layer by {norm:.6g}, or let theory.scaled do it."
        )
