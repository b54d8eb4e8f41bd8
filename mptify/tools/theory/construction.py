r"""The proof as a program: a random binary network is drawn, and masks are found in it that leave the target.

A layer $\sigma(W x)$ with $n$ outputs becomes $\sigma((\tilde M \odot U)^\top \sigma(\text{gain} \cdot (M \odot B) x))$, where
$B \in \{-1, +1\}^{k \times d}$ and $U \in \{-1, +1\}^{k \times n}$ are random. The $k$ neurons are cut into $n \cdot s$ blocks. Block
$(o, r)$ stands in for the $r$-th weight of row $o$, as lemma 1 has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mptify.nn.init import signs
from mptify.tools.theory.bounds import Bound, lemma3
from mptify.tools.theory.targets import Target

__all__ = [
    "Masks",
    "RandomNetwork",
    "Subnetwork",
    "block_size",
    "construct",
    "find_masks",
    "layer_bounds",
    "neurons_of",
]


class RandomNetwork:
    """The random signs B and U of every layer, as a seed determines them: an entry exists whether or not it was looked at.

    The proof looks at one column of B and one of U in each block. So each column of a block is a stream of its own, and only those
    are drawn that somebody asks for. A narrower network has the first neurons of each block.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._drawn: dict[str, np.ndarray] = {}

    def column(self, layer: str, matrix: str, block: int, column: int, size: int) -> np.ndarray:
        """One column of a block of `size` neurons, True where negative; `matrix` is B or U."""
        name = f"{layer}.{matrix}{column}.block{block}"
        drawn = self._drawn.get(name)
        if drawn is None or len(drawn) < size:
            drawn = self._drawn[name] = signs(self.seed, name, size)
        return drawn[:size]

    def whole(
        self, layer: str, shape: tuple[int, int], sparsity: int, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """B and U of one layer as matrices of ±1 (int8): for small sizes."""
        outputs, inputs = shape
        blocks, size = outputs * min(sparsity, inputs), block_size(shape, sparsity, width)
        sizes = [size] * blocks + [
            width - blocks * size
        ]  # the neurons left over form a block that is masked
        parts = []
        for matrix, columns in (("B", inputs), ("U", outputs)):
            for block, rows in enumerate(sizes):
                parts.append(
                    np.stack(
                        [
                            self.column(layer, matrix, block, column, rows)
                            for column in range(columns)
                        ],
                        axis=1,
                    )
                )
        return _as_numbers(np.concatenate(parts[: len(sizes)])), _as_numbers(
            np.concatenate(parts[len(sizes) :])
        )


@dataclass(frozen=True, eq=False)
class Masks:
    r"""What the masks of one layer keep. A surviving neuron has one entry in $M$ and one in $\tilde M$, so five numbers say all of it."""

    shape: tuple[int, int]
    gain: float
    neurons: np.ndarray  # which of the k
    inputs: np.ndarray  # the column of M's entry
    outputs: np.ndarray  # the column of M̃'s entry
    inner: np.ndarray  # B there, ±1
    outer: np.ndarray  # U there, ±1

    @property
    def nonzeros(self) -> int:
        return len(self.neurons)

    def dense(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        r"""$M$ and $\tilde M$ as matrices of booleans."""
        outputs, inputs = self.shape
        mask, outer_mask = np.zeros((width, inputs), bool), np.zeros((width, outputs), bool)
        mask[self.neurons, self.inputs] = True
        outer_mask[self.neurons, self.outputs] = True
        return mask, outer_mask

    @cached_property
    def sums(self) -> np.ndarray:
        r"""Sums of $U$ over the survivors with $B = +1$ and with $B = -1$, for every pair of output and input: 2 × n × d.

        $\sum_j u_j \sigma(\text{gain} \, b_j x_i)$ depends on nothing else, since each neuron sees one input.
        """
        outputs, inputs = self.shape
        places = ((self.inner < 0) * outputs + self.outputs) * inputs + self.inputs
        return np.bincount(places, self.outer, minlength=2 * outputs * inputs).reshape(
            2, outputs, inputs
        )

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """The layer at each row of `points`, before the outer ReLU."""
        up, down = self.gain * self.sums
        return np.maximum(points, 0) @ up.T + np.maximum(-points, 0) @ down.T


@dataclass(frozen=True, eq=False)
class Subnetwork:
    """The masked random network G, layer by layer."""

    layers: tuple[Masks, ...]

    @property
    def nonzeros(self) -> int:
        r"""$\lVert M \rVert_0 = \lVert \tilde M \rVert_0$ over all layers."""
        return sum(layer.nonzeros for layer in self.layers)

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """G at each row of `points`."""
        for layer in self.layers[:-1]:
            points = np.maximum(layer(points), 0)
        return self.layers[-1](points)


def layer_bounds(target: Target, epsilon: float, delta: float) -> list[Bound]:
    r"""Lemma 3 for each layer, with $\varepsilon / 2\ell$, $\delta / \ell$, the layer's own outputs, and $\min(s, \text{inputs})$ for $s$.

    The widest is the theorem's $k$ where $s \le d$ and $s \le n$. For $s > n$, weights of up to $1/\sqrt n$, which the theorem allows
    behind the first layer, break lemma 3's hypothesis of $1/\sqrt s$; with the minimum they don't.
    """
    shares = epsilon / (2 * target.depth), delta / target.depth
    return [
        lemma3(*shares, min(target.sparsity, weight.shape[1]), len(weight))
        for weight in target.weights
    ]


def construct(
    target: Target, epsilon: float, delta: float, network: RandomNetwork, width: int | None = None
) -> Subnetwork | None:
    """The proof's subnetwork of a random network, or None if a block has too few neurons of a kind: the probability is at most δ.

    `width` is the number of random neurons in each layer; the least that the theorem asks for unless given.
    """
    bounds = layer_bounds(target, epsilon, delta)
    width = max(bound.width for bound in bounds) if width is None else width
    layers = []
    for number, (weight, bound) in enumerate(zip(target.weights, bounds), 1):
        masks = find_masks(
            weight, bound.gain, target.sparsity, width, network, f"theory.layer{number}"
        )
        if masks is None:
            return None
        layers.append(masks)
    return Subnetwork(tuple(layers))


def find_masks(
    weight: np.ndarray, gain: float, sparsity: int, width: int, network: RandomNetwork, layer: str
) -> Masks | None:
    r"""Lemma 1 in every block: $c = \lfloor |\alpha| / \text{gain} \rfloor$ neurons for either sign of the input, or None.

    Those with $u = +1$ and $B = \text{sgn}\,\alpha$ are sought in the first half of the block, those with $u = -1$ and
    $B = -\text{sgn}\,\alpha$ in the second, as the proof does. Of several, the first are taken.
    """
    outputs, inputs = weight.shape
    size = block_size((outputs, inputs), sparsity, width)
    half = size // 2
    counts = neurons_of(weight, gain)
    kept = [(np.empty(0, np.int64),) * 3 + (np.empty(0, bool),) * 2]
    for output in range(outputs):
        for place, column in enumerate(np.flatnonzero(weight[output]).tolist()):
            count = counts[output, column]
            if count == 0:
                continue
            block = output * min(sparsity, inputs) + place
            inner = network.column(layer, "B", block, column, size)
            outer = network.column(layer, "U", block, output, size)
            falling = weight[output, column] < 0
            rising = np.flatnonzero(~outer[:half] & (inner[:half] == falling))[:count]
            sinking = np.flatnonzero(outer[half:] & (inner[half:] != falling))[:count]
            if len(rising) < count or len(sinking) < count:
                return None
            chosen = np.concatenate([rising, half + sinking])
            kept.append(
                (
                    block * size + chosen,
                    np.full(2 * count, column),
                    np.full(2 * count, output),
                    inner[chosen],
                    outer[chosen],
                )
            )
    neurons, columns, rows, inner, outer = (np.concatenate(parts) for parts in zip(*kept))
    return Masks(
        (outputs, inputs), gain, neurons, columns, rows, _as_numbers(inner), _as_numbers(outer)
    )


def block_size(shape: tuple[int, int], sparsity: int, width: int) -> int:
    """How many of `width` neurons each block of a layer gets; `shape` is outputs × inputs."""
    outputs, inputs = shape
    return width // (outputs * min(sparsity, inputs))


def neurons_of(weight: np.ndarray, gain: float) -> np.ndarray:
    """How many neurons each weight needs on either side: the proof's c."""
    return np.floor(np.abs(weight) / gain).astype(np.int64)


def _as_numbers(negative: np.ndarray) -> np.ndarray:
    return 1 - 2 * negative.astype(np.int8)
