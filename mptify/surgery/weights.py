"""Every conv and linear weight that a traced model has, whoever holds it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from mptify.nn.quantizing_weight import CONTRACTIONS, PRODUCTS
from mptify.surgery import layer_registry
from mptify.surgery.dataflow import argument
from mptify.surgery.trace import Region, Traced, join

__all__ = ["RECURRENT", "UNTRACED_USE", "FoundWeight", "OtherParameter", "other_parameters", "weights_of"]

RECURRENT = "recurrent layers are not converted"
UNTRACED_USE = "code that can't be traced uses it"


@dataclass(frozen=True)
class FoundWeight:
    """A conv or linear weight of the model, whoever holds it."""

    tensor: Any
    kind: str
    inputs: int
    axis: int
    attribute: str = "weight"
    owner: str = ""  # of a bare parameter: the module that holds it
    bare: bool = False  # handed to a function by its owner, rather than part of a layer that is called
    depthwise: bool = False
    obstacle: str = ""

    @property
    def count(self) -> int:
        return self.tensor.numel()


def weights_of(traced: Traced) -> Iterator[tuple[str, FoundWeight]]:
    """Every weight that could become a ticket, by name: of layers, of attention, and bare parameters."""
    for name, module in traced.model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield from _scripted_weights(name, module)
            continue
        layer_registry.check_convertible(name, module)
        if isinstance(module, nn.MultiheadAttention):
            yield from _attention_weights(name, module)
        handler = layer_registry.find(module)
        if handler is not None:
            tensor = handler.compute_weight(module).detach() if handler.compute_weight else getattr(module, handler.weight)
            hooked = not handler.compute_weight and handler.weight not in module._parameters
            found = FoundWeight(
                module._parameters.get(handler.weight, tensor) if not handler.compute_weight else tensor,
                handler.kind or type(module).__name__,
                handler.inputs,
                handler.axis,
                attribute=handler.weight,
                depthwise=handler.depthwise,
                obstacle="a hook recomputes its weight" if hooked else "",
            )
            yield name, found
    yield from _bare_parameters(traced)


def _scripted_weights(name: str, module: torch.jit.ScriptModule) -> Iterator[tuple[str, FoundWeight]]:
    kind = str(getattr(module, "original_name", ""))
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is not None and kind.startswith(("Conv", "Linear")):
        axis, obstacle = -1 if kind == "Linear" else 1, "TorchScript code can't be rewritten"
        yield name, FoundWeight(weight, kind, weight.shape[1], axis, obstacle=obstacle)


def _attention_weights(name: str, module: nn.MultiheadAttention) -> Iterator[tuple[str, FoundWeight]]:
    for attribute in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        parameter = module._parameters.get(attribute)
        if parameter is not None:
            found = FoundWeight(parameter, "MultiheadAttention", parameter.shape[1], -1, attribute, owner=name, bare=True)
            yield join(name, attribute), found


def _bare_parameters(traced: Traced) -> Iterator[tuple[str, FoundWeight]]:
    """Parameters that a traced `forward` hands to `F.linear` or `F.conv*` itself, or multiplies values with in some other way."""
    handed: dict[str, FoundWeight] = {}
    multiplied: dict[str, FoundWeight] = {}
    for region in traced.regions:
        for graph in region.graphs.values():
            values = _made_of_inputs(graph)
            for node in graph.nodes:
                if node.op == "call_function" and node.target in CONTRACTIONS:
                    weight = argument(node, 1, "weight")
                    if _is_bare(weight, region):
                        handed[join(region.path, str(weight.target))] = _handed_over(node, weight, region)
                elif node.op in ("call_function", "call_method") and layer_registry.target_name(node.target) in PRODUCTS and node in values:
                    for weight in node.all_input_nodes:
                        if _is_bare(weight, region) and _parameter(weight, region).dim() > 1:
                            multiplied[join(region.path, str(weight.target))] = _multiplied(node, weight, region)
    yield from (multiplied | handed).items()


def _made_of_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The values that change from batch to batch; the others are tables."""
    values: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(one in values for one in node.all_input_nodes):
            values.add(node)
    return values


def _is_bare(weight: Any, region: Region) -> bool:
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return False
    module = region.module.get_submodule(str(weight.target).rpartition(".")[0])
    return _parameter(weight, region) is not None and layer_registry.find(module) is None


def _parameter(weight: fx.Node, region: Region) -> Any:
    owner, _, attribute = str(weight.target).rpartition(".")
    return region.module.get_submodule(owner)._parameters.get(attribute)


def _multiplied(node: fx.Node, weight: fx.Node, region: Region) -> FoundWeight:
    parameter, function = _parameter(weight, region), layer_registry.target_name(node.target)
    obstacle = f"a parameter that {function} multiplies, not a layer"
    return FoundWeight(parameter, function, parameter.shape[0], -1, bare=True, obstacle=obstacle)


def _handed_over(node: fx.Node, weight: fx.Node, region: Region) -> FoundWeight:
    owner, _, attribute = str(weight.target).rpartition(".")
    parameter, function = _parameter(weight, region), layer_registry.target_name(node.target)
    axis = -1 if node.target is F.linear else 1
    if "transpose" in function:
        inputs = parameter.shape[0]
    else:
        groups = argument(node, 6, "groups")
        inputs = parameter.shape[1] * (groups if isinstance(groups, int) and axis == 1 else 1)
    return FoundWeight(parameter, f"F.{function}", inputs, axis, attribute, owner=join(region.path, owner), bare=True)


# -- all the others ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OtherParameter:
    """A parameter of two or more dimensions that no ticket can cover.

    `obstacle` says why if it is a weight, or may be one; a parameter without is added, concatenated, looked up, or unused.
    """

    name: str
    tensor: Any
    obstacle: str


def other_parameters(traced: Traced, found: Collection[FoundWeight]) -> Iterator[OtherParameter]:
    """Every parameter of two or more dimensions that `weights_of` does not list: position embeddings, tokens, tables and the like."""
    seen = {id(weight.tensor) for weight in found}
    for path, module in traced.model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or layer_registry.find(module) is not None:
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dim() < 2 or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                obstacle = RECURRENT
            else:
                obstacle = "" if isinstance(module, _KNOWN_USE) or _is_followed(traced, path) else UNTRACED_USE
            yield OtherParameter(join(path, name), parameter, obstacle)


_KNOWN_USE = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.MultiheadAttention)


def _is_followed(traced: Traced, path: str) -> bool:
    """Whether the code of the module at `path` is part of some region's graph."""
    for region in traced.regions:
        inside = path.removeprefix(region.path).lstrip(".") if region.path else path
        if region.graphs and join(region.path, inside) == path:
            called = {str(node.target) for graph in region.graphs.values() for node in graph.nodes if node.op == "call_module"}
            if not any(f"{inside}.".startswith(f"{one}.") for one in called):
                return True
    return False
