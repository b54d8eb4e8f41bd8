"""Masks as bytes: entropy-coded under the model that makes each smallest, raw bits where none helps.

A mask's bits are grouped by how likely they are to be set, each group is packed into bytes, and a byte with k bits set
has the probability d^k (1-d)^(8-k), d the group's density. One coder call per group, an eighth of the symbols. All
probabilities are integers over 2^24, made by integer arithmetic (`byte_weights`), so every reader finds the same ones.

What a search kept is mostly what had large scores to begin with, and those the seed says. So the best groups are often
those of like first score, which cost nothing to describe: half of a searched mask's entropy, or less, is left.
The layout of the bytes, for a second reader, is in docs/format.md.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import constriction
import numpy as np

from mptify.errors import DamagedTicket
from mptify.nn.topk import mask_entropy

__all__ = ["WEIGHTS_PER_BYTE", "byte_weights", "decode", "describe", "encode", "unpack"]

RAW, CLASSES, ADAPTIVE, LEVELS = 0, 1, 2, 3
BLOCK = 2048  # weights that the adaptive model codes at one density
MOST_CLASSES = 16  # per axis
WEIGHTS_PER_BYTE = {RAW: 8, CLASSES: 1024, ADAPTIVE: 1024, LEVELS: 256}  # at most, so that a small file can't ask for much
_FREE = (1 << 24) - 256  # of 2^24, each of 256 bytes has one for sure
_ONES = np.array([bin(byte).count("1") for byte in range(256)])


# -- probabilities -------------------------------------------------------------------------------------------------------


def byte_weights(density: int) -> np.ndarray:
    """Weights of the 256 bytes, summing to 2^24 - 256, for bits that are set with probability `density` / 65536.

    A byte's probability is its weight plus one, over 2^24.
    """
    by_ones = [_FREE * density**ones * (65536 - density) ** (8 - ones) >> 128 for ones in range(9)]
    weights = np.array(by_ones)[_ONES]
    weights[0 if density < 32768 else 255] += _FREE - weights.sum()
    return weights


@functools.lru_cache(maxsize=2048)
def _model(density: int) -> constriction.stream.model.Categorical:
    # Integers that sum to 2^24 - 256 come through constriction's own rounding unchanged.
    return constriction.stream.model.Categorical(byte_weights(density).astype(np.float64), perfect=False)


def _density(ones: int, count: int) -> int:
    return min(max(round(65536 * ones / max(count, 1)), 1), 65535)


# -- both ways -----------------------------------------------------------------------------------------------------------


Levels = Callable[[], Iterator[np.ndarray]]  # how large each weight's first score was, 0 to 127, in blocks


def encode(mask: np.ndarray, levels: Levels | None = None) -> bytes:
    """The mask as bytes, under the model that makes it smallest; without `levels`, first scores are none of them."""
    bits = np.ascontiguousarray(mask, dtype=bool)
    packed = np.packbits(bits.reshape(-1), bitorder="little")
    raw = bytes([RAW]) + packed.tobytes()
    plans = [_plan_classes(bits)]
    # What takes longer to read must be worth it.
    if levels is not None:
        plans.append(_dearer(_plan_levels(bits.reshape(-1), levels), 1.01))
    if plans[-1].size > 0.9 * plans[0].size:
        plans.append(_dearer(_plan_adaptive(packed, bits.size), 1.001))
    best = min(plans, key=lambda plan: plan.size)
    coded = best.encode() if best.size < len(raw) else raw
    missing = -(-bits.size // WEIGHTS_PER_BYTE[coded[0]]) - len(coded)
    coded += bytes(-(-max(missing, 0) // 4) * 4)  # whole words of zeros, which no coder ends in by itself
    return coded if len(coded) < len(raw) else raw


@dataclass(frozen=True)
class _Plan:
    """A model of a mask: about how many bytes it would take, and how to make them."""

    size: float
    encode: Callable[[], bytes]


def _dearer(plan: _Plan, factor: float) -> _Plan:
    return replace(plan, size=factor * plan.size + 8)


def decode(blob: bytes, shape: Sequence[int], kept: int, levels: Levels | None = None) -> np.ndarray:
    """The mask back, or `DamagedTicket`: every byte must be used, and exactly `kept` weights survive."""
    count = math.prod(shape)
    if not blob or blob[0] not in WEIGHTS_PER_BYTE:
        raise DamagedTicket(f"masks are coded in ways 0 to 3, and this one in way {blob[0] if blob else 'none'}")
    if count > WEIGHTS_PER_BYTE[blob[0]] * len(blob):
        raise DamagedTicket(f"a mask of {count:,} weights can't come from {len(blob):,} bytes")
    body = memoryview(blob)[1:]
    if blob[0] == RAW:
        bits = unpack(np.frombuffer(body, np.uint8), count)
    elif blob[0] == CLASSES:
        bits = _decode_classes(body, shape)
    elif blob[0] == ADAPTIVE:
        bits = _decode_adaptive(body, count)
    else:
        if levels is None:
            raise DamagedTicket("a mask is coded by first scores that nobody knows")
        bits = _decode_levels(body, count, levels)
    if int(bits.sum()) != kept:
        raise DamagedTicket(f"{int(bits.sum()):,} weights survive where {kept:,} should")
    return bits.reshape(shape)


def describe(blob: bytes) -> str:
    """Which model a mask was coded under, in a few words."""
    if blob[0] == RAW:
        return "raw bits"
    if blob[0] == ADAPTIVE:
        return "adaptive"
    if blob[0] == LEVELS:
        return f"{1 << blob[1]} classes of first scores"
    names = [f"{many} {axis}" for many, axis in zip(blob[1:4], ("filter", "channel", "tap"), strict=True) if many > 1]
    return " × ".join(names) + " classes" if names else "one density"


def unpack(packed: np.ndarray, count: int, filler: bool = False) -> np.ndarray:
    """Bits from bytes that must hold exactly these, with zeros (or ones) behind them."""
    if packed.size != -(-count // 8) or (count % 8 and packed[-1] >> count % 8 != filler * (255 >> count % 8)):
        raise DamagedTicket("packed bits don't match their number")
    return np.unpackbits(packed, count=count, bitorder="little").view(bool)


def _words(coder: constriction.stream.stack.AnsCoder) -> bytes:
    return coder.get_compressed().astype("<u4").tobytes()


def _coder(words: memoryview) -> constriction.stream.stack.AnsCoder:
    if len(words) % 4:
        raise DamagedTicket("a mask's coded words are cut short")
    try:
        values = np.trim_zeros(np.frombuffer(words, "<u4").astype(np.uint32), "b")  # without the filler
        return constriction.stream.stack.AnsCoder(values)
    except ValueError as error:
        raise DamagedTicket("a mask's coded words end in a way that no encoder leaves them") from error


# -- classes of filters, channels and taps ---------------------------------------------------------------------------------


def _axes(shape: Sequence[int]) -> tuple[int, int, int]:
    """Any weight as filters × channels × taps."""
    outputs, inputs = (*shape, 1, 1)[:2]
    return outputs, inputs, math.prod(shape[2:])


def _cells(classes: Sequence[np.ndarray], many: Sequence[int]) -> Iterator[tuple]:
    """For each combination of classes, the index of its weights: some filters by some channels by some taps, in flat order."""
    if math.prod(many) == 1:
        yield (slice(None),) * 3
        return
    members = [[np.flatnonzero(one == k) for k in range(many[axis])] for axis, one in enumerate(classes)]
    for combination in itertools.product(*members):
        yield np.ix_(*combination)


def _plan_classes(bits: np.ndarray) -> _Plan:
    cube = bits.reshape(_axes(bits.shape))
    plane = cube.view(np.uint8).sum(0, dtype=np.uint32)
    tallies = (np.count_nonzero(cube.reshape(cube.shape[0], -1), axis=1), plane.sum(1), plane.sum(0))
    choices = [_clusterings(tally, cube.size) for tally in tallies]
    values = cube.reshape(cube.shape[0], -1).astype(np.float32) if any(len(one) > 1 for one in choices) else None
    best = _Plan(math.inf, lambda: b"")
    for outputs in choices[0]:
        by_filter = plane[None] if values is None else _members(outputs).T.astype(np.float32) @ values
        by_filter = by_filter.reshape(-1, *cube.shape[1:])
        for inputs, taps in itertools.product(choices[1], choices[2]):
            members = [_members(one) for one in (outputs, inputs, taps)]
            ones = (np.moveaxis(by_filter, 2, 1) @ members[1]).transpose(0, 2, 1) @ members[2]
            totals = [one.sum(0) for one in members]
            counts = totals[0][:, None, None] * totals[1][:, None] * totals[2]
            sides = sum(-(-len(one) // 2) for one in (outputs, inputs, taps) if one.max())
            size = 8 + sides + 2 * ones.size + float(_entropies(counts, ones).sum())
            if size < best.size:
                best = _Plan(size, functools.partial(_encode_classes, bits, (outputs, inputs, taps), ones, counts))
    return best


def _clusterings(tally: np.ndarray, count: int) -> list[np.ndarray]:
    """Ways to class an axis, from the survivors of each of its places: one class, and more if that can pay at all."""
    each = count // len(tally)
    gained = mask_entropy(count, int(tally.sum())) / 8 - float(_entropies(np.array(each), tally).sum())
    many = (1, 4, MOST_CLASSES) if gained > len(tally) / 2 + 8 else (1,)
    return [_clustered(tally / each, k) for k in many]


def _entropies(counts: np.ndarray, ones: np.ndarray) -> np.ndarray:
    """n·H(ones/n) in bytes, of many groups."""
    share = np.clip(ones / np.maximum(counts, 1), 1e-12, 1 - 1e-12)
    return -counts * (share * np.log2(share) + (1 - share) * np.log2(1 - share)) / 8


def _encode_classes(bits: np.ndarray, classes: Sequence[np.ndarray], ones: np.ndarray, counts: np.ndarray) -> bytes:
    many = [int(one.max()) + 1 for one in classes]
    head = bytes([CLASSES, *many]) + b"".join(_nibbles(one) for one, k in zip(classes, many, strict=True) if k > 1)
    densities = [_density(one, count) for one, count in zip(ones.reshape(-1).tolist(), counts.reshape(-1).tolist(), strict=True)]
    cube = bits.reshape(_axes(bits.shape))
    packed = [np.packbits(cube[cell], bitorder="little").astype(np.int32) for cell in _cells(classes, many)]
    coder = constriction.stream.stack.AnsCoder()
    for symbols, density in zip(reversed(packed), reversed(densities), strict=True):
        if symbols.size:
            coder.encode_reverse(symbols, _model(density))
    return head + np.array(densities, "<u2").tobytes() + _words(coder)


def _decode_classes(body: memoryview, shape: Sequence[int]) -> np.ndarray:
    sizes, many, at = _axes(shape), tuple(body[:3]), 3
    if len(many) < 3 or not all(1 <= one <= min(MOST_CLASSES, size) for one, size in zip(many, sizes, strict=True)):
        raise DamagedTicket("a mask has an impossible number of density classes")
    classes = []
    for k, size in zip(many, sizes, strict=True):
        length = -(-size // 2) if k > 1 else 0
        classes.append(_from_nibbles(body[at : at + length], size, k) if k > 1 else np.zeros(size, np.uint16))
        at += length
    cells = math.prod(many)
    densities = np.frombuffer(body[at : at + 2 * cells], np.uint8)
    if densities.size != 2 * cells:
        raise DamagedTicket("a mask's densities are cut short")
    levels = densities.view("<u2").tolist()
    if not all(levels):
        raise DamagedTicket("a mask has a density of zero")
    coder = _coder(body[at + 2 * cells :])
    bits = np.empty(sizes, bool)
    for cell, density in zip(_cells(classes, many), levels, strict=True):
        part = bits.shape if math.prod(many) == 1 else tuple(index.size for index in cell)
        if count := math.prod(part):
            bits[cell] = unpack(coder.decode(_model(density), -(-count // 8)).astype(np.uint8), count).reshape(part)
    return _ended(coder, bits)


def _ended(coder: constriction.stream.stack.AnsCoder, bits: np.ndarray) -> np.ndarray:
    if not coder.is_empty():
        raise DamagedTicket("a mask's coded words go on behind its end")
    return bits


def _members(classes: np.ndarray) -> np.ndarray:
    """Size × classes: 1 where one belongs to the other."""
    return np.eye(int(classes.max()) + 1)[classes]


def _clustered(densities: np.ndarray, many: int) -> np.ndarray:
    """Up to `many` classes of similar density, numbered from 0, by k-means on a scale where noise is about the same everywhere.

    Roots, unlike the arcsine that would be exact here, are rounded alike on every machine, and so files come out alike.
    """
    if many == 1 or len(densities) == 1:
        return np.zeros(len(densities), np.uint16)
    scale = np.sqrt(densities.astype(np.float64)) - np.sqrt(1 - densities.astype(np.float64))
    centres = np.quantile(scale, (np.arange(many) + 0.5) / many)
    for _ in range(8):
        centres = np.unique(centres)
        nearest = np.searchsorted((centres[1:] + centres[:-1]) / 2, scale)
        totals = np.bincount(nearest, minlength=len(centres))
        sums = np.bincount(nearest, scale, minlength=len(centres))
        centres = sums[totals > 0] / totals[totals > 0]
    nearest = np.searchsorted((centres[1:] + centres[:-1]) / 2, scale)
    return np.unique(nearest, return_inverse=True)[1].astype(np.uint16)


def _nibbles(classes: np.ndarray) -> bytes:
    padded = np.append(classes, 0).astype(np.uint8) if classes.size % 2 else classes.astype(np.uint8)
    return (padded[::2] | padded[1::2] << 4).tobytes()


def _from_nibbles(packed: memoryview, size: int, many: int) -> np.ndarray:
    pairs = np.frombuffer(packed, np.uint8)
    if pairs.size != -(-size // 2):
        raise DamagedTicket("a mask's classes are cut short")
    classes = np.stack([pairs & 15, pairs >> 4], 1).reshape(-1)
    if size % 2 and classes[-1]:
        raise DamagedTicket("a mask's classes go on behind their end")
    classes = classes[:size].astype(np.uint16)
    if classes.max() >= many:
        raise DamagedTicket("a mask uses a density class that it doesn't have")
    return classes


# -- densities that follow what came before ----------------------------------------------------------------------------------


def _followed(density: int, ones: int, count: int, rate: int) -> int:
    """The next block's density: a step of 1/2^rate from the last one's towards what was seen."""
    return min(max(density + (((ones << 16) // count - density) >> rate), 1), 65535)


def _coarse(density: int) -> int:
    return density & ~63 | 32  # 1,024 tables are enough


def _plan_adaptive(packed: np.ndarray, count: int) -> _Plan:
    ones = np.add.reduceat(_ONES[packed], np.arange(0, packed.size, BLOCK // 8)).tolist()
    counts = [min(BLOCK, count - start) for start in range(0, count, BLOCK)]
    first = _density(ones[0], counts[0])
    best = _Plan(math.inf, lambda: b"")
    for rate in (1, 2, 4):
        density, used = first, []
        for one, size in zip(ones, counts, strict=True):
            used.append(_coarse(density))
            density = _followed(density, one, size, rate)
        share = np.array(used) / 65536
        bits = -np.array(ones) * np.log2(share) - (np.array(counts) - ones) * np.log2(1 - share)
        if bits.sum() / 8 + 8 < best.size:
            best = _Plan(float(bits.sum()) / 8 + 8, functools.partial(_encode_adaptive, packed, rate, first, used))
    return best


def _encode_adaptive(packed: np.ndarray, rate: int, first: int, used: list[int]) -> bytes:
    symbols = packed.astype(np.int32)
    coder = constriction.stream.stack.AnsCoder()
    for index in reversed(range(len(used))):
        coder.encode_reverse(symbols[index * BLOCK // 8 : (index + 1) * BLOCK // 8], _model(used[index]))
    return bytes([ADAPTIVE, rate]) + first.to_bytes(2, "little") + _words(coder)


def _decode_adaptive(body: memoryview, count: int) -> np.ndarray:
    if len(body) < 3 or not 1 <= body[0] <= 5 or not (density := int.from_bytes(body[1:3], "little")):
        raise DamagedTicket("a mask's adaptive model starts in a way that no encoder writes")
    coder = _coder(body[3:])
    packed = np.empty(-(-count // 8), np.uint8)
    for start in range(0, count, BLOCK):
        here = min(BLOCK, count - start)
        block = coder.decode(_model(_coarse(density)), -(-here // 8)).astype(np.uint8)
        packed[start // 8 : start // 8 + block.size] = block
        density = _followed(density, int(_ONES[block].sum()), here, body[0])
    return _ended(coder, unpack(packed, count))


# -- classes of first scores ---------------------------------------------------------------------------------------------------


def _plan_levels(bits: np.ndarray, levels: Levels) -> _Plan:
    blocks = list(levels())
    tally, start = np.zeros(256, np.int64), 0
    for block in blocks:
        tally += np.bincount(block | bits[start : start + block.size].view(np.uint8) << 7, minlength=256)
        start += block.size
    best = _Plan(math.inf, lambda: b"")
    for width in range(1, 8):
        zeros, ones = tally.reshape(2, 1 << width, -1).sum(2)
        size = 10 + (2 << width) + (len(blocks) << width) / 4 + float(_entropies(zeros + ones, ones).sum())
        size = max(size, bits.size / WEIGHTS_PER_BYTE[LEVELS])
        if size < 0.99 * best.size:  # each class is a call of the coder: it must be worth it
            densities = [_density(one, count) for one, count in zip(ones.tolist(), (zeros + ones).tolist(), strict=True)]
            best = _Plan(size, functools.partial(_encode_levels, bits, blocks, width, densities))
    return best


def _encode_levels(bits: np.ndarray, blocks: list[np.ndarray], width: int, densities: list[int]) -> bytes:
    coder = constriction.stream.stack.AnsCoder()
    end = bits.size
    for block in reversed(blocks):
        order, counts = _by_class(block, width)
        ranked, stop = bits[end - block.size : end][order], block.size
        for count, density in zip(reversed(counts), reversed(densities), strict=True):
            if count:
                filled = np.append(ranked[stop - count : stop], np.full(-count % 8, density >= 32768))
                coder.encode_reverse(np.packbits(filled, bitorder="little").astype(np.int32), _model(density))
            stop -= count
        end -= block.size
    return bytes([LEVELS, width]) + np.array(densities, "<u2").tobytes() + _words(coder)


def _decode_levels(body: memoryview, count: int, levels: Levels) -> np.ndarray:
    width = body[0] if len(body) else 0
    densities = np.frombuffer(body[1 : 1 + (2 << width)], np.uint8) if 1 <= width <= 7 else np.zeros(0, np.uint8)
    if densities.size != 2 << width or not densities.view("<u2").all():
        raise DamagedTicket("a mask's classes of first scores are not as an encoder writes them")
    coder = _coder(body[1 + (2 << width) :])
    bits, start = np.empty(count, bool), 0
    for block in levels():
        order, counts = _by_class(block, width)
        ranked, at = np.empty(block.size, bool), 0
        for here, density in zip(counts, densities.view("<u2").tolist(), strict=True):
            if here:
                packed = coder.decode(_model(density), -(-here // 8)).astype(np.uint8)
                ranked[at : at + here] = unpack(packed, here, density >= 32768)
            at += here
        bits[start : start + block.size][order] = ranked
        start += block.size
    return _ended(coder, bits)


def _by_class(block: np.ndarray, width: int) -> tuple[np.ndarray, list[int]]:
    """Where the weights of each class are, class by class in flat order, and how many there are of each."""
    classes = block >> (7 - width)
    return np.argsort(classes, kind="stable"), np.bincount(classes, minlength=1 << width).tolist()
