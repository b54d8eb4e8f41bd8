"""Gain, BatchNorm and sign behind a layer, turned into a threshold on the layer's sum.

Each module between a convolution's sum and a sign is monotone, in floating point too. So for each
filter the sums that give +1 are all sums from some number on, or all sums up to some number. We
find that number by running the float path's own modules on every integer that the sum can be.
Signs from thresholds then agree with the float path bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Thresholds",
    "find_joint_thresholds",
    "find_real_thresholds",
    "find_thresholds",
    "validate_thresholds",
]


class Thresholds(NamedTuple):
    """Per filter, the smallest sum whose sign is +1.

    Attributes:
        least: [sets][filters]. For falling filters, the smallest negated sum.
        falling: [filters], whether larger sums give -1.
    """

    least: Tensor
    falling: Tensor


def find_thresholds(
    epilogue: Callable[[Tensor, float], Tensor], filters: int, limit: int, shortcut: bool
) -> Thresholds | None:
    """Thresholds of integer sums.

    Args:
        epilogue: Maps sums (1 × filters × 1 × n) and a shortcut's value to signs.
        filters: The number of filters.
        limit: The largest magnitude of a sum.
        shortcut: Whether there is one: then there are two sets of thresholds, one for a shortcut
            of -1 and one for +1.

    Returns:
        The thresholds, or None if the epilogue is not monotone.
    """
    sums = torch.arange(-limit, limit + 1)
    grid = sums.to(torch.float32).expand(1, filters, 1, -1).contiguous()
    values = (-1.0, 1.0) if shortcut else (0.0,)
    answers = torch.stack([epilogue(grid, value)[0, :, 0] > 0 for value in values])
    changes = (answers[..., 1:] != answers[..., :-1]).sum(-1)
    falls = answers[..., 0] & ~answers[..., -1]
    rises = answers[..., -1] & ~answers[..., 0]
    falling = falls.any(0)
    if (changes > 1).any() or (falling & rises.any(0)).any():
        return None
    # Of 2 · limit + 1 integers the `count` largest give +1; for a falling filter, the smallest,
    # which are the largest when negated.
    count = answers.sum(-1)
    return Thresholds(limit + 1 - count, falling)


def find_joint_thresholds(
    epilogue: Callable[[Tensor, Tensor], Tensor], filters: int, limit: int, other_limit: int
) -> Thresholds | None:
    """Thresholds of two layers whose outputs are added, by bisection: there are too many pairs.

    Args:
        epilogue: Maps the sums of both layers (1 × filters × 1 × n each) to signs.
        filters: The number of filters.
        limit: The largest magnitude of the first layer's sums.
        other_limit: The largest magnitude of the other layer's sums.

    Returns:
        `least` [filters][sums of the other layer, from -`other_limit` on], or None if the
        epilogue is not monotone.
    """
    others = torch.arange(-other_limit, other_limit + 1)
    grid = others.to(torch.float32).expand(1, filters, 1, -1).contiguous()

    def answer(sums: Tensor) -> Tensor:
        return epilogue(sums.to(torch.float32).view(grid.shape), grid)[0, :, 0] > 0

    ends = torch.full((filters, len(others)), limit)
    top, bottom = answer(ends), answer(-ends)
    falling = (bottom & ~top).any(1)
    if (falling & (top & ~bottom).any(1)).any():
        return None
    direction = torch.where(falling, -1, 1)[:, None]
    low, high = -ends, ends + 1  # the threshold lies between them
    while (low < high).any():
        middle = torch.div(low + high, 2, rounding_mode="floor")
        reached = answer(direction * middle.clamp_max(limit)) | (middle > limit)
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    return Thresholds(high, falling)


_LARGEST = torch.finfo(torch.float32).max


def find_real_thresholds(epilogue: Callable[[Tensor, float], Tensor], filters: int) -> Thresholds:
    """Thresholds of sums that are not integers, by bisection over all float32 numbers.

    Returns:
        `least` [filters]: the smallest float32 that gives +1; for falling filters, the largest.
        Infinity means never, and minus infinity always.
    """

    def answer(sums: Tensor) -> Tensor:
        return epilogue(sums.view(1, filters, 1, 1), 0.0).view(filters) > 0

    ends = torch.full((filters,), _LARGEST)
    top, bottom = answer(ends), answer(-ends)
    falling = bottom & ~top
    low, high = _rank(-ends), _rank(ends)  # the answer changes above `low`, at or below `high`
    for _ in range(33):
        middle = (low + high) // 2
        reached = answer(_number(middle)) != falling  # the same answer as at the top
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    least = _number(torch.where(falling, low, high))
    least = torch.where(~top & ~bottom, torch.inf, least)
    return Thresholds(torch.where(top & bottom, -torch.inf, least), falling)


def _rank(numbers: Tensor) -> Tensor:
    """Integers in the order of the float32 numbers."""
    bits = numbers.view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _number(rank: Tensor) -> Tensor:
    size = rank.abs().to(torch.int32).view(torch.float32)
    return torch.where(rank < 0, -size, size)


def validate_thresholds(sets: Tensor | None, filters: int) -> None:
    """Check a kernel's thresholds: none, or one or two per filter."""
    if sets is None:
        return
    if sets.dtype != torch.int32 or tuple(sets.shape) not in ((1, filters), (2, filters)):
        raise ValueError("its thresholds are not one or two per filter")
