"""Masks as bytes, entropy-coded under the model that makes each smallest.

The bits of a mask are grouped by how likely they are to be set. Each group is packed into bytes,
and a byte with k bits set has the probability d^k (1-d)^(8-k), where d is the group's density.
Coding bytes rather than bits takes an eighth of the symbols. All probabilities are integers over
2^24, computed in integer arithmetic (`byte_weights`), so that every reader finds the same ones.

A search mostly keeps weights whose initial scores were large, and the seed determines these scores.
Grouping weights by their initial score therefore costs nothing to describe and leaves half of the
entropy of a searched mask, or less. docs/format.md specifies the bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import constriction
import numpy as np

from mptify.errors import DamagedTicket

__all__ = ["WEIGHTS_PER_BYTE", "byte_weights", "decode", "describe", "encode", "unpack"]

RAW, DENSITY, SCORES = 0, 1, 2
# Upper bounds, so that a small file cannot ask for much memory:
WEIGHTS_PER_BYTE = {RAW: 8, DENSITY: 1024, SCORES: 256}
_SUM_OF_WEIGHTS = (1 << 24) - 256  # the coder adds 1 to the weight of each of 256 bytes
_ONES = np.array([bin(byte).count("1") for byte in range(256)])

Levels = Callable[[], Iterator[np.ndarray]]
"""The magnitude of each weight's initial score, from 0 to 127, in blocks."""


# -- probabilities -------------------------------------------------------------------------------


def byte_weights(density: int) -> np.ndarray:
    """Weights of the 256 bytes, for bits that are set with probability `density` / 65536.

    They sum to 2^24 - 256. A byte's probability is its weight plus one, over 2^24.
    """
    by_ones = [
        _SUM_OF_WEIGHTS * density**ones * (65536 - density) ** (8 - ones) >> 128
        for ones in range(9)
    ]
    weights = np.array(by_ones)[_ONES]
    weights[0 if density < 32768 else 255] += _SUM_OF_WEIGHTS - weights.sum()
    return weights


@functools.lru_cache(maxsize=2048)
def _model(density: int) -> constriction.stream.model.Categorical:
    # constriction's rounding leaves integers that sum to 2^24 - 256 unchanged.
    weights = byte_weights(density).astype(np.float64)
    return constriction.stream.model.Categorical(weights, perfect=False)


def _densities(ones: np.ndarray, counts: np.ndarray) -> list[int]:
    return [
        min(max(round(65536 * one / max(count, 1)), 1), 65535)
        for one, count in zip(ones.tolist(), counts.tolist(), strict=True)
    ]


def _entropies(ones: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """n·H(ones/n) of each group, in bytes."""
    share = np.clip(ones / np.maximum(counts, 1), 1e-12, 1 - 1e-12)
    return -counts * (share * np.log2(share) + (1 - share) * np.log2(1 - share)) / 8


# -- both ways -----------------------------------------------------------------------------------


def encode(mask: np.ndarray, levels: Levels | None = None) -> bytes:
    """The mask as bytes, under the model that makes it smallest.

    Args:
        mask: The survivors (bool).
        levels: The levels of the initial scores; without them, they are not used.
    """
    bits = np.ascontiguousarray(mask, dtype=bool).reshape(-1)
    raw = bytes([RAW]) + np.packbits(bits, bitorder="little").tobytes()
    ones = np.array([np.count_nonzero(bits)])
    best, coded = 8 + float(_entropies(ones, np.array([bits.size])).sum()), None
    if levels is not None:
        blocks = list(levels())
        size, width, densities = _best_width(bits, blocks)
        if 1.01 * size + 8 < best:  # it takes longer to read, and must be worth that
            best, coded = size, _encode_scores(bits, blocks, width, densities)
    if coded is None:
        coded = _encode_density(bits, _densities(ones, np.array([bits.size]))[0])
    missing = -(-bits.size // WEIGHTS_PER_BYTE[coded[0]]) - len(coded)
    coded += bytes(-(-max(missing, 0) // 4) * 4)  # the coder never ends in words of zeros itself
    return coded if len(coded) < len(raw) else raw


def decode(
    blob: bytes, shape: Sequence[int], kept: int, levels: Levels | None = None
) -> np.ndarray:
    """The mask back.

    Raises:
        DamagedTicket: Not every byte is used, or not exactly `kept` weights survive.
    """
    count = math.prod(shape)
    if not blob or blob[0] not in WEIGHTS_PER_BYTE:
        found = blob[0] if blob else "none"
        raise DamagedTicket(f"masks are coded by models 0 to 2, and this one by model {found}")
    if count > WEIGHTS_PER_BYTE[blob[0]] * len(blob):
        raise DamagedTicket(f"a mask of {count:,} weights can't come from {len(blob):,} bytes")
    body = memoryview(blob)[1:]
    if blob[0] == RAW:
        bits = unpack(np.frombuffer(body, np.uint8), count)
    elif blob[0] == DENSITY:
        bits = _decode_density(body, count)
    elif levels is None:
        raise DamagedTicket("a mask is coded by initial scores, which are not known")
    else:
        bits = _decode_scores(body, count, levels)
    if int(bits.sum()) != kept:
        raise DamagedTicket(f"{int(bits.sum()):,} weights survive where {kept:,} should")
    return bits.reshape(shape)


def describe(blob: bytes) -> str:
    """The model a mask was coded by, in a few words."""
    if blob[0] == SCORES:
        return f"{1 << blob[1]} classes of initial scores"
    return "raw bits" if blob[0] == RAW else "one density"


def unpack(packed: np.ndarray, count: int, padding: bool = False) -> np.ndarray:
    """Bits from bytes that must hold exactly these, padded with zeros (or ones)."""
    padded = packed[-1] >> count % 8 != padding * (255 >> count % 8) if packed.size else False
    if packed.size != -(-count // 8) or (count % 8 and padded):
        raise DamagedTicket("packed bits don't match their number")
    return np.unpackbits(packed, count=count, bitorder="little").view(bool)


def _words(coder: constriction.stream.stack.AnsCoder) -> bytes:
    return coder.get_compressed().astype("<u4").tobytes()


def _coder(words: memoryview) -> constriction.stream.stack.AnsCoder:
    if len(words) % 4:
        raise DamagedTicket("a mask's coded words are cut short")
    try:
        values = np.trim_zeros(np.frombuffer(words, "<u4").astype(np.uint32), "b")
        return constriction.stream.stack.AnsCoder(values)
    except ValueError as error:
        raise DamagedTicket("a mask's coded words end as no encoder leaves them") from error


def _require_end(coder: constriction.stream.stack.AnsCoder) -> None:
    if not coder.is_empty():
        raise DamagedTicket("a mask's coded words go on after its end")


# -- one density ---------------------------------------------------------------------------------


def _encode_density(bits: np.ndarray, density: int) -> bytes:
    coder = constriction.stream.stack.AnsCoder()
    symbols = np.packbits(bits, bitorder="little").astype(np.int32)
    coder.encode_reverse(symbols, _model(density))
    return bytes([DENSITY]) + density.to_bytes(2, "little") + _words(coder)


def _decode_density(body: memoryview, count: int) -> np.ndarray:
    density = int.from_bytes(body[:2], "little")
    if len(body) < 2 or not density:
        raise DamagedTicket("a mask has no density, or a density of zero")
    coder = _coder(body[2:])
    packed = coder.decode(_model(density), -(-count // 8)).astype(np.uint8)
    _require_end(coder)
    return unpack(packed, count)


# -- classes of initial scores -------------------------------------------------------------------


def _best_width(bits: np.ndarray, blocks: list[np.ndarray]) -> tuple[float, int, list[int]]:
    """The approximate size in bytes, the bits of a class, and the density of each class."""
    tally, start = np.zeros(256, np.int64), 0
    for block in blocks:
        survives = bits[start : start + block.size].view(np.uint8) << 7
        tally += np.bincount(block | survives, minlength=256)
        start += block.size
    best: tuple[float, int, list[int]] = (math.inf, 0, [])
    for width in range(1, 8):
        zeros, ones = tally.reshape(2, 1 << width, -1).sum(2)
        overhead = 10 + (2 << width) + (len(blocks) << width) / 4
        size = overhead + float(_entropies(ones, zeros + ones).sum())
        size = max(size, bits.size / WEIGHTS_PER_BYTE[SCORES])
        if size < 0.99 * best[0]:  # each class is a call of the coder, and must be worth it
            best = (size, width, _densities(ones, zeros + ones))
    return best


def _encode_scores(
    bits: np.ndarray, blocks: list[np.ndarray], width: int, densities: list[int]
) -> bytes:
    coder = constriction.stream.stack.AnsCoder()
    end = bits.size
    for block in reversed(blocks):
        order, counts = _by_class(block, width)
        ranked, stop = bits[end - block.size : end][order], block.size
        for count, density in zip(reversed(counts), reversed(densities), strict=True):
            if count:
                padding = np.full(-count % 8, density >= 32768)
                padded = np.append(ranked[stop - count : stop], padding)
                symbols = np.packbits(padded, bitorder="little").astype(np.int32)
                coder.encode_reverse(symbols, _model(density))
            stop -= count
        end -= block.size
    return bytes([SCORES, width]) + np.array(densities, "<u2").tobytes() + _words(coder)


def _decode_scores(body: memoryview, count: int, levels: Levels) -> np.ndarray:
    width = body[0] if len(body) else 0
    valid = 1 <= width <= 7
    densities = np.frombuffer(body[1 : 1 + (2 << width)] if valid else b"", np.uint8)
    if densities.size != 2 << width or not densities.view("<u2").all():
        raise DamagedTicket("a mask's classes of initial scores are not as an encoder writes them")
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
    _require_end(coder)
    return bits


def _by_class(block: np.ndarray, width: int) -> tuple[np.ndarray, list[int]]:
    """The weights of each class, class by class in flat order, and how many each class has."""
    classes = block >> (7 - width)
    counts = np.bincount(classes, minlength=1 << width).tolist()
    return np.argsort(classes, kind="stable"), counts
