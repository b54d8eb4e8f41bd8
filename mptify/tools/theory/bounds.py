r"""The number of random neurons that the lemmas and the theorem need, and the size of the masks.

Each statement applies the one before it, with a share of its $\varepsilon$ and $\delta$:

| statement | approximates | applies | with $\varepsilon' =$ | and $\delta' =$ |
| --- | --- | --- | --- | --- |
| lemma 1 | $\alpha x_i$ | | | |
| lemma 2 | $\langle w, x \rangle$, $s$ weights | lemma 1, $s$ × | $\varepsilon/s$ | $\delta/s$ |
| lemma 3 | $\sigma(W x)$, $n$ rows | lemma 2, $n$ times | $\varepsilon / \sqrt n$ | $\delta / n$ |
| theorem | $\ell$ layers | lemma 3, $\ell$ times | $\varepsilon / 2\ell$ | $\delta / \ell$ |

The gain inside a block is the $\varepsilon'$ of lemma 1. The paper prints $\varepsilon$ in all four
places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mptify.errors import BadConfig

__all__ = ["Bound", "lemma1", "lemma2", "lemma3", "theorem"]


@dataclass(frozen=True)
class Bound:
    r"""What a statement needs, and what it promises.

    Attributes:
        width: $k$, the smallest integer number of random neurons.
        gain: The factor inside the inner ReLU, $\sigma(\text{gain} \cdot (M \odot B) x)$.
        nonzeros: The upper bound of $\lVert M \rVert_0 = \lVert \tilde M \rVert_0$.
    """

    width: int
    gain: float
    nonzeros: float


def lemma1(epsilon: float, delta: float, sparsity: int) -> Bound:
    r"""One weight, $|\alpha| \le 1/\sqrt s$.

    $k \ge 16 / (\varepsilon \sqrt s) + 16 \log(2/\delta)$, and
    $\lVert M \rVert_0 \le 2 / (\varepsilon \sqrt s)$.

    With $c = \lfloor |\alpha| / \varepsilon \rfloor$, the masks keep $c$ neurons with $u = +1$ and
    $B_{ji} = \text{sgn}\,\alpha$, and $c$ neurons with $u = -1$ and $B_{ji} = -\text{sgn}\,\alpha$.
    Since $\sigma(a) - \sigma(-a) = a$, their sum is
    $c \, \varepsilon \, \text{sgn}(\alpha) \, x_i$.

    Args:
        epsilon: The largest error allowed.
        delta: The largest probability of failure allowed.
        sparsity: $s$, the most weights in a row.

    Returns:
        The bound.
    """
    _check(epsilon, delta, sparsity=sparsity)
    root = math.sqrt(sparsity)
    return Bound(
        math.ceil(16 / (epsilon * root) + 16 * math.log(2 / delta)), epsilon, 2 / (epsilon * root)
    )


def lemma2(epsilon: float, delta: float, sparsity: int) -> Bound:
    r"""One neuron before its ReLU, $\langle w, x \rangle$ with at most $s$ weights.

    $k \ge s \lceil 16 \sqrt s / \varepsilon + 16 \log(2s/\delta) \rceil$, and
    $\lVert M \rVert_0 \le 2 s \sqrt s / \varepsilon$.

    Args:
        epsilon: The largest error allowed.
        delta: The largest probability of failure allowed.
        sparsity: $s$.

    Returns:
        The bound.
    """
    _check(epsilon, delta, sparsity=sparsity)
    weight = lemma1(epsilon / sparsity, delta / sparsity, sparsity)
    return Bound(sparsity * weight.width, weight.gain, sparsity * weight.nonzeros)


def lemma3(epsilon: float, delta: float, sparsity: int, outputs: int) -> Bound:
    r"""One layer with $n$ outputs, each with at most $s$ weights.

    $k \ge ns \lceil 16 \sqrt{ns} / \varepsilon + 16 \log(2ns/\delta) \rceil$, and
    $\lVert M \rVert_0 \le 2 ns \sqrt{ns} / \varepsilon$.

    Args:
        epsilon: The largest error allowed.
        delta: The largest probability of failure allowed.
        sparsity: $s$.
        outputs: $n$.

    Returns:
        The bound.
    """
    _check(epsilon, delta, sparsity=sparsity, outputs=outputs)
    row = lemma2(epsilon / math.sqrt(outputs), delta / outputs, sparsity)
    return Bound(outputs * row.width, row.gain, outputs * row.nonzeros)


def theorem(epsilon: float, delta: float, sparsity: int, width: int, depth: int) -> Bound:
    r"""A network of $\ell$ layers with at most $n$ outputs each.

    $k \ge ns \lceil 32 \ell \sqrt{ns} / \varepsilon + 16 \log(2ns\ell/\delta) \rceil$, and
    $\lVert M \rVert_0 \le 4 ns \ell^2 \sqrt{ns} / \varepsilon$ over all layers. The gain is that of
    a layer with $n$ outputs, $\varepsilon / (2 \ell s \sqrt n)$.

    Args:
        epsilon: The largest error allowed, below 1.
        delta: The largest probability of failure allowed.
        sparsity: $s$.
        width: $n$.
        depth: $\ell$.

    Returns:
        The bound.
    """
    _check(epsilon, delta, sparsity=sparsity, width=width, depth=depth)
    if epsilon >= 1:
        raise BadConfig(f"epsilon={epsilon:g}: the theorem needs an error above 0 and below 1.")
    layer = lemma3(epsilon / (2 * depth), delta / depth, sparsity, width)
    return Bound(layer.width, layer.gain, depth * layer.nonzeros)


def _check(epsilon: float, delta: float, **counts: int) -> None:
    if not 0 < epsilon < math.inf:
        raise BadConfig(f"epsilon={epsilon:g}: the allowed error should be above 0.")
    if not 0 < delta < 1:
        raise BadConfig(
            f"delta={delta:g}: the allowed probability of failure should be above 0 and below 1."
        )
    for name, count in counts.items():
        if count < 1:
            raise BadConfig(f"{name}={count}: at least 1 is needed.")
