"""Which kernels take the place of a layer, with what stands between it and a sign; made from its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from mptify.runtime.bitsliced import BitslicedConv
from mptify.runtime.geometry import Geometry, fits
from mptify.runtime.joined import JoinedConv
from mptify.runtime.linear import PopcountLinear
from mptify.runtime.means import MeanLinear, reads_few_enough
from mptify.runtime.pixels import PixelConv
from mptify.runtime.planes import Kernel
from mptify.runtime.pooling import Pool
from mptify.runtime.tails import Branch, Head, Tail, shape_of
from mptify.runtime.thresholds import (
    Thresholds,
    find_joint_thresholds,
    find_real_thresholds,
    find_thresholds,
)
from mptify.runtime.windows import WindowConv, can_count, is_faster

__all__ = ["kernel_for_means", "kernel_for_sums", "kernels_for"]


def kernels_for(tail: Tail, binary: bool) -> tuple[Kernel, Pool | None] | None:
    """For a layer whose sign is wanted, and for the max-pool behind it; None where no kernel can do it.

    `binary` says whether it reads signs; a layer that reads pixels is a network's first.
    """
    found = (_of_sums if tail.other is not None else _of_signs if binary else _of_pixels)(tail)
    if found is None:
        return None
    kernel, thresholds = found
    return kernel, None if tail.pool is None else Pool(tail.pool, thresholds.falling)


def kernel_for_sums(branch: Branch) -> tuple[Kernel, None] | None:
    """For a layer that reads signs, and whose output is wanted as numbers."""
    weight = branch.weight()
    if branch.layout == "vectors":
        return PopcountLinear(weight), None
    kernel = _convolution(weight, None, branch.geometry())
    return None if kernel is None else (kernel, None)


def kernel_for_means(head: Head) -> tuple[Kernel, None] | None:
    """For a layer that reads the means of signs."""
    _, channels, height, width = shape_of(head.signs)
    weight = head.branch.weight()
    return (MeanLinear(weight), None) if weight.shape[1] == channels and reads_few_enough(channels, height * width) else None


def _of_signs(tail: Tail) -> tuple[Kernel, Thresholds] | None:
    weight = tail.branch.weight()
    kept = _most_kept(weight)
    if tail.branch.layout == "vectors":
        found = find_thresholds(tail.signs, len(weight), kept, shortcut=False)
        return None if found is None else (PopcountLinear(_turned(weight, found), found.least[0]), found)
    found = find_thresholds(tail.signs, len(weight), kept, tail.shortcut is not None)
    if found is None:
        return None
    kernel = _convolution(_turned(weight, found), found.least, tail.branch.geometry())
    return None if kernel is None else (kernel, found)


def _convolution(weight: Tensor, thresholds: Tensor | None, geometry: Geometry) -> Kernel | None:
    """The faster of the two kernels that add up signs, as far as they can do it."""
    countable = weight.shape[1] == geometry.channels and can_count(geometry)
    addable = fits(geometry, _most_kept(weight))
    if countable and (not addable or is_faster(geometry, len(weight), int((weight != 0).sum()))):
        return WindowConv(weight, thresholds, geometry)
    return BitslicedConv(weight, thresholds, geometry) if addable else None


def _of_pixels(tail: Tail) -> tuple[Kernel, Thresholds]:
    weight = tail.branch.weight()
    found = find_real_thresholds(tail.signs, len(weight))
    return PixelConv(weight, found, tail.branch.geometry()), found


def _of_sums(tail: Tail) -> tuple[Kernel, Thresholds] | None:
    """Two layers whose outputs are added."""
    one, other = tail.branch, tail.other
    assert other is not None
    weight, theirs = one.weight(), other.weight()
    kept, their_kept = _most_kept(weight), _most_kept(theirs)
    if not fits(one.geometry(), kept) or not fits(other.geometry(), their_kept):
        return None
    found = find_joint_thresholds(tail.signs, len(weight), kept, their_kept)
    if found is None:
        return None
    first = BitslicedConv(_turned(weight, found), None, one.geometry())
    return JoinedConv(first, BitslicedConv(theirs, None, other.geometry()), found.least), found


def _most_kept(weight: Tensor) -> int:
    return int((weight != 0).flatten(1).sum(1).max())


def _turned(weight: Tensor, found: Thresholds) -> Tensor:
    """With the signs of falling filters turned, which makes them rise."""
    return torch.where(found.falling.view(-1, *[1] * (weight.dim() - 1)), -weight, weight)
