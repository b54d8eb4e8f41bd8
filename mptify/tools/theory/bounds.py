r"""How many random neurons the lemmas and the theorem ask for, and what they promise of the masks.

Each statement is made of the one before it, with its own share of $\varepsilon$ and $\delta$:

| statement | stands in for | calls | with $\varepsilon' =$ | and $\delta' =$ |
| --- | --- | --- | --- | --- |
| lemma 1 | $\alpha x_i$ | | | |
| lemma 2 | $\langle w, x \rangle$, at most $s$ weights | lemma 1, $s$ times | $\varepsilon / s$ | $\delta / s$ |
| lemma 3 | $\sigma(W x)$, $n$ rows | lemma 2, $n$ times | $\varepsilon / \sqrt n$ | $\delta / n$ |
| theorem | $\ell$ layers | lemma 3, $\ell$ times | $\varepsilon / 2\ell$ | $\delta / \ell$ |

The gain inside of a block is the $\varepsilon'$ that has arrived at lemma 1. The paper prints $\varepsilon$ in all four places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mptify.errors import BadConfig

__all__ = ["Bound", "lemma1", "lemma2", "lemma3", "theorem"]


@dataclass(frozen=True)
class Bound:
    r"""What a statement asks for, and what it promises.

    `width` is $k$, the least whole number of random neurons. `gain` is the factor inside of the inner ReLU,
    $\sigma(\text{gain} \cdot (M \odot B) x)$. `nonzeros` bounds $\lVert M \rVert_0 = \lVert \tilde M \rVert_0$.
    """

    width: int
    gain: float
    nonzeros: float


def lemma1(epsilon: float, delta: float, sparsity: int) -> Bound:
    r"""One weight, $|\alpha| \le 1/\sqrt s$.

    $k \ge 16 / (\varepsilon \sqrt s) + 16 \log(2/\delta)$, and $\lVert M \rVert_0 \le 2 / (\varepsilon \sqrt s)$.

    With $c = \lfloor |\alpha| / \varepsilon \rfloor$, the masks keep $c$ neurons that have $u = +1$ and $B_{ji} = \text{sgn}\,\alpha$, and
    $c$ that have $u = -1$ and $B_{ji} = -\text{sgn}\,\alpha$. As $\sigma(a) - \sigma(-a) = a$, these give
    $c \, \varepsilon \, \text{sgn}(\alpha) \, x_i$.
    """
    _check(epsilon, delta, sparsity=sparsity)
    root = math.sqrt(sparsity)
    return Bound(
        math.ceil(16 / (epsilon * root) + 16 * math.log(2 / delta)), epsilon, 2 / (epsilon * root)
    )


def lemma2(epsilon: float, delta: float, sparsity: int) -> Bound:
    r"""One neuron before its ReLU, $\langle w, x \rangle$ with at most $s$ weights.

    $k \ge s \lceil 16 \sqrt s / \varepsilon + 16 \log(2s/\delta) \rceil$, and $\lVert M \rVert_0 \le 2 s \sqrt s / \varepsilon$.
    """
    _check(epsilon, delta, sparsity=sparsity)
    weight = lemma1(epsilon / sparsity, delta / sparsity, sparsity)
    return Bound(sparsity * weight.width, weight.gain, sparsity * weight.nonzeros)


def lemma3(epsilon: float, delta: float, sparsity: int, outputs: int) -> Bound:
    r"""One layer of $n$ `outputs`, each with at most $s$ weights.

    $k \ge ns \lceil 16 \sqrt{ns} / \varepsilon + 16 \log(2ns/\delta) \rceil$, and $\lVert M \rVert_0 \le 2 ns \sqrt{ns} / \varepsilon$.
    """
    _check(epsilon, delta, sparsity=sparsity, outputs=outputs)
    row = lemma2(epsilon / math.sqrt(outputs), delta / outputs, sparsity)
    return Bound(outputs * row.width, row.gain, outputs * row.nonzeros)


def theorem(epsilon: float, delta: float, sparsity: int, width: int, depth: int) -> Bound:
    r"""A network of $\ell$ layers (`depth`), none of more than $n$ outputs (`width`).

    $k \ge ns \lceil 32 \ell \sqrt{ns} / \varepsilon + 16 \log(2ns\ell/\delta) \rceil$, and
    $\lVert M \rVert_0 \le 4 ns \ell^2 \sqrt{ns} / \varepsilon$ over all layers. The gain is that of a layer with $n$ outputs,
    $\varepsilon / (2 \ell s \sqrt n)$.
    """
    _check(epsilon, delta, sparsity=sparsity, width=width, depth=depth)
    if epsilon >= 1:
        raise BadConfig(f"epsilon={epsilon:g}: the theorem is for an error above 0 and below 1.")
    layer = lemma3(epsilon / (2 * depth), delta / depth, sparsity, width)
    return Bound(layer.width, layer.gain, depth * layer.nonzeros)


def _check(epsilon: float, delta: float, **counts: int) -> None:
    if not 0 < epsilon < math.inf:
        raise BadConfig(f"epsilon={epsilon:g}: the error that is allowed should be above 0.")
    if not 0 < delta < 1:
        raise BadConfig(
            f"delta={delta:g}: the chance of failure that is allowed should be above 0 and below 1."
        )
    for name, count in counts.items():
        if count < 1:
            raise BadConfig(f"{name}={count}: at least 1 is needed.")
