r"""The proof as a program: draw a random binary network, and mask it to approximate the target.

A layer $\sigma(W x)$ with $n$ outputs becomes
$\sigma((\tilde M \odot U)^\top \sigma(\text{gain} \cdot (M \odot B) x))$ with random
$B \in \{-1, +1\}^{k \times d}$ and $U \in \{-1, +1\}^{k \times n}$. Its $k$ neurons are divided
into $n \cdot s$ blocks. Block $(o, r)$ approximates the $r$-th weight of row $o$, by lemma 1.
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
    """The random signs B and U of every layer, which the seed determines.

    In each block, the proof reads one column of B and one of U. So each column of a block has its
    own random stream, and is drawn when it is first read. A narrower network has the first neurons
    of each block.

    Args:
        seed: The seed.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._drawn: dict[str, np.ndarray] = {}

    def column(self, layer: str, matrix: str, block: int, column: int, size: int) -> np.ndarray:
        """Draw one column of a block.

        Args:
            layer: The name of the layer.
            matrix: `"B"` or `"U"`.
            block: The number of the block.
            column: The number of the column.
            size: Neurons in the block.

        Returns:
            True where the sign is negative.
        """
        name = f"{layer}.{matrix}{column}.block{block}"
        drawn = self._drawn.get(name)
        if drawn is None or len(drawn) < size:
            drawn = self._drawn[name] = signs(self.seed, name, size)
        return drawn[:size]

    def whole(
        self, layer: str, shape: tuple[int, int], sparsity: int, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw B and U of one layer as int8 matrices of ±1, for small networks.

        Args:
            layer: The name of the layer.
            shape: Outputs × inputs.
            sparsity: The most weights in a row.
            width: Neurons in the layer.

        Returns:
            B and U.
        """
        outputs, inputs = shape
        blocks, size = outputs * min(sparsity, inputs), block_size(shape, sparsity, width)
        sizes = [size] * blocks + [width - blocks * size]  # the last block is masked

        def draw(matrix: str, columns: int) -> np.ndarray:
            parts = [
                np.stack(
                    [self.column(layer, matrix, block, column, rows) for column in range(columns)],
                    axis=1,
                )
                for block, rows in enumerate(sizes)
            ]
            return _as_signs(np.concatenate(parts))

        return draw("B", inputs), draw("U", outputs)


@dataclass(frozen=True, eq=False)
class Masks:
    r"""The masks of one layer. A surviving neuron has one entry in $M$ and one in $\tilde M$.

    Attributes:
        shape: Outputs × inputs.
        gain: The factor inside the inner ReLU.
        neurons: The survivors among the $k$ neurons.
        inputs: The column of each survivor's entry in $M$.
        outputs: The column of its entry in $\tilde M$.
        inner: The sign of $B$ at its entry.
        outer: The sign of $U$ at its entry.
    """

    shape: tuple[int, int]
    gain: float
    neurons: np.ndarray
    inputs: np.ndarray
    outputs: np.ndarray
    inner: np.ndarray
    outer: np.ndarray

    @property
    def nonzeros(self) -> int:
        r"""$\lVert M \rVert_0 = \lVert \tilde M \rVert_0$."""
        return len(self.neurons)

    def dense(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        r"""$M$ and $\tilde M$ as boolean matrices of `width` rows."""
        outputs, inputs = self.shape
        mask, outer_mask = np.zeros((width, inputs), bool), np.zeros((width, outputs), bool)
        mask[self.neurons, self.inputs] = True
        outer_mask[self.neurons, self.outputs] = True
        return mask, outer_mask

    @cached_property
    def sums(self) -> np.ndarray:
        r"""Sums of $U$ over the survivors with $B = +1$ and with $B = -1$, of shape 2 × n × d.

        They determine $\sum_j u_j \sigma(\text{gain} \, b_j x_i)$ for each pair of output and
        input, since each neuron sees one input.
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
    r"""Apply lemma 3 to each layer, with $\varepsilon / 2\ell$ and $\delta / \ell$.

    $\min(s, \text{inputs})$ takes the place of $s$. The largest width is the theorem's $k$ if
    $s \le d$ and $s \le n$. For $s > n$, the theorem allows weights up to $1/\sqrt n$ after the
    first layer, which violate lemma 3's hypothesis of $1/\sqrt s$, but not that with the minimum.

    Args:
        target: The network.
        epsilon: The largest error allowed.
        delta: The largest probability of failure allowed.

    Returns:
        One bound per layer.
    """
    shares = epsilon / (2 * target.depth), delta / target.depth
    return [
        lemma3(*shares, min(target.sparsity, weight.shape[1]), len(weight))
        for weight in target.weights
    ]


def construct(
    target: Target, epsilon: float, delta: float, network: RandomNetwork, width: int | None = None
) -> Subnetwork | None:
    """Find the proof's subnetwork of a random network.

    Args:
        target: The network to approximate.
        epsilon: The largest error allowed.
        delta: The largest probability of failure allowed.
        network: The random network.
        width: Neurons in each random layer; by default the fewest that the theorem allows.

    Returns:
        The subnetwork, or None if a block has too few neurons of one kind, which happens with a
        probability of at most δ.
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
    r"""Apply lemma 1 in every block.

    The masks keep $c = \lfloor |\alpha| / \text{gain} \rfloor$ neurons per sign. As in the proof,
    neurons with $u = +1$ and $B = \text{sgn}\,\alpha$ come from the first half of the block, and
    neurons with $u = -1$ and $B = -\text{sgn}\,\alpha$ from the second. The first ones of each are
    kept.

    Args:
        weight: The weights of the layer, outputs × inputs.
        gain: The factor inside the inner ReLU.
        sparsity: The most weights in a row.
        width: Neurons in the random layer.
        network: The random network.
        layer: The name of the layer.

    Returns:
        The masks, or None if a block has too few neurons.
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
            negative = weight[output, column] < 0
            rising = np.flatnonzero(~outer[:half] & (inner[:half] == negative))[:count]
            sinking = np.flatnonzero(outer[half:] & (inner[half:] != negative))[:count]
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
        (outputs, inputs), gain, neurons, columns, rows, _as_signs(inner), _as_signs(outer)
    )


def block_size(shape: tuple[int, int], sparsity: int, width: int) -> int:
    """The neurons in each block of a layer; `shape` is outputs × inputs."""
    outputs, inputs = shape
    return width // (outputs * min(sparsity, inputs))


def neurons_of(weight: np.ndarray, gain: float) -> np.ndarray:
    """The number of neurons per sign that each weight needs: the proof's c."""
    return np.floor(np.abs(weight) / gain).astype(np.int64)


def _as_signs(negative: np.ndarray) -> np.ndarray:
    return 1 - 2 * negative.astype(np.int8)
