"""A drawing of what surgery changed: the ticket model as one standalone SVG.

`surgery_outline` says which boxes and blocks there are. Here they get their places, in columns
from left to right, one column per stage; `templates/surgery.svg.j2` writes them.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

from torch import nn

from mptify.errors import MptifyError
from mptify.report.surgery_boxes import Box, short_count
from mptify.report.surgery_outline import Block, Outline, outline
from mptify.report.svg import Shape, circle, group, path, rect, text
from mptify.report.templating import render

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
_DASHES = "4 3"

_CHARACTER, _LINE, _GAP, _TRACK, _PAD = 6.7, 14, 18, 12, 12  # pixels, for monospace text of size 11
_LONGEST, _TALLEST = 30, 1100  # characters of a line, pixels of a column


def draw(model: nn.Module) -> str:
    """The SVG of a ticket model, as `mptify.transform` returns it.

    The same model gives the same text.
    """
    if not hasattr(model, "ticket_plan"):
        raise MptifyError(
            "draw() takes a ticket model, as mptify.transform() returns it; "
            f"this {type(model).__name__} has no plan."
        )
    found = outline(model)
    for block in found.blocks:
        _arrange(block)
    _place(found.blocks)
    return _rendered(type(model).__name__, found)


# -- places ----------------------------------------------------------------------------------


def _lines(box: Box, block: Block) -> list[str]:
    name = [box.path.removeprefix(f"{block.path}.")] if box.is_layer else []
    return [
        one if len(one) <= _LONGEST else f"{one[:9]}…{one[10 - _LONGEST :]}"
        for one in (*name, *box.detail)
    ]


def _arrange(block: Block) -> None:
    """Run chains down in lanes: a box goes below what it reads, a branch opens a lane."""
    last_read = {source: number for number, box in enumerate(block.boxes) for source in box.sources}
    lanes: list[list[Box]] = []
    for number, box in enumerate(block.boxes):
        lines = _lines(box, block)
        box.width = max((len(line) * _CHARACTER + 14 for line in lines), default=8)
        box.height = len(lines) * _LINE + 8
        inside = [source for source in box.sources if box.role != "entry"]
        free = [n for n, lane in enumerate(lanes) if lane[-1] in inside]
        start = min((one.bottom for one in inside), default=math.inf)
        # A lane is busy until its value is read.
        ends = [last_read.get(lane[-1], block.boxes.index(lane[-1])) for lane in lanes]
        ended = [end < number and block.boxes[end].bottom <= start for end in ends]
        free += [n for n, is_free in enumerate(ended) if is_free]
        box.lane = next(iter(free), len(lanes))
        lanes[box.lane :] = lanes[box.lane :] or [[]]
        above = (*inside, *lanes[box.lane][-1:])
        box.y = max((one.bottom + _GAP for one in above), default=_LINE + 20)
        lanes[box.lane].append(box)
    right = float(_PAD)
    for lane in lanes:
        right = _widen(block, lane, right) + _GAP
    heading = len(f"{block.title} ×{block.times}") * _CHARACTER
    block.width = max(right - _GAP + _PAD, heading + 2 * _PAD)
    block.height = max(box.bottom for box in block.boxes) + _PAD


def _widen(block: Block, lane: list[Box], left: float) -> float:
    """Center a lane's boxes, with room at their left for edges that skip some; returns its end."""
    skips = [
        (source, box)
        for above, box in pairwise(lane)
        for source in box.sources
        if source in lane and source is not above
    ]
    skips.sort(key=lambda skip: skip[1].y - skip[0].y)
    for number, (source, box) in enumerate(skips):
        taken = {
            block.skips[skip]
            for skip in skips[:number]
            if skip[0].y < box.y and source.y < skip[1].y
        }
        block.skips[source, box] = min(set(range(len(taken) + 1)) - taken)
    left += _TRACK * max((block.skips[skip] + 1 for skip in skips), default=0)
    width = max(box.width for box in lane)
    for box in lane:
        box.x = left + (width - box.width) / 2
    return left + width


def _place(blocks: list[Block]) -> None:
    """Put blocks in columns from left to right.

    A stage of several blocks has its own column; stages of one block share theirs, and blocks
    without a layer join in.
    """
    sizes = Counter(block.stage for block in blocks)
    columns: list[list[Block]] = []
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


# -- shapes ----------------------------------------------------------------------------------


def _rendered(name: str, found: Outline) -> str:
    plan, config, blocks = found.plan, found.plan.config, found.blocks
    kept = sum(layer.kept for layer in plan.layers if not layer.tied_to)
    share = f"{short_count(kept)} of {short_count(plan.converted)}"
    dense = f"{len(plan.left_dense)} layers stay" if plan.left_dense else "no layer stays"
    width = max(*(block.x + block.width for block in blocks), 640)
    legend, top = _legend(found.boxes, width)
    home = {box: block for block in blocks for box in block.boxes}
    shapes = [rect(*block.place, rx=8, fill="#f0f1f4", stroke="#d9dce1") for block in blocks]
    shapes += [_edge(source, box, home) for box in home for source in box.sources if source in home]
    shapes += [shape for block in blocks for shape in _heading(block)]
    shapes += [_drawn(box, home[box]) for box in home]
    return render(
        "surgery.svg.j2",
        title=f"{name} → {config.bits} ticket, prune {config.prune:g}",
        subtitle=f"{len(plan.layers)} ticket layers keep {share} weights; {dense} dense",
        width=f"{width + 48:.0f}",
        height=f"{top + max(block.bottom for block in blocks) + 48:.0f}",
        top=top,
        legend=legend,
        shapes=shapes,
    )


def _legend(boxes: list[Box], width: float) -> tuple[list[Shape], int]:
    """One swatch per role that occurs, with how often; and where the drawing below it may begin."""
    counts = Counter(role for role, _ in {(box.role, box.path) for box in boxes})
    counts["guess"] = sum(box.guessed for box in boxes)
    shapes: list[Shape] = []
    x, y = 0.0, 52
    for role, (fill, stroke, words) in _ROLES.items():
        if counts[role]:
            label = f"{words} ({counts[role]})"
            if x + len(label) * _CHARACTER + 24 > width:
                x, y = 0.0, y + 22
            dashes = _DASHES if role == "guess" else None
            look = {"fill": fill, "stroke": stroke, "stroke_dasharray": dashes}
            shapes.append(rect(x, y, 16, 14, rx=3, **look))
            shapes.append(text(label, x + 22, y + 11, class_="legend"))
            x += len(label) * _CHARACTER + 46
    return shapes, y + 34


def _heading(block: Block) -> list[Shape]:
    """Over the edges, on a ground of its own."""
    times = f"×{block.times}" if block.times > 1 else ""
    title = f"{block.title} " if times else block.title
    ground = rect(block.x + 7, block.y + 6, len(title + times) * _CHARACTER + 6, 16, fill="#f0f1f4")
    badge = [Shape("tspan", {"class": "badge", "fill": "#b91c1c"}, times)] if times else []
    return [ground, text(title, block.x + 10, block.y + 18, badge, font_weight="bold")]


def _drawn(box: Box, block: Block) -> Shape:
    if box.role == "entry":
        return circle(box.middle, box.y + 4, 3.5, fill="#6b7280")
    fill, stroke, _ = _ROLES[box.role]
    shapes = [rect(*box.place, rx=4, fill=fill, stroke=stroke)]
    for number, line in enumerate(_lines(box, block)):
        weight = "bold" if box.is_layer and not number else None
        y = box.y + 15 + number * _LINE
        shapes.append(text(line, box.middle, y, text_anchor="middle", font_weight=weight))
    return group(shapes, box.path, class_=box.role, data_times=block.times)


def _edge(source: Box, box: Box, home: dict[Box, Block]) -> Shape:
    block, other = home[box], home[source]
    fork, side = source.bottom + 6, box.y + box.height / 2
    joins = source.lane != box.lane and any(one.lane == box.lane for one in box.sources)
    end = (box.x, side)
    if other is not block and other.x == block.x and other.y < block.y:  # from the block above
        corners, end = (
            [(source.middle, block.y - _GAP / 2), (box.middle, block.y - _GAP / 2)],
            (box.middle, box.y),
        )
    elif other is not block:  # from another column, through the channel between the two
        below, channel = other.bottom + 8, block.x - 1.5 * _GAP
        corners = [(source.middle, below), (channel, below), (channel, side)]
    elif (source, box) in block.skips or (
        joins and any(one.lane == source.lane and source.y < one.y < side for one in block.boxes)
    ):
        track = (
            min(one.x for one in block.boxes if one.lane == box.lane)
            - 8
            - block.skips.get((source, box), 0) * _TRACK
        )
        corners = [(source.middle, fork), (track, fork), (track, side)]
    elif joins:  # the end of a branch
        corners, end = (
            [(source.middle, side)],
            (box.x + (box.width if source.lane > box.lane else 0), side),
        )
    else:  # the box below, or a branch's first
        corners, end = (
            [(source.middle, fork), (box.middle, fork)] if source.lane != box.lane else [],
            (box.middle, box.y),
        )
    line = _rounded([(source.middle, source.bottom), *corners, end])
    look = {"fill": "none", "stroke": "#6b7280", "marker_end": "url(#tip)"}
    return path(line, stroke_dasharray=_DASHES if box.guessed else None, **look)


def _rounded(points: list[tuple[float, float]]) -> str:
    """A line through the points, its corners rounded off."""
    line = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for before, (x, y), after in zip(points, points[1:], points[2:]):
        near = []
        for to_x, to_y in (before, after):
            share = min(6 / max(abs(to_x - x) + abs(to_y - y), 1), 0.5)
            near.append(f"{x + share * (to_x - x):.1f} {y + share * (to_y - y):.1f}")
        line += f"L{near[0]}Q{x:.1f} {y:.1f} {near[1]}"
    return f"{line}L{points[-1][0]:.1f} {points[-1][1]:.1f}"
