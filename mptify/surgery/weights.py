"""Find every conv and linear weight of a traced model."""

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
from mptify.surgery.plans import Obstacle, Reason
from mptify.surgery.trace import Region, Traced, join

__all__ = ["FoundWeight", "OtherParameter", "other_parameters", "weights_of"]


@dataclass(frozen=True)
class FoundWeight:
    """A conv or linear weight of the model."""

    tensor: Any
    kind: str
    inputs: int
    axis: int
    attribute: str = "weight"
    owner: str = ""  # of a parameter that is not a layer's: the module that holds it
    functional: bool = False  # its owner passes it to a function itself
    arguments: tuple[str, ...] = ()  # of a composite's `forward`: those it is multiplied with
    depthwise: bool = False
    obstacle: Obstacle | None = None

    @property
    def count(self) -> int:
        return self.tensor.numel()


def weights_of(traced: Traced) -> Iterator[tuple[str, FoundWeight]]:
    """Every weight that could become a ticket, by name: of layers, of composites, of functions."""
    for name, module in traced.model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield from _scripted_weights(name, module)
            continue
        layer_registry.check_convertible(name, module)
        yield from _composite_weights(name, module)
        handler = layer_registry.find(module)
        if handler is not None:
            tensor = (
                handler.compute_weight(module).detach()
                if handler.compute_weight
                else getattr(module, handler.weight)
            )
            hooked = not handler.compute_weight and handler.weight not in module._parameters
            found = FoundWeight(
                module._parameters.get(handler.weight, tensor)
                if not handler.compute_weight
                else tensor,
                handler.kind or type(module).__name__,
                handler.inputs,
                handler.axis,
                attribute=handler.weight,
                depthwise=handler.depthwise,
                obstacle=Obstacle(Reason.HOOKED) if hooked else None,
            )
            yield name, found
    yield from _functional_weights(traced)


def _scripted_weights(
    name: str, module: torch.jit.ScriptModule
) -> Iterator[tuple[str, FoundWeight]]:
    kind = str(getattr(module, "original_name", ""))
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is not None and kind.startswith(("Conv", "Linear")):
        axis, obstacle = -1 if kind == "Linear" else 1, Obstacle(Reason.TORCHSCRIPT)
        yield name, FoundWeight(weight, kind, weight.shape[1], axis, obstacle=obstacle)


def _composite_weights(name: str, module: nn.Module) -> Iterator[tuple[str, FoundWeight]]:
    handler = layer_registry.find_composite(module)
    for attribute, arguments in handler.weights.items() if handler is not None else ():
        parameter = module._parameters.get(attribute)
        if parameter is not None:
            kind = type(module).__name__
            yield (
                join(name, attribute),
                FoundWeight(
                    parameter, kind, parameter.shape[1], -1, attribute, name, True, arguments
                ),
            )


def _functional_weights(traced: Traced) -> Iterator[tuple[str, FoundWeight]]:
    """Parameters that a traced `forward` passes to functions, or multiplies in some other way."""
    passed: dict[str, FoundWeight] = {}
    multiplied: dict[str, FoundWeight] = {}
    for region in traced.regions:
        for graph in region.graphs.values():
            values = _made_of_inputs(graph)
            for node in graph.nodes:
                if node.op == "call_function" and node.target in CONTRACTIONS:
                    weight = argument(node, 1, "weight")
                    if _is_free_parameter(weight, region):
                        passed[join(region.path, str(weight.target))] = _passed(
                            node, weight, region
                        )
                elif (
                    node.op in ("call_function", "call_method")
                    and layer_registry.target_name(node.target) in PRODUCTS
                    and node in values
                ):
                    for weight in node.all_input_nodes:
                        if (
                            _is_free_parameter(weight, region)
                            and _parameter(weight, region).dim() > 1
                        ):
                            multiplied[join(region.path, str(weight.target))] = _multiplied(
                                node, weight, region
                            )
    yield from (multiplied | passed).items()


def _made_of_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on the graph's inputs; all others are constant."""
    values: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(one in values for one in node.all_input_nodes):
            values.add(node)
    return values


def _is_free_parameter(weight: Any, region: Region) -> bool:
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return False
    module = region.module.get_submodule(str(weight.target).rpartition(".")[0])
    return _parameter(weight, region) is not None and layer_registry.find(module) is None


def _parameter(weight: fx.Node, region: Region) -> Any:
    owner, _, attribute = str(weight.target).rpartition(".")
    return region.module.get_submodule(owner)._parameters.get(attribute)


def _multiplied(node: fx.Node, weight: fx.Node, region: Region) -> FoundWeight:
    parameter, function = _parameter(weight, region), layer_registry.target_name(node.target)
    obstacle = Obstacle(Reason.MULTIPLIED, function)
    return FoundWeight(
        parameter, function, parameter.shape[0], -1, functional=True, obstacle=obstacle
    )


def _passed(node: fx.Node, weight: fx.Node, region: Region) -> FoundWeight:
    owner, _, attribute = str(weight.target).rpartition(".")
    parameter, function = _parameter(weight, region), layer_registry.target_name(node.target)
    axis = -1 if node.target is F.linear else 1
    if "transpose" in function:
        inputs = parameter.shape[0]
    else:
        groups = argument(node, 6, "groups")
        inputs = parameter.shape[1] * (groups if isinstance(groups, int) and axis == 1 else 1)
    return FoundWeight(
        parameter,
        f"F.{function}",
        inputs,
        axis,
        attribute,
        owner=join(region.path, owner),
        functional=True,
    )


# -- all the others --------------------------------------------------------------------------------


@dataclass(frozen=True)
class OtherParameter:
    """A parameter of two or more dimensions that no ticket covers.

    `obstacle` says why, if it is or may be a weight. A parameter without an obstacle is added,
    concatenated, indexed, or unused.
    """

    name: str
    tensor: Any
    obstacle: Obstacle | None


def other_parameters(traced: Traced, found: Collection[FoundWeight]) -> Iterator[OtherParameter]:
    """Parameters of two or more dimensions that are no weights: position embeddings, tokens, ..."""
    seen = {id(weight.tensor) for weight in found}
    for path, module in traced.model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or layer_registry.find(module) is not None:
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dim() < 2 or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                obstacle: Obstacle | None = Obstacle(Reason.RECURRENT)
            elif (
                isinstance(module, _KNOWN_USE)
                or layer_registry.find_composite(module) is not None
                or _is_followed(traced, path)
            ):
                obstacle = None
            else:
                obstacle = Obstacle(Reason.UNTRACED_USE)
            yield OtherParameter(join(path, name), parameter, obstacle)


_KNOWN_USE = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm)


def _is_followed(traced: Traced, path: str) -> bool:
    """Whether the code of the module at `path` is traced in some region."""
    for region in traced.regions:
        inside = path.removeprefix(region.path).lstrip(".") if region.path else path
        if region.graphs and join(region.path, inside) == path:
            called = {
                str(node.target)
                for graph in region.graphs.values()
                for node in graph.nodes
                if node.op == "call_module"
            }
            if not any(f"{inside}.".startswith(f"{one}.") for one in called):
                return True
    return False
