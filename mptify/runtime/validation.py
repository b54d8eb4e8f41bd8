"""Checks of the numbers and weights that kernels on lanes read from packed files."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mptify.nn.quantizers import level_range

__all__ = [
    "count_bits",
    "same_numbers",
    "validate_floats",
    "validate_halves",
    "validate_levels",
    "validate_range",
    "validate_step",
]

_RANGES = {level_range(bits, signed) for bits in (2, 4, 8) for signed in (False, True)}
_SET_BITS = np.array([number.bit_count() for number in range(256)])


def validate_floats(name: str, numbers: Tensor | None, *shape: int) -> None:
    """Raise `ValueError` unless these are finite float32 numbers of a shape, or there are none."""
    if numbers is None:
        return
    if numbers.dtype != torch.float32 or numbers.shape != shape:
        count = shape[0] if shape else 1
        raise ValueError(f"its {name} is not {count} float32 number{'s' * (count != 1)}")
    if not bool(numbers.isfinite().all()):
        raise ValueError(f"its {name} is not finite")


def validate_step(name: str, step: float) -> None:
    """Raise `ValueError` unless a number is positive and finite."""
    if not (isfinite(step) and step > 0):
        raise ValueError(f"its {name} is {step}, which no step is")


def validate_levels(lowest: float, highest: float) -> None:
    """Raise `ValueError` unless there are quantizers of such levels."""
    if (lowest, highest) not in _RANGES:
        raise ValueError(f"no quantizer has levels from {lowest} to {highest}")


def validate_range(limits: Tensor | None) -> None:
    """Raise `ValueError` unless these are a lowest and a highest number, or there are none."""
    if limits is None:
        return
    is_pair = limits.dtype == torch.float32 and limits.shape == (2,)
    if not is_pair or not -inf < float(limits[0]) <= float(limits[1]):
        raise ValueError("its range is not a lowest and a highest float32 number")


def validate_halves(weights: Tensor, *shape: int) -> None:
    """Raise `ValueError` unless weights are two bits each: [filters][half][bytes]."""
    if weights.dtype != torch.uint8 or weights.shape != shape or not weights.is_contiguous():
        raise ValueError("its weights are not two bits for each weight of each filter")


def same_numbers(ours: Tensor | None, theirs: Any) -> bool:
    """Whether two are the same float32 numbers, or there are none of both."""
    if ours is None or theirs is None:
        return ours is None and theirs is None
    return torch.equal(ours, torch.as_tensor(theirs, dtype=torch.float32))


def count_bits(numbers: Tensor) -> int:
    """How many bits of bytes are set."""
    return int(np.bincount(numbers.numpy().reshape(-1), minlength=256) @ _SET_BITS)
