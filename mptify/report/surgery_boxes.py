"""The boxes of a drawing: what a ticket model computes, and what each step reads.

A walk over the model's graphs keeps what matters: layers, norms, signs, pools and joins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from mptify.nn.layers import Ticketed, TicketParameter
from mptify.nn.norms import ChannelBatchNorm, ScalarBatchNorm, TokenBatchNorm
from mptify.nn.quantizers import InputQuantizer, Quantizer, Sign
from mptify.surgery import layer_registry, ticket_layers
from mptify.surgery.dataflow import node_kind
from mptify.surgery.plans import LayerInput, plan_of
from mptify.surgery.trace import join, share_copy, trace

__all__ = ["Box", "Rectangle", "boxes_of", "short_count"]

_SYMBOLS = {
    "add": "+",
    "iadd": "+",
    "sub": "−",
    "mul": "×",
    "imul": "×",
    "matmul": "@",
    "scaled_dot_product_attention": "attention",
}
# Of the operations on a single value, those that are shown:
_SHOWN = re.compile("norm|pool|activation|attention|softmax|^mean$")
# What says something about a value, and carries none of it on:
_ABOUT = {"getattr", "size", "dim", "numel", "len", "eq", "ne"}


def boxes_of(model: nn.Module) -> list[Box]:
    """Every box of a ticket model, in the order they run in; none has a place yet."""
    walk = _Walk(model)
    walk.module("", model, [])
    walk.rest()
    return walk.boxes


@dataclass(eq=False)
class Rectangle:
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0

    middle = property(lambda self: self.x + self.width / 2)
    bottom = property(lambda self: self.y + self.height)
    place = property(lambda self: (self.x, self.y, self.width, self.height))


@dataclass(eq=False)
class Box(Rectangle):
    path: str = ""
    role: str = "plain"
    detail: tuple[str, ...] = ()
    sources: list[Box] = field(default_factory=list)
    order: int = 0
    guessed: bool = False  # whether it reads its sources is not known: it only comes next
    lane: int = 0

    is_layer = property(lambda self: self.role in ("ticket", "dense"))


class _Walk:
    """Collects the boxes of a model.

    Its methods take the boxes that a value comes from, and return those of the result.
    """

    def __init__(self, model: nn.Module):
        self.plan = plan_of(model)
        self.tickets = ticket_layers(model)
        self.names = {id(layer): name for name, layer in self.tickets.items()}
        self.planned = {layer.name: layer for layer in self.plan.layers}
        self.reasons = {layer.name: layer.reason for layer in self.plan.left_dense}
        self.boxes: list[Box] = []
        self.guessing = False

    def add(self, path: str, role: str, detail: list[str], sources: list[Box]) -> list[Box]:
        guessed = self.guessing and bool(sources)
        box = Box(path=path, role=role, detail=tuple(detail), sources=sources, guessed=guessed)
        box.order = len(self.boxes)
        self.boxes.append(box)
        self.guessing = False
        return self.boxes[-1:]

    def module(self, path: str, module: nn.Module, sources: list[Box]) -> list[Box]:
        """Whatever holds layers: by its graph, or, without one, its parts one by one."""
        if isinstance(module, nn.MultiheadAttention):
            return self.attention(path, module, sources)
        if _is_layer(module):
            return self.layer(path, module, sources)
        graph = _graph_of(module)
        if graph is not None:
            return self.graph(path, module, graph, sources)
        for name, child in module.named_children():
            if _holds_layers(child):
                self.guessing = True
                sources = self.module(join(path, name), child, sources)[-1:]
        return sources

    def layer(self, path: str, layer: Any, sources: list[Box]) -> list[Box]:
        """A layer, or the bare parameter that stands for one."""
        name = self.names.get(id(layer), path)
        kind = type(layer).__name__.removeprefix("Ticket").replace("Parameter", "weight")
        kind = kind.replace("NonDynamicallyQuantizable", "")
        if not isinstance(layer, Ticketed):
            handler = None if isinstance(layer, Tensor) else layer_registry.find(layer)
            weight = layer if handler is None else getattr(layer, handler.weight)
            detail = [f"{kind} {_shape(weight.shape)}", self.reasons.get(name, "dense")]
            return self.add(name, "dense", detail, sources)
        if isinstance(layer.input_quantizer, InputQuantizer):
            norm, quantizer = layer.input_quantizer
            sources = self.add(f"{name}_input_norm", "norm", [_norm_text(norm)], sources)
            words = _quantizer_text(quantizer)
            sources = self.add(f"{name}_input_quantizer", "edge", [words], sources)
        planned = self.planned.get(name, self.planned[layer.ticket_name])
        detail = [
            f"{kind} {_shape(planned.shape)}",
            f"keeps {100 * layer.kept / layer.count:.3g}% of {short_count(layer.count)}",
        ]
        if planned.input.is_exempt or planned.input is LayerInput.ROUNDED:
            detail.append(f"reads {planned.input.value}")
        return self.add(name, "ticket", detail, sources)

    def attention(self, path: str, module: nn.MultiheadAttention, sources: list[Box]) -> list[Box]:
        """Torch's attention is one call; the picture shows its projections."""
        projected = []
        for attribute in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            weight = getattr(module, f"{attribute}_ticket", module._parameters.get(attribute))
            if weight is not None:
                projected += self.layer(join(path, attribute), weight, sources)
        attended = self.add(join(path, "attention"), "plain", ["attention"], projected)
        return self.layer(join(path, "out_proj"), module.out_proj, attended)

    def graph(self, path: str, root: nn.Module, graph: fx.Graph, sources: list[Box]) -> list[Box]:
        values: dict[fx.Node, list[Box]] = {}
        moved = {name for edits in self.plan.edits.get(path, {}).values() for name in edits.pools}
        for node in graph.nodes:
            inputs = list(dict.fromkeys(box for one in node.all_input_nodes for box in values[one]))
            if node.op == "output":
                return inputs
            if node.op == "placeholder":  # those with a default were fixed to it
                if node.args or path:
                    values[node] = [] if node.args else sources
                else:
                    values[node] = self.add("input", "plain", ["input"], [])
            elif getattr(node.target, "__name__", node.target) in _ABOUT or not node.users:
                values[node] = []
            else:
                values[node] = self.node(path, root, node, inputs, node.name in moved)
        return []

    def node(
        self, path: str, root: nn.Module, node: fx.Node, sources: list[Box], moved: bool
    ) -> list[Box]:
        """Shows what reads several boxes and what matters; others hand their sources on."""
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        called = str(node.target) if module is not None else node.meta.get("site", node.name)
        site = join(path, called)
        if isinstance(module, Quantizer):
            return self.quantizer(site, module, sources)
        if isinstance(module, (ChannelBatchNorm, TokenBatchNorm, ScalarBatchNorm)):
            return self.add(site, "norm", [_norm_text(module)], sources)
        if module is not None and _holds_layers(module):
            return self.module(site, module, sources)
        found = [_weight_owner(root, one) for one in node.all_input_nodes]
        owners = [owner for owner in found if owner is not None]
        for owner in owners:
            sources = self.layer(join(path, owner), root.get_submodule(owner), sources)
        name = getattr(node.target, "__name__", str(node.target)).rstrip("_")
        name = name if module is None else type(module).__name__
        if moved:
            return self.add(site, "pool", [f"{name}, moved up"], sources)
        if len(sources) > 1 or (sources and not owners and _SHOWN.search(node_kind(node, module))):
            return self.add(site, "plain", [_SYMBOLS.get(name, name)], sources)
        return sources

    def quantizer(self, path: str, module: Quantizer, sources: list[Box]) -> list[Box]:
        text = _quantizer_text(module)
        if path.endswith(("_input_sign", "_input_quantizer")):
            return self.add(path, "edge", [text], sources)
        activation = re.sub(r"(_\d+)?_(sign|quantizer)$", "", path.rpartition(".")[2])
        words = text if activation.isdigit() else f"{text} for {activation}"
        return self.add(path, "sign", [words], sources)

    def rest(self) -> None:
        """Ticket layers that no graph calls."""
        drawn = {box.path for box in self.boxes}
        for name, layer in self.tickets.items():
            if name not in drawn:
                self.layer(name, layer, [])


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, Ticketed) or layer_registry.find(module) is not None


def _holds_layers(module: nn.Module) -> bool:
    return any(_is_layer(part) for part in module.modules())


def _graph_of(module: nn.Module) -> fx.Graph | None:
    """A ticket graph's own; any other module is traced.

    Of two graphs this is the one for training, which calls everything that learns.
    """
    if isinstance(module, fx.GraphModule):
        return module.__dict__.get("_graphs", {}).get(True, module.graph)
    regions = [region for region in trace(_plain_twin(module)).regions if region.path == ""]
    return regions[0].graphs.get(True, regions[0].graphs[False]) if regions else None


def _plain_twin(model: nn.Module) -> nn.Module:
    """A copy with ordinary layers: a ticket's weight would enter the trace as a constant."""
    twin = share_copy(model)
    for module in list(twin.modules()):
        children = module.named_children()
        tickets = {name: child for name, child in children if isinstance(child, TicketParameter)}
        if tickets and not isinstance(module, nn.MultiheadAttention):
            module.__class__ = type(module).__mro__[1]
            for name, ticket in tickets.items():
                weight = nn.Parameter(ticket.operand().detach())
                module._parameters[name.removesuffix("_ticket")] = weight
        if isinstance(module, Ticketed) and not isinstance(module, TicketParameter):
            name, weight = module.weight_name, nn.Parameter(module.operand().detach())
            module.__class__ = module.dense_class()
            module._parameters[name] = weight
    return twin


def _weight_owner(root: nn.Module, node: fx.Node) -> str | None:
    """The layer whose weight a `get_attr` node reads."""
    if node.op != "get_attr":
        return None
    owner, _, attribute = str(node.target).rpartition(".")
    module = root.get_submodule(owner)
    if isinstance(module._modules.get(f"{attribute}_ticket"), Ticketed):
        return f"{node.target}_ticket"
    handler = layer_registry.find(module)
    return owner if handler is not None and handler.weight == attribute else None


def _quantizer_text(quantizer: Any) -> str:
    return "Sign" if isinstance(quantizer, Sign) else f"{quantizer.bits} bits"


def _norm_text(module: Any) -> str:
    return (
        "BatchNorm over all"
        if isinstance(module, ScalarBatchNorm)
        else f"BatchNorm {getattr(module, 'norm', module).num_features}"
    )


def _shape(sizes: Iterable[int]) -> str:
    return "×".join(str(size) for size in sizes)


def short_count(number: int) -> str:
    """Three digits and a unit: 11.2 M."""
    units = ((10**9, " G"), (10**6, " M"), (10**3, " k"))
    return next(
        (f"{number / size:.3g}{unit}" for size, unit in units if number >= 0.9995 * size),
        str(number),
    )
