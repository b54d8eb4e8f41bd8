"""`reset_classifier` for ticket models whose `forward` is a graph."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn

from mptify.errors import BadConfig, NotKept
from mptify.models.init_mode import InitMode
from mptify.nn.layers import WeightState
from mptify.nn.topk import kept_count
from mptify.surgery import layer_registry
from mptify.surgery.plans import plan_of

__all__ = ["reset_classifier_"]


def reset_classifier_(model: Any, num_classes: int, global_pool: str | None = None) -> None:
    """Replace the classifier by a fresh ticket layer, or remove it.

    Args:
        model: The ticket model.
        num_classes: The new number of classes; 0 removes the classifier.
        global_pool: Must be None, since the pooling is part of the graph.

    Raises:
        NotKept: The output does not come from one linear or conv of the classifier, that layer has
            lost its scores, or another pooling is requested.
        BadConfig: `num_classes` is not a whole number from 0.
    """
    if global_pool is not None:
        raise NotKept(
            f"reset_classifier(global_pool={global_pool!r}): the pooling is part of the graph; "
            "choose it before the transform."
        )
    if not isinstance(num_classes, int) or num_classes < 0:
        raise BadConfig(
            f"reset_classifier(num_classes={num_classes!r}): a whole number from 0 is needed."
        )
    path, plan = _output_layer(model), plan_of(model)
    old = model.get_submodule(path)
    fresh: nn.Module = (
        nn.Identity() if num_classes == 0 else _fresh_ticket(old, plan.config, path, num_classes)
    )
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, fresh)
    model.num_classes = num_classes
    shape = (num_classes, *old.shape[1:])
    kept = kept_count(math.prod(shape), plan.config.prune_of(path))
    planned = [
        replace(layer, shape=shape, kept=kept) if layer.name == path else layer
        for layer in plan.layers
    ]
    plan.layers = [layer for layer in planned if layer.name != path or num_classes]


def _output_layer(model: Any) -> str:
    """The layer of the classifier that computes the output."""
    layers = sorted(model.output_layers())
    layer = model.get_submodule(layers[0]) if len(layers) == 1 else None
    if layer is None or not any(
        f"{layers[0]}.".startswith(f"{path}.") for path in model.classifier_paths
    ):
        reason = f"the output comes from {', '.join(layers) or 'no ticket layer'}"
    elif layer.state is not WeightState.SEARCHING:
        reason = "it was loaded without scores"
    elif type(layer).dense_class().__init__ not in (nn.Linear.__init__, nn.Conv2d.__init__):
        reason = f"it is a {type(layer).__name__}"
    else:
        return layers[0]
    raise NotKept(
        f"{', '.join(model.classifier_paths)}: the classifier can't be replaced, since {reason}; "
        "give the network its number of classes before the transform."
    )


def _fresh_ticket(old: Any, config: Any, path: str, num_classes: int) -> nn.Module:
    if isinstance(old, nn.Linear):
        arguments: tuple = (old.in_features, num_classes)
    else:
        arguments = (
            old.in_channels,
            num_classes,
            old.kernel_size,
            old.stride,
            old.padding,
            old.dilation,
        )
    with InitMode(seed=config.seed):
        dense = (
            type(old).dense_class()(*arguments, bias=config.bias == "learn").to(old.compute_dtype)
        )
    handler = layer_registry.find(dense)
    assert handler is not None
    fresh: Any = handler.convert(dense, config, path)
    fresh.input_quantizer = old.input_quantizer
    if old.scope is not None:
        scope = fresh.scope = old.scope
        scope.layers[scope.layers.index(old)] = fresh
        scope.set_prune_(config.prune)
    return fresh.to(old.scores.device).train(old.training)
