"""The outline of a ticket model, which `surgery_drawing` draws: its boxes, grouped into blocks.

Blocks are those of the model. Equal blocks in a row are folded into one that stands for all.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from torch import nn

from mptify.report.surgery_boxes import Box, Rectangle, boxes_of
from mptify.surgery import Plan
from mptify.surgery.plans import plan_of
from mptify.surgery.trace import join

__all__ = ["Block", "Outline", "outline"]

_CHAIN = 22  # boxes of a plain chain that stay in one block


@dataclass(frozen=True)
class Outline:
    """What there is to draw: every box, and the blocks, of which equal ones are folded."""

    plan: Plan
    boxes: list[Box]
    blocks: list[Block]


def outline(model: nn.Module) -> Outline:
    """Walk a ticket model, group its boxes into blocks and fold them; nothing has a place yet."""
    boxes = boxes_of(model)
    blocks = _folded(_grouped(boxes))
    for block in blocks:
        _let_in(block)
    return Outline(plan_of(model), boxes, blocks)


@dataclass(eq=False)
class Block(Rectangle):
    """Boxes in one frame.

    `stage` is the part of the model whose blocks share a column; loose boxes have none. `skips`
    maps edges that pass boxes of their lane to the track they run on.
    """

    path: str = ""
    stage: str = ""
    boxes: list[Box] = field(default_factory=list)
    title: str = ""
    times: int = 1
    skips: dict[tuple[Box, Box], int] = field(default_factory=dict)


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
        place = "stem" if block is blocks[0] else "head" if block is blocks[-1] else parent
        block.title = block.path or place
    return blocks


def _split(prefix: str, boxes: list[Box]) -> list[Block]:
    """The numbered blocks below `prefix`, or all of it as one block; the model is always split."""
    start = len(prefix) + 1 if prefix else 0
    runs = [
        (join(prefix, name), list(run))
        for name, run in groupby(boxes, key=lambda box: box.path[start:].split(".")[0])
    ]
    large = [sum(box.is_layer and box.path != path for box in run) > 1 for path, run in runs]
    parts = [
        _split(path, run) if is_large else [Block(boxes=run)]
        for (path, run), is_large in zip(runs, large)
    ]
    numbered = _are_numbered([run for run, is_large in zip(runs, large) if is_large], boxes)
    if prefix and not numbered and all(len(part) == 1 for part in parts):
        return [Block(path=prefix, stage=prefix, boxes=boxes)]
    for part in parts:
        if len(part) == 1 and part[0].path:
            part[0].stage = prefix or part[0].path
    return [block for part in parts for block in part]


def _are_numbered(runs: list[tuple[str, list[Box]]], boxes: list[Box]) -> bool:
    """Whether these are blocks in a row.

    Their names differ in a number, they hold most layers, and each reads the one before.
    """
    stems = {re.sub(r"\d+$", "", path) for path, _ in runs}
    layers = [box for _, run in runs for box in run if box.is_layer]
    orders = [(above[0].order, run) for (_, above), (_, run) in pairwise(runs)]
    chained = all(
        any(start <= source.order < run[0].order for box in run for source in box.sources)
        for start, run in orders
    )
    alone = len(runs) == 1 and len(runs[0][1]) < len(boxes)
    most = 2 * len(layers) > sum(box.is_layer for box in boxes)
    return chained and most and not alone and len(stems) == 1 and runs[0][0] not in stems


def _pieces(block: Block) -> list[Block]:
    """A long chain without branches goes on in another block."""
    total = len(block.boxes)
    count = math.ceil(total / _CHAIN) if all(len(box.sources) < 2 for box in block.boxes) else 1
    size = math.ceil(total / count)
    return [
        Block(path=block.path, stage=block.stage, boxes=block.boxes[at : at + size])
        for at in range(0, total, size)
    ]


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
            box.sources = list(
                dict.fromkeys(stands_for.get(source, source) for source in box.sources)
            )
    return kept


def _signature(block: Block) -> list[tuple]:
    """Equal for blocks that differ in nothing but their number.

    Values from outside count by the order in which they are read.
    """
    known = {box: number for number, box in enumerate(block.boxes)}
    parent = block.path.rpartition(".")[0]
    return [
        (
            parent,
            box.path[len(block.path) :],
            box.role,
            box.detail,
            *(known.setdefault(source, len(known)) for source in box.sources),
        )
        for box in block.boxes
    ]


def _let_in(block: Block) -> None:
    """Let values from outside in through a dot at the top; name those from further back."""
    outside = {source for box in block.boxes for source in box.sources} - set(block.boxes)
    if not outside:
        return
    nearest, *others = sorted(outside, key=lambda box: -box.order)
    guessed = any(box.guessed for box in block.boxes if nearest in box.sources)
    doors = {nearest: Box(role="entry", sources=[nearest], guessed=guessed)}
    many = Box(detail=(f"from {len(others)} more places",))
    doors |= {
        source: Box(detail=(f"from {source.path}",)) if len(others) < 4 else many
        for source in others
    }
    for box in block.boxes:
        box.sources = list(dict.fromkeys(doors.get(source, source) for source in box.sources))
    block.boxes[:0] = dict.fromkeys(doors.values())
