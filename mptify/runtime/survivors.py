"""The survivors of a layer, as lists: what a kernel adds for each filter."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["list_survivors", "max_kept", "survivors_of", "validate_starts"]


def survivors_of(weight: Tensor, channels: int) -> tuple[np.ndarray, ...]:
    """Filter, input channel, row and column of each survivor of M ⊙ B, and if it is positive.

    The number of groups follows from `channels`, the channels of the input.
    """
    signs = weight.numpy()
    f, c, kh, kw = np.nonzero(signs)
    group = f // (len(signs) // (channels // signs.shape[1]))
    return f, group * signs.shape[1] + c, kh, kw, signs[f, c, kh, kw] > 0


def list_survivors(
    filters: int, f: np.ndarray, positive: np.ndarray, *keys: np.ndarray
) -> tuple[np.ndarray, Tensor]:
    """Two lists per filter, of its negative and of its positive survivors, one behind the other.

    Returns:
        The order of the survivors, sorted within a list by `keys` (the last key first), and where
        each list starts.
    """
    order = np.lexsort((*keys, positive, f))
    lengths = np.bincount((2 * f + positive)[order], minlength=2 * filters)
    return order, torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def validate_starts(starts: Tensor, filters: int, survivors: int) -> None:
    """Check where lists start: two per filter, one behind the other."""
    if filters < 1 or starts.dtype != torch.int32 or starts.shape != (2 * filters + 1,):
        raise ValueError("it does not say where each filter's survivors start")
    is_sorted = bool((starts[1:] >= starts[:-1]).all())
    if int(starts[0]) != 0 or int(starts[-1]) != survivors or not is_sorted:
        raise ValueError("its filters' survivors do not follow each other")


def max_kept(weight: Tensor) -> int:
    """The largest number of survivors of a filter."""
    return int((weight != 0).flatten(1).sum(1).max())
