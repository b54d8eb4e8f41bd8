"""edge-popup, which biprop builds on."""

from __future__ import annotations

from mptify.registry import methods
from mptify.training.methods.base import SearchMethod

__all__ = ["EdgePopup"]


@methods.register("edgepopup")
class EdgePopup(SearchMethod):
    r"""Learn scores as biprop does, with 32-bit frozen weights $M \odot W$.

    Ramanujan et al., "What's hidden in a randomly weighted neural network?", CVPR 2020.
    """

    description = "edge-popup: learns which random weights to keep; those kept stay as drawn"
    weight_bits = 32
