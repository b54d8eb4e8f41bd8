"""A picture of what surgery changed: the ticket model as one standalone SVG.

The graph is reduced to the boxes that matter (layers, norms, signs, pools, joins), the boxes are grouped into the model's
blocks, equal blocks in a row are drawn once, and the blocks stand in columns from left to right, one column per stage.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any
from xml.sax.saxutils import escape

from torch import Tensor, fx, nn

from mptify.errors import MptifyError
from mptify.layers import ChannelBatchNorm, ScalarBatchNorm, Sign, Ticketed, TicketParameter, TokenBatchNorm
from mptify.surgery import Plan, handlers, ticket_layers
from mptify.surgery.facts import node_kind
from mptify.surgery.trace import share_copy, trace

__all__ = ["draw"]

_ROLES = {  # role -> fill, stroke, words in the legend
    "ticket": ("#dbeafe", "#1d4ed8", "ticket layer"),
    "norm": ("#dcfce7", "#15803d", "inserted BatchNorm"),
    "sign": ("#ffedd5", "#c2410c", "Sign in place of an activation"),
    "edge": ("#fce7f3", "#be185d", "Sign on an edge"),
    "pool": ("#ede9fe", "#6d28d9", "moved pool"),
    "dense": ("#d1d5db", "#1f2937", "left dense"),
    "plain": ("#ffffff", "#9ca3af", "untouched"),
    "guess": ("none", "#6b7280", "next in code that can't be traced"),
}
_DASHED = ' stroke-dasharray="4 3"'
_SYMBOLS = {"add": "+", "iadd": "+", "sub": "−", "mul": "×", "imul": "×", "matmul": "@", "scaled_dot_product_attention": "attention"}
_SHOWN = re.compile("norm|pool|activation|attention|softmax|^mean$")  # of the operations on a single value
_ABOUT = {"getattr", "size", "dim", "numel", "len", "eq", "ne"}  # what says something about a value, and carries none of it on

_CHARACTER, _LINE, _GAP, _TRACK, _PAD = 6.7, 14, 18, 12, 12  # pixels, for monospace text of size 11
_LONGEST, _TALLEST = 30, 1100  # characters of a line, pixels of a column
_CHAIN = 22  # boxes of a plain chain that stay in one block


def draw(model: nn.Module) -> str:
    """The SVG text of a ticket model, as `mptify.transform` returns it; the same model gives the same text."""
    if not hasattr(model, "ticket_plan"):
        raise MptifyError(f"draw() takes a ticket model, as mptify.transform() returns it; this {type(model).__name__} has no plan.")
    walk = _Walk(model)
    walk.module("", model, [])
    walk.rest()
    blocks = _folded(_grouped(walk.boxes))
    for block in blocks:
        _let_in(block)
        _arrange(block)
    _place(blocks)
    return _svg(type(model).__name__, walk, blocks)


# -- boxes -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Rectangle:
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0

    middle = property(lambda self: self.x + self.width / 2)
    bottom = property(lambda self: self.y + self.height)
    place = property(lambda self: f'x="{self.x:.1f}" y="{self.y:.1f}" width="{self.width:.1f}" height="{self.height:.1f}"')


@dataclass(eq=False)
class _Box(_Rectangle):
    path: str = ""
    role: str = "plain"
    detail: tuple[str, ...] = ()
    sources: list[_Box] = field(default_factory=list)
    order: int = 0
    guessed: bool = False  # whether it reads its sources is not known: it only comes next
    lane: int = 0

    is_layer = property(lambda self: self.role in ("ticket", "dense"))


class _Walk:
    """Collects the boxes of a model. Its methods take the boxes that a value comes from and return those of the result."""

    def __init__(self, model: nn.Module):
        self.plan: Plan = model.ticket_plan  # type: ignore[assignment]
        self.tickets = ticket_layers(model)
        self.names = {id(layer): name for name, layer in self.tickets.items()}
        self.planned = {layer.name: layer for layer in self.plan.layers}
        self.reasons = {layer.name: layer.reason for layer in self.plan.left_dense}
        self.boxes: list[_Box] = []
        self.guessing = False

    def add(self, path: str, role: str, detail: list[str], sources: list[_Box]) -> list[_Box]:
        guessed = self.guessing and bool(sources)
        self.boxes.append(_Box(path=path, role=role, detail=tuple(detail), sources=sources, order=len(self.boxes), guessed=guessed))
        self.guessing = False
        return self.boxes[-1:]

    def module(self, path: str, module: nn.Module, sources: list[_Box]) -> list[_Box]:
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
                sources = self.module(_join(path, name), child, sources)[-1:]
        return sources

    def layer(self, path: str, layer: Any, sources: list[_Box]) -> list[_Box]:
        """A layer, or the bare parameter that stands for one."""
        name = self.names.get(id(layer), path)
        kind = type(layer).__name__.removeprefix("Ticket").replace("NonDynamicallyQuantizable", "").replace("Parameter", "weight")
        if not isinstance(layer, Ticketed):
            weight = layer if isinstance(layer, Tensor) else getattr(layer, handlers.find(layer).weight)  # type: ignore[union-attr]
            return self.add(name, "dense", [f"{kind} {_shape(weight.shape)}", self.reasons.get(name, "dense")], sources)
        if layer.before is not None:
            sources = self.add(f"{name}_input_norm", "norm", [_norm_text(layer.before[0])], sources)  # type: ignore[index]
            sources = self.add(f"{name}_input_sign", "edge", ["Sign"], sources)
        planned = self.planned.get(name, self.planned[layer.ticket_name])
        detail = [f"{kind} {_shape(planned.shape)}", f"keeps {100 * layer.kept / layer.count:.3g}% of {_count(layer.count)}"]
        if planned.before in ("pixels", "pooled features"):
            detail.append(f"reads {planned.before}")
        return self.add(name, "ticket", detail, sources)

    def attention(self, path: str, module: nn.MultiheadAttention, sources: list[_Box]) -> list[_Box]:
        """Torch's attention is one call; the picture shows its projections."""
        projected = []
        for attribute in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            weight = getattr(module, f"{attribute}_ticket", module._parameters.get(attribute))
            if weight is not None:
                projected += self.layer(_join(path, attribute), weight, sources)
        attended = self.add(_join(path, "attention"), "plain", ["attention"], projected)
        return self.layer(_join(path, "out_proj"), module.out_proj, attended)

    def graph(self, path: str, root: nn.Module, graph: fx.Graph, sources: list[_Box]) -> list[_Box]:
        values: dict[fx.Node, list[_Box]] = {}
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

    def node(self, path: str, root: nn.Module, node: fx.Node, sources: list[_Box], moved: bool) -> list[_Box]:
        """What reads several boxes is shown; of the rest, what matters. The others hand their sources on."""
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        site = _join(path, str(node.target) if module is not None else node.meta.get("site", node.name))
        if isinstance(module, Sign):
            return self.sign(site, sources)
        if isinstance(module, (ChannelBatchNorm, TokenBatchNorm, ScalarBatchNorm)):
            return self.add(site, "norm", [_norm_text(module)], sources)
        if module is not None and _holds_layers(module):
            return self.module(site, module, sources)
        owners = [owner for one in node.all_input_nodes if (owner := _weight_owner(root, one)) is not None]
        for owner in owners:
            sources = self.layer(_join(path, owner), root.get_submodule(owner), sources)
        name = getattr(node.target, "__name__", str(node.target)).rstrip("_") if module is None else type(module).__name__
        if moved:
            return self.add(site, "pool", [f"{name}, moved up"], sources)
        if len(sources) > 1 or (sources and not owners and _SHOWN.search(node_kind(node, module))):
            return self.add(site, "plain", [_SYMBOLS.get(name, name)], sources)
        return sources

    def sign(self, path: str, sources: list[_Box]) -> list[_Box]:
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
    return isinstance(module, Ticketed) or handlers.find(module) is not None


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
                module._parameters[name.removesuffix("_ticket")] = ticket._parameters["frozen"]
        if isinstance(module, Ticketed) and not isinstance(module, TicketParameter):
            module._parameters[module._weight_name] = module._parameters.pop("frozen")  # type: ignore[attr-defined]
            module.__class__ = type(module).__mro__[2]
    return twin


def _weight_owner(root: nn.Module, node: fx.Node) -> str | None:
    """The layer whose weight a `get_attr` node reads."""
    if node.op != "get_attr":
        return None
    owner, _, attribute = str(node.target).rpartition(".")
    module = root.get_submodule(owner)
    if isinstance(module._modules.get(f"{attribute}_ticket"), Ticketed):
        return f"{node.target}_ticket"
    handler = handlers.find(module)
    return owner if handler is not None and handler.weight == attribute else None


def _norm_text(module: Any) -> str:
    return "BatchNorm over all" if isinstance(module, ScalarBatchNorm) else f"BatchNorm {getattr(module, 'norm', module).num_features}"


def _shape(sizes: Iterable[int]) -> str:
    return "×".join(str(size) for size in sizes)


def _count(number: int) -> str:
    units = ((10**9, " G"), (10**6, " M"), (10**3, " k"))
    return next((f"{number / size:.3g}{unit}" for size, unit in units if number >= 0.9995 * size), str(number))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# -- blocks ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Block(_Rectangle):
    """Boxes in one frame. `stage` is the part of the model whose blocks share a column; loose boxes have none."""

    path: str = ""
    stage: str = ""
    boxes: list[_Box] = field(default_factory=list)
    title: str = ""
    times: int = 1
    skips: dict[tuple[_Box, _Box], int] = field(default_factory=dict)  # edges past boxes of their lane -> track


def _grouped(boxes: list[_Box]) -> list[_Block]:
    """The model's blocks in the order they run in, and between them what belongs to none."""
    blocks: list[_Block] = []
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


def _split(prefix: str, boxes: list[_Box]) -> list[_Block]:
    """The numbered blocks below `prefix`, wherever they are; or all of it as one block. The model itself is always split."""
    start = len(_join(prefix, ""))
    runs = [(_join(prefix, name), list(run)) for name, run in groupby(boxes, key=lambda box: box.path[start:].split(".")[0])]
    large = [sum(box.is_layer and box.path != path for box in run) > 1 for path, run in runs]
    parts = [_split(path, run) if is_large else [_Block(boxes=run)] for (path, run), is_large in zip(runs, large)]
    numbered = _are_numbered([run for run, is_large in zip(runs, large) if is_large], boxes)
    if prefix and not numbered and all(len(part) == 1 for part in parts):
        return [_Block(path=prefix, stage=prefix, boxes=boxes)]
    for part in parts:
        if len(part) == 1 and part[0].path:
            part[0].stage = prefix or part[0].path
    return [block for part in parts for block in part]


def _are_numbered(runs: list[tuple[str, list[_Box]]], boxes: list[_Box]) -> bool:
    """Whether these are blocks in a row: names that differ in a number, most layers among them, each reading the one before."""
    stems = {re.sub(r"\d+$", "", path) for path, _ in runs}
    layers = [box for _, run in runs for box in run if box.is_layer]
    orders = [(above[0].order, run) for (_, above), (_, run) in pairwise(runs)]
    chained = all(any(start <= source.order < run[0].order for box in run for source in box.sources) for start, run in orders)
    alone = len(runs) == 1 and len(runs[0][1]) < len(boxes)
    return chained and not alone and len(stems) == 1 and runs[0][0] not in stems and 2 * len(layers) > sum(box.is_layer for box in boxes)


def _pieces(block: _Block) -> list[_Block]:
    """A long chain without branches goes on in another block."""
    total = len(block.boxes)
    count = math.ceil(total / _CHAIN) if all(len(box.sources) < 2 for box in block.boxes) else 1
    size = math.ceil(total / count)
    return [_Block(path=block.path, stage=block.stage, boxes=block.boxes[at : at + size]) for at in range(0, total, size)]


def _folded(blocks: list[_Block]) -> list[_Block]:
    """Equal blocks in a row become one, that stands for all of them."""
    kept: list[_Block] = []
    stands_for: dict[_Box, _Box] = {}
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


def _signature(block: _Block) -> list[tuple]:
    """Equal for blocks that differ in nothing but their number: values from outside count by the order they are read in."""
    known = {box: number for number, box in enumerate(block.boxes)}
    parent = block.path.rpartition(".")[0]
    return [
        (parent, box.path[len(block.path) :], box.role, box.detail, *(known.setdefault(source, len(known)) for source in box.sources))
        for box in block.boxes
    ]


def _let_in(block: _Block) -> None:
    """Values from outside come in through a dot at the top; those from further back are named, not drawn."""
    outside = {source for box in block.boxes for source in box.sources} - set(block.boxes)
    if not outside:
        return
    nearest, *others = sorted(outside, key=lambda box: -box.order)
    guessed = any(box.guessed for box in block.boxes if nearest in box.sources)
    doors = {nearest: _Box(role="entry", sources=[nearest], guessed=guessed)}
    many = _Box(detail=(f"from {len(others)} more places",))
    doors |= {source: _Box(detail=(f"from {source.path}",)) if len(others) < 4 else many for source in others}
    for box in block.boxes:
        box.sources = list(dict.fromkeys(doors.get(source, source) for source in box.sources))
    block.boxes[:0] = dict.fromkeys(doors.values())


# -- places ------------------------------------------------------------------------------------------------------------


def _lines(box: _Box, block: _Block) -> list[str]:
    name = [box.path.removeprefix(f"{block.path}.")] if box.is_layer else []
    return [one if len(one) <= _LONGEST else f"{one[:9]}…{one[10 - _LONGEST :]}" for one in (*name, *box.detail)]


def _arrange(block: _Block) -> None:
    """Chains run down in lanes: a box goes below what it reads, and a branch opens a lane of its own to the right."""
    last_read = {source: number for number, box in enumerate(block.boxes) for source in box.sources}
    lanes: list[list[_Box]] = []
    for number, box in enumerate(block.boxes):
        lines = _lines(box, block)
        box.width = max((len(line) * _CHARACTER + 14 for line in lines), default=8)
        box.height = len(lines) * _LINE + 8
        inside = [source for source in box.sources if box.role != "entry"]
        free = [n for n, lane in enumerate(lanes) if lane[-1] in inside]
        start = min((one.bottom for one in inside), default=math.inf)
        ends = [last_read.get(lane[-1], block.boxes.index(lane[-1])) for lane in lanes]  # a lane is busy until its value is read
        free += [n for n, end in enumerate(ends) if end < number and block.boxes[end].bottom <= start]
        box.lane = next(iter(free), len(lanes))
        lanes[box.lane :] = lanes[box.lane :] or [[]]
        box.y = max((one.bottom + _GAP for one in (*inside, *lanes[box.lane][-1:])), default=_LINE + 20)
        lanes[box.lane].append(box)
    right = float(_PAD)
    for lane in lanes:
        right = _widen(block, lane, right) + _GAP
    block.width = max(right - _GAP + _PAD, len(f"{block.title} ×{block.times}") * _CHARACTER + 2 * _PAD)
    block.height = max(box.bottom for box in block.boxes) + _PAD


def _widen(block: _Block, lane: list[_Box], left: float) -> float:
    """Center a lane's boxes, with room at their left for the edges that skip some of them; returns where the lane ends."""
    skips = [(source, box) for above, box in pairwise(lane) for source in box.sources if source in lane and source is not above]
    skips.sort(key=lambda skip: skip[1].y - skip[0].y)
    for number, (source, box) in enumerate(skips):
        taken = {block.skips[skip] for skip in skips[:number] if skip[0].y < box.y and source.y < skip[1].y}
        block.skips[source, box] = min(set(range(len(taken) + 1)) - taken)
    left += _TRACK * max((block.skips[skip] + 1 for skip in skips), default=0)
    width = max(box.width for box in lane)
    for box in lane:
        box.x = left + (width - box.width) / 2
    return left + width


def _place(blocks: list[_Block]) -> None:
    """Columns from left to right: one for a stage of several blocks; stages of one block share theirs, and what has no layer joins in."""
    sizes = Counter(block.stage for block in blocks)
    columns: list[list[_Block]] = []
    for block in blocks:
        before = columns[-1][-1] if columns else block
        single = before.stage and block.stage and sizes[before.stage] == sizes[block.stage] == 1
        tall = sum(one.height + _GAP for one in (*columns[-1:], [])[0]) + block.height > _TALLEST
        small = not any(box.is_layer for box in block.boxes)
        if columns and (single or small or before.stage == block.stage) and not tall:
            columns[-1].append(block)
        else:
            columns.append([block])
    left = 0.0
    for column in columns:
        top, axis = 0.0, max(block.boxes[0].middle for block in column)
        width = max(block.width + axis - block.boxes[0].middle for block in column)
        for block in column:
            shift = left + axis - block.boxes[0].middle
            for box in block.boxes:
                box.x, box.y = box.x + shift, box.y + top
            block.x, block.y, block.width = left, top, width
            top += block.height + _GAP
        left += width + 3 * _GAP


# -- SVG ---------------------------------------------------------------------------------------------------------------


def _svg(name: str, walk: _Walk, blocks: list[_Block]) -> str:
    plan, spec = walk.plan, walk.plan.spec
    kept = sum(layer.kept for layer in plan.layers if not layer.tied_to)
    dense = f"{len(plan.left_dense)} layers stay dense" if plan.left_dense else "no layer stays dense"
    title = f"{escape(name)} → {spec.bits} ticket, prune {spec.prune:g}"
    width = max(*(block.x + block.width for block in blocks), 640)
    legend, top = _legend(walk, width)
    height = top + max(block.bottom for block in blocks)
    home = {box: block for block in blocks for box in block.boxes}
    parts = [f'<rect {block.place} rx="8" fill="#f0f1f4" stroke="#d9dce1"/>' for block in blocks]
    parts += [_edge(source, box, home) for box in home for source in box.sources if source in home]
    parts += [_heading(block) for block in blocks]
    parts += [_drawn(box, home[box]) for box in home]
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width + 48:.0f}" height="{height + 48:.0f}" \
viewBox="-24 -24 {width + 48:.0f} {height + 48:.0f}" \
font-family="ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="11" fill="#111827">
<title>{title}</title>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">\
<path d="M0 0L8 4L0 8z" fill="#6b7280"/></marker></defs>
<rect x="-24" y="-24" width="100%" height="100%" fill="#f9fafb"/>
<text y="10" font-size="18" font-weight="bold">{title}</text>
<text y="34" font-size="12">{len(plan.layers)} ticket layers keep {_count(kept)} of {_count(plan.converted)} weights; {dense}</text>
{legend}
<g transform="translate(0 {top:.0f})">
{body}
</g>
</svg>
"""


def _legend(walk: _Walk, width: float) -> tuple[str, float]:
    """One swatch per role that occurs, with how often; and where the picture below it may begin."""
    counts = Counter(role for role, _ in {(box.role, box.path) for box in walk.boxes})
    counts["guess"] = sum(box.guessed for box in walk.boxes)
    text, x, y = "", 0.0, 52
    for role, (fill, stroke, words) in _ROLES.items():
        if counts[role]:
            label = f"{words} ({counts[role]})"
            if x + len(label) * _CHARACTER + 24 > width:
                x, y = 0.0, y + 22
            paint = f'fill="{fill}" stroke="{stroke}"' + (_DASHED if role == "guess" else "")
            text += f'<rect x="{x:.1f}" y="{y}" width="16" height="14" rx="3" {paint}/>'
            text += f'<text class="legend" x="{x + 22:.1f}" y="{y + 11}">{label}</text>'
            x += len(label) * _CHARACTER + 46
    return text, y + 34


def _heading(block: _Block) -> str:
    """Over the edges, on a ground of its own."""
    badge = f' <tspan class="badge" fill="#b91c1c">×{block.times}</tspan>' if block.times > 1 else ""
    width = len(block.title + (f" ×{block.times}" if badge else "")) * _CHARACTER + 6
    ground = f'<rect x="{block.x + 7:.1f}" y="{block.y + 6:.1f}" width="{width:.1f}" height="16" fill="#f0f1f4"/>'
    return f'{ground}<text x="{block.x + 10:.1f}" y="{block.y + 18:.1f}" font-weight="bold">{escape(block.title)}{badge}</text>'


def _drawn(box: _Box, block: _Block) -> str:
    if box.role == "entry":
        return f'<circle cx="{box.middle:.1f}" cy="{box.y + 4:.1f}" r="3.5" fill="#6b7280"/>'
    fill, stroke, _ = _ROLES[box.role]
    text = ""
    for number, line in enumerate(_lines(box, block)):
        weight = ' font-weight="bold"' if box.is_layer and not number else ""
        text += f'<text x="{box.middle:.1f}" y="{box.y + 15 + number * _LINE:.1f}" text-anchor="middle"{weight}>{escape(line)}</text>'
    shape = f'<rect {box.place} rx="4" fill="{fill}" stroke="{stroke}"/>'
    return f'<g class="{box.role}" data-times="{block.times}"><title>{escape(box.path)}</title>{shape}{text}</g>'


def _edge(source: _Box, box: _Box, home: dict[_Box, _Block]) -> str:
    block, other = home[box], home[source]
    fork, side = source.bottom + 6, box.y + box.height / 2
    joins = source.lane != box.lane and any(one.lane == box.lane for one in box.sources)
    end = (box.x, side)
    if other is not block and other.x == block.x and other.y < block.y:  # from the block above
        corners, end = [(source.middle, block.y - _GAP / 2), (box.middle, block.y - _GAP / 2)], (box.middle, box.y)
    elif other is not block:  # from another column, through the channel between the two
        below, channel = other.bottom + 8, block.x - 1.5 * _GAP
        corners = [(source.middle, below), (channel, below), (channel, side)]
    elif (source, box) in block.skips or (joins and any(one.lane == source.lane and source.y < one.y < side for one in block.boxes)):
        track = min(one.x for one in block.boxes if one.lane == box.lane) - 8 - block.skips.get((source, box), 0) * _TRACK
        corners = [(source.middle, fork), (track, fork), (track, side)]
    elif joins:  # the end of a branch
        corners, end = [(source.middle, side)], (box.x + (box.width if source.lane > box.lane else 0), side)
    else:  # the box below, or a branch's first
        corners, end = [(source.middle, fork), (box.middle, fork)] if source.lane != box.lane else [], (box.middle, box.y)
    dashes = _DASHED if box.guessed else ""
    path = _rounded([(source.middle, source.bottom), *corners, end])
    return f'<path d="{path}" fill="none" stroke="#6b7280"{dashes} marker-end="url(#tip)"/>'


def _rounded(points: list[tuple[float, float]]) -> str:
    """A line through the points, its corners rounded off."""
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for before, (x, y), after in zip(points, points[1:], points[2:]):
        near = []
        for to_x, to_y in (before, after):
            share = min(6 / max(abs(to_x - x) + abs(to_y - y), 1), 0.5)
            near.append(f"{x + share * (to_x - x):.1f} {y + share * (to_y - y):.1f}")
        path += f"L{near[0]}Q{x:.1f} {y:.1f} {near[1]}"
    return f"{path}L{points[-1][0]:.1f} {points[-1][1]:.1f}"
