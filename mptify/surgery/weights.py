"""Every conv and linear weight that a traced model has, whoever holds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from mptify.surgery import handlers
from mptify.surgery.facts import CONTRACTIONS, argument
from mptify.surgery.trace import Traced, join

__all__ = ["FoundWeight", "weights_of"]


@dataclass(frozen=True)
class FoundWeight:
    """A conv or linear weight of the model, whoever holds it."""

    tensor: Any
    kind: str
    inputs: int
    axis: int
    attribute: str = "weight"
    owner: str = ""
    depthwise: bool = False
    obstacle: str = ""

    @property
    def count(self) -> int:
        return self.tensor.numel()


def weights_of(traced: Traced) -> Iterator[tuple[str, FoundWeight]]:
    """Every weight that could become a ticket, by name: of layers, of attention, and bare parameters."""
    for name, module in traced.model.named_modules():
        handlers.check_convertible(name, module)
        if isinstance(module, nn.MultiheadAttention):
            yield from _attention_weights(name, module)
        handler = handlers.find(module)
        if handler is not None:
            tensor = handler.stands_for(module).detach() if handler.stands_for else getattr(module, handler.weight)
            hooked = not handler.stands_for and handler.weight not in module._parameters
            found = FoundWeight(
                module._parameters.get(handler.weight, tensor) if not handler.stands_for else tensor,
                handler.kind or type(module).__name__,
                handler.inputs,
                handler.axis,
                attribute=handler.weight,
                depthwise=handler.depthwise,
                obstacle="a hook recomputes its weight" if hooked else "",
            )
            yield name, found
    yield from _bare_parameters(traced)


def _attention_weights(name: str, module: nn.MultiheadAttention) -> Iterator[tuple[str, FoundWeight]]:
    for attribute in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        parameter = module._parameters.get(attribute)
        if parameter is not None:
            yield join(name, attribute), FoundWeight(parameter, "MultiheadAttention", parameter.shape[1], -1, attribute, owner=name)


def _bare_parameters(traced: Traced) -> Iterator[tuple[str, FoundWeight]]:
    """Parameters that a traced `forward` hands to `F.linear` or `F.conv*` itself."""
    found: dict[str, FoundWeight] = {}
    for region in traced.regions:
        for graph in region.graphs.values():
            for node in graph.nodes:
                if node.op != "call_function" or node.target not in CONTRACTIONS:
                    continue
                weight = argument(node, 1, "weight")
                if not isinstance(weight, fx.Node) or weight.op != "get_attr":
                    continue
                owner, _, attribute = str(weight.target).rpartition(".")
                module = region.module.get_submodule(owner)
                parameter = module._parameters.get(attribute)
                if parameter is None or handlers.find(module) is not None:
                    continue
                axis = -1 if node.target is F.linear else 1
                groups = node.kwargs.get("groups", node.args[6] if len(node.args) > 6 else 1)
                inputs = parameter.shape[1] * (groups if isinstance(groups, int) and axis == 1 else 1)
                kind = "F." + node.target.__name__
                found[join(region.path, str(weight.target))] = FoundWeight(
                    parameter, kind, inputs, axis, attribute, owner=join(region.path, owner)
                )
    yield from found.items()
