"""What a layer's gain, BatchNorm and sign come to: a threshold on an integer, found by asking them.

Each step between a convolution's sum and a sign is monotone in floating point too, so for each filter the integers that give
+1 are all those from some number on, or all those up to it. Which number, the float path itself is asked: its own modules
are run on every integer that the sum can be. Signs from thresholds then agree with it bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Thresholds", "find_joint_thresholds", "find_real_thresholds", "find_thresholds"]


class Thresholds(NamedTuple):
    """`least` [sets][filters]: from which sum on the sign is +1. For filters that are `falling`, of the sum with its sign turned."""

    least: Tensor
    falling: Tensor


def find_thresholds(tail: Callable[[Tensor, float], Tensor], filters: int, most: int, shortcut: bool) -> Thresholds | None:
    """Ask `tail`, which maps sums (1 × filters × 1 × n) and a shortcut's value to signs; None where it is not monotone.

    `most` is how large a sum can be. With a shortcut there are two sets of thresholds: where it is -1, and where it is +1.
    """
    sums = torch.arange(-most, most + 1)
    grid = sums.to(torch.float32).expand(1, filters, 1, -1).contiguous()
    answers = torch.stack([tail(grid, value)[0, :, 0] > 0 for value in ((-1.0, 1.0) if shortcut else (0.0,))])
    changes = (answers[..., 1:] != answers[..., :-1]).sum(-1)
    falls = answers[..., 0] & ~answers[..., -1]
    rises = answers[..., -1] & ~answers[..., 0]
    falling = falls.any(0)
    if (changes > 1).any() or (falling & rises.any(0)).any():
        return None
    count = answers.sum(-1)
    # Of 2 · most + 1 integers, the `count` uppermost give +1; of a falling filter's, the lowest: with turned signs, the uppermost.
    return Thresholds(most + 1 - count, falling)


def find_joint_thresholds(tail: Callable[[Tensor, Tensor], Tensor], filters: int, most: int, most_other: int) -> Thresholds | None:
    """The same for two layers whose outputs are added: `least` [filters][sums of the other layer, from -`most_other` on].

    `tail` maps sums of both (1 × filters × 1 × n each) to signs. Found by halving, since there are too many pairs to ask for each.
    """
    others = torch.arange(-most_other, most_other + 1)
    grid = others.to(torch.float32).expand(1, filters, 1, -1).contiguous()

    def answer(sums: Tensor) -> Tensor:
        return tail(sums.to(torch.float32).view(grid.shape), grid)[0, :, 0] > 0

    ends = torch.full((filters, len(others)), most)
    top, bottom = answer(ends), answer(-ends)
    falling = (bottom & ~top).any(1)
    if (falling & (top & ~bottom).any(1)).any():
        return None
    turn = torch.where(falling, -1, 1)[:, None]
    low, high = -ends, ends + 1  # the least that gives +1 lies between them
    while (low < high).any():
        middle = torch.div(low + high, 2, rounding_mode="floor")
        up = answer(turn * middle.clamp_max(most)) | (middle > most)
        low, high = torch.where(up, low, middle + 1), torch.where(up, middle, high)
    return Thresholds(high, falling)


_LARGEST = torch.finfo(torch.float32).max


def find_real_thresholds(tail: Callable[[Tensor, float], Tensor], filters: int) -> Thresholds:
    """The same where sums are no integers: `least` [filters] is the least float32 that gives +1; of falling filters, the greatest.

    Found by halving what lies between, of all float32 numbers; never is infinity, always is minus infinity.
    """

    def answer(sums: Tensor) -> Tensor:
        return tail(sums.view(1, filters, 1, 1), 0.0).view(filters) > 0

    ends = torch.full((filters,), _LARGEST)
    top, bottom = answer(ends), answer(-ends)
    falling = bottom & ~top
    low, high = _rank(-ends), _rank(ends)  # the answer changes above `low`, at or below `high`
    for _ in range(33):
        middle = (low + high) // 2
        up = answer(_number(middle)) != falling  # already as at the top
        low, high = torch.where(up, low, middle), torch.where(up, middle, high)
    least = _number(torch.where(falling, low, high))
    least = torch.where(top & bottom, -torch.inf, torch.where(~top & ~bottom, torch.inf, least))
    return Thresholds(least, falling)


def _rank(numbers: Tensor) -> Tensor:
    """Integers that are ordered as the float32 numbers are."""
    bits = numbers.view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _number(rank: Tensor) -> Tensor:
    size = rank.abs().to(torch.int32).view(torch.float32)
    return torch.where(rank < 0, -size, size)
