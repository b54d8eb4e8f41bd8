"""The outline of a ticket model, which `picture` draws: its boxes, and the blocks that they stand in.

A walk over the model's graphs keeps what matters (layers, norms, signs, pools, joins) as boxes that know what they read.
The boxes are grouped into the model's blocks, and equal blocks in a row are folded into one that stands for all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from torch import Tensor, fx, nn

from mptify.nn.layers import Ticketed, TicketParameter
from mptify.nn.norms import ChannelBatchNorm, ScalarBatchNorm, TokenBatchNorm
from mptify.nn.quantizers import Sign
from mptify.surgery import Plan, layer_registry, ticket_layers
from mptify.surgery.dataflow import node_kind
from mptify.surgery.plan import plan_of
from mptify.surgery.trace import join, share_copy, trace

__all__ = ["Block", "Box", "Outline", "outline", "short_count"]

_SYMBOLS = {"add": "+", "iadd": "+", "sub": "−", "mul": "×", "imul": "×", "matmul": "@", "scaled_dot_product_attention": "attention"}
_SHOWN = re.compile("norm|pool|activation|attention|softmax|^mean$")  # of the operations on a single value
_ABOUT = {"getattr", "size", "dim", "numel", "len", "eq", "ne"}  # what says something about a value, and carries none of it on
_CHAIN = 22  # boxes of a plain chain that stay in one block


@dataclass(frozen=True)
class Outline:
    """What there is to draw: every box that the walk met, and the blocks, in which equal ones are folded."""

    plan: Plan
    boxes: list[Box]
    blocks: list[Block]


def outline(model: nn.Module) -> Outline:
    """Walk a ticket model, group its boxes into blocks and fold them; nothing has a place yet."""
    walk = _Walk(model)
    walk.module("", model, [])
    walk.rest()
    blocks = _folded(_grouped(walk.boxes))
    for block in blocks:
        _let_in(block)
    return Outline(walk.plan, walk.boxes, blocks)


# -- boxes -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Rectangle:
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0

    middle = property(lambda self: self.x + self.width / 2)
    bottom = property(lambda self: self.y + self.height)
    place = property(lambda self: f'x="{self.x:.1f}" y="{self.y:.1f}" width="{self.width:.1f}" height="{self.height:.1f}"')


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
    """Collects the boxes of a model. Its methods take the boxes that a value comes from and return those of the result."""

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
        self.boxes.append(Box(path=path, role=role, detail=tuple(detail), sources=sources, order=len(self.boxes), guessed=guessed))
        self.guessing = False
        return self.boxes[-1:]

    def module(self, path: str, module: nn.Module, sources: list[Box]) -> list[Box]:
        """Whatever holds layers: by its graph, or, where there is none, its parts one after the other."""
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
        kind = type(layer).__name__.removeprefix("Ticket").replace("NonDynamicallyQuantizable", "").replace("Parameter", "weight")
        if not isinstance(layer, Ticketed):
            weight = layer if isinstance(layer, Tensor) else getattr(layer, layer_registry.find(layer).weight)  # type: ignore[union-attr]
            return self.add(name, "dense", [f"{kind} {_shape(weight.shape)}", self.reasons.get(name, "dense")], sources)
        if layer.input_quantizer is not None:
            sources = self.add(f"{name}_input_norm", "norm", [_norm_text(layer.input_quantizer[0])], sources)
            sources = self.add(f"{name}_input_sign", "edge", ["Sign"], sources)
        planned = self.planned.get(name, self.planned[layer.ticket_name])
        detail = [f"{kind} {_shape(planned.shape)}", f"keeps {100 * layer.kept / layer.count:.3g}% of {short_count(layer.count)}"]
        if planned.input.is_exempt:
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
                values[node] = [] if node.args else sources if path else self.add("input", "plain", ["input"], [])
            elif getattr(node.target, "__name__", node.target) in _ABOUT or not node.users:
                values[node] = []
            else:
                values[node] = self.node(path, root, node, inputs, node.name in moved)
        return []

    def node(self, path: str, root: nn.Module, node: fx.Node, sources: list[Box], moved: bool) -> list[Box]:
        """What reads several boxes is shown; of the rest, what matters. The others hand their sources on."""
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        site = join(path, str(node.target) if module is not None else node.meta.get("site", node.name))
        if isinstance(module, Sign):
            return self.sign(site, sources)
        if isinstance(module, (ChannelBatchNorm, TokenBatchNorm, ScalarBatchNorm)):
            return self.add(site, "norm", [_norm_text(module)], sources)
        if module is not None and _holds_layers(module):
            return self.module(site, module, sources)
        owners = [owner for one in node.all_input_nodes if (owner := _weight_owner(root, one)) is not None]
        for owner in owners:
            sources = self.layer(join(path, owner), root.get_submodule(owner), sources)
        name = getattr(node.target, "__name__", str(node.target)).rstrip("_") if module is None else type(module).__name__
        if moved:
            return self.add(site, "pool", [f"{name}, moved up"], sources)
        if len(sources) > 1 or (sources and not owners and _SHOWN.search(node_kind(node, module))):
            return self.add(site, "plain", [_SYMBOLS.get(name, name)], sources)
        return sources

    def sign(self, path: str, sources: list[Box]) -> list[Box]:
        if path.endswith("_input_sign"):
            return self.add(path, "edge", ["Sign"], sources)
        activation = re.sub(r"(_\d+)?_sign$", "", path.rpartition(".")[2])
        return self.add(path, "sign", ["Sign" if activation.isdigit() else f"Sign for {activation}"], sources)

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
    """A ticket graph's own; any other module is traced. Of two graphs the one for training: it calls all that learns."""
    if isinstance(module, fx.GraphModule):
        return module.__dict__.get("_graphs", {}).get(True, module.graph)
    regions = [region for region in trace(_plain_twin(module)).regions if region.path == ""]
    return regions[0].graphs.get(True, regions[0].graphs[False]) if regions else None


def _plain_twin(model: nn.Module) -> nn.Module:
    """A copy with ordinary layers: a ticket's weight is computed, and would enter the trace as a constant."""
    twin = share_copy(model)
    for module in list(twin.modules()):
        tickets = {name: child for name, child in module.named_children() if isinstance(child, TicketParameter)}
        if tickets and not isinstance(module, nn.MultiheadAttention):
            module.__class__ = type(module).__mro__[1]
            for name, ticket in tickets.items():
                module._parameters[name.removesuffix("_ticket")] = nn.Parameter(ticket.operand().detach())
        if isinstance(module, Ticketed) and not isinstance(module, TicketParameter):
            name, weight = module.weight_name, module.operand().detach()
            module.__class__ = module.dense_class()
            module._parameters[name] = nn.Parameter(weight)
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


def _norm_text(module: Any) -> str:
    return "BatchNorm over all" if isinstance(module, ScalarBatchNorm) else f"BatchNorm {getattr(module, 'norm', module).num_features}"


def _shape(sizes: Iterable[int]) -> str:
    return "×".join(str(size) for size in sizes)


def short_count(number: int) -> str:
    """Three digits and a unit: 11.2 M."""
    units = ((10**9, " G"), (10**6, " M"), (10**3, " k"))
    return next((f"{number / size:.3g}{unit}" for size, unit in units if number >= 0.9995 * size), str(number))


# -- blocks ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Block(Rectangle):
    """Boxes in one frame. `stage` is the part of the model whose blocks share a column; loose boxes have none."""

    path: str = ""
    stage: str = ""
    boxes: list[Box] = field(default_factory=list)
    title: str = ""
    times: int = 1
    skips: dict[tuple[Box, Box], int] = field(default_factory=dict)  # edges past boxes of their lane -> track


def _grouped(boxes: list[Box]) -> list[Block]:
    """The model's blocks in the order they run in, and between them what belongs to none."""
    blocks: list[Block] = []
    for block in _split("", boxes):
        if blocks and not block.path and not blocks[-1].path:
            blocks[-1].boxes += block.boxes
        else:
            blocks.append(block)
    blocks = [piece for block in blocks for piece in _pieces(block)]
    for block in blocks:
        parent = next((box.path.rpartition(".")[0] for box in block.boxes if box.is_layer), "")
        block.title = block.path or ("stem" if block is blocks[0] else "head" if block is blocks[-1] else parent)
    return blocks


def _split(prefix: str, boxes: list[Box]) -> list[Block]:
    """The numbered blocks below `prefix`, wherever they are; or all of it as one block. The model itself is always split."""
    start = len(prefix) + 1 if prefix else 0
    runs = [(join(prefix, name), list(run)) for name, run in groupby(boxes, key=lambda box: box.path[start:].split(".")[0])]
    large = [sum(box.is_layer and box.path != path for box in run) > 1 for path, run in runs]
    parts = [_split(path, run) if is_large else [Block(boxes=run)] for (path, run), is_large in zip(runs, large)]
    numbered = _are_numbered([run for run, is_large in zip(runs, large) if is_large], boxes)
    if prefix and not numbered and all(len(part) == 1 for part in parts):
        return [Block(path=prefix, stage=prefix, boxes=boxes)]
    for part in parts:
        if len(part) == 1 and part[0].path:
            part[0].stage = prefix or part[0].path
    return [block for part in parts for block in part]


def _are_numbered(runs: list[tuple[str, list[Box]]], boxes: list[Box]) -> bool:
    """Whether these are blocks in a row: names that differ in a number, most layers among them, each reading the one before."""
    stems = {re.sub(r"\d+$", "", path) for path, _ in runs}
    layers = [box for _, run in runs for box in run if box.is_layer]
    orders = [(above[0].order, run) for (_, above), (_, run) in pairwise(runs)]
    chained = all(any(start <= source.order < run[0].order for box in run for source in box.sources) for start, run in orders)
    alone = len(runs) == 1 and len(runs[0][1]) < len(boxes)
    return chained and not alone and len(stems) == 1 and runs[0][0] not in stems and 2 * len(layers) > sum(box.is_layer for box in boxes)


def _pieces(block: Block) -> list[Block]:
    """A long chain without branches goes on in another block."""
    total = len(block.boxes)
    count = math.ceil(total / _CHAIN) if all(len(box.sources) < 2 for box in block.boxes) else 1
    size = math.ceil(total / count)
    return [Block(path=block.path, stage=block.stage, boxes=block.boxes[at : at + size]) for at in range(0, total, size)]


def _folded(blocks: list[Block]) -> list[Block]:
    """Equal blocks in a row become one, that stands for all of them."""
    kept: list[Block] = []
    stands_for: dict[Box, Box] = {}
    for block, before in zip(blocks, [None, *blocks]):
        if before is not None and block.path and _signature(block) == _signature(before):
            kept[-1].times += 1
            kept[-1].title = kept[-1].path + "…" + re.sub(r".*?(\d*)$", r"\1", block.path)
            stands_for.update(zip(block.boxes, kept[-1].boxes))
        else:
            kept.append(block)
    for block in kept:
        for box in block.boxes:
            box.sources = list(dict.fromkeys(stands_for.get(source, source) for source in box.sources))
    return kept


def _signature(block: Block) -> list[tuple]:
    """Equal for blocks that differ in nothing but their number: values from outside count by the order they are read in."""
    known = {box: number for number, box in enumerate(block.boxes)}
    parent = block.path.rpartition(".")[0]
    return [
        (parent, box.path[len(block.path) :], box.role, box.detail, *(known.setdefault(source, len(known)) for source in box.sources))
        for box in block.boxes
    ]


def _let_in(block: Block) -> None:
    """Values from outside come in through a dot at the top; those from further back are named, not drawn."""
    outside = {source for box in block.boxes for source in box.sources} - set(block.boxes)
    if not outside:
        return
    nearest, *others = sorted(outside, key=lambda box: -box.order)
    guessed = any(box.guessed for box in block.boxes if nearest in box.sources)
    doors = {nearest: Box(role="entry", sources=[nearest], guessed=guessed)}
    many = Box(detail=(f"from {len(others)} more places",))
    doors |= {source: Box(detail=(f"from {source.path}",)) if len(others) < 4 else many for source in others}
    for box in block.boxes:
        box.sources = list(dict.fromkeys(doors.get(source, source) for source in box.sources))
    block.boxes[:0] = dict.fromkeys(doors.values())
