"""The base class of search methods."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from torch import Tensor, nn

from mptify.config import SearchConfig
from mptify.errors import MptifyError
from mptify.nn.layers import Ticketed, WeightState
from mptify.surgery import transform
from mptify.training.callbacks import Callback
from mptify.training.evaluation import loss_of

__all__ = ["SearchMethod"]


class SearchMethod(Callback):
    """What a search trains, and what it does besides.

    A subclass is registered by the name that `method` takes. It is a [`Callback`][mptify.Callback]:
    override `on_step_end` or `on_epoch_begin` to change the network between steps (redraw weights,
    anneal), and `state_dict` if that needs state which must survive an interruption.

    Attributes:
        description: One line for reports and help texts.
        weight_bits: The bits of the ticket's weights, which override those of `bits`; None to
            leave them as they are.
        trains_weights: Whether the weights themselves are trained, so that no ticket comes out.

    Example:
        @methods.register("sleepy")
        class Sleepy(Biprop):
            def on_step_end(self, search, metrics):
                time.sleep(0.1)
    """

    description: ClassVar[str] = ""
    weight_bits: ClassVar[int | None] = 1
    trains_weights: ClassVar[bool] = False

    @classmethod
    def default_lr(cls, optimizer: str, activation_bits: int) -> float:
        """The learning rate, unless one is given."""
        if optimizer == "sgd":
            return 0.1
        return 0.03 if activation_bits == 1 else 0.01

    def prepare(self, model: nn.Module, config: SearchConfig) -> nn.Module:
        """The network to train: a new one.

        Args:
            model: A dense network, or a ticket model, which keeps its scores.
            config: The settings of the search.

        Raises:
            MptifyError: The method cannot train this network.
        """
        layers = [layer for layer in model.modules() if isinstance(layer, Ticketed)]
        if not layers:
            return transform(model, **dict(config.ticket))
        without_scores = any(layer.state is not WeightState.SEARCHING for layer in layers)
        if without_scores or all(_is_mask(layer.scores) for layer in layers):
            raise MptifyError(
                "This model was loaded from a ticket file, which holds masks but neither scores "
                "nor magnitudes to search with; `mptify search FILE` continues from a file."
            )
        return copy.deepcopy(model)

    def loss(self, output: Any, labels: Tensor, config: SearchConfig) -> Tensor:
        """The loss of a batch, summed over its images."""
        return loss_of(output, labels, config.label_smoothing)


def _is_mask(scores: Tensor) -> bool:
    return bool(((scores == 0) | (scores == 1)).all())
