"""biprop, the paper's algorithm."""

from __future__ import annotations

from mptify.registry import methods
from mptify.training.methods.base import SearchMethod

__all__ = ["Biprop"]


@methods.register("biprop")
class Biprop(SearchMethod):
    r"""Learn scores; keep the weights of largest $|S|$, binarized (paper, algorithm 1).

    The weight is $\alpha\,M \odot \mathrm{sign}(W)$, and the gradient of the scores goes straight
    through the mask $M$.
    """

    description = "biprop: learns which random weights to keep; those kept are ±gain"
