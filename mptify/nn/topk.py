r"""Selecting the top-k scores, and the weight that a ticket layer computes with: pure functions.

With frozen weights $W$ (n of them), scores $S$ and $B = \mathrm{sign}(W)$, where
$\mathrm{sign}(0) = +1$ everywhere:

- the mask $M$ keeps the `kept` weights of largest $|S|$; ties go to the lower flat index;
- the gain is $\alpha = \sum M|W| / \sum M$;
- the effective weight is $\alpha \, M \odot B$ (1-bit) or $M \odot W$ (32-bit).
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mptify.nn import native

__all__ = [
    "Compact", "Selection", "kept_count", "mask_entropy", "select", "select_mask",
    "select_survivors", "sign", "straight_through_weight", "survivors", "traceable_select", "weigh",
]  # fmt: skip

_MAGNITUDE_BITS = 0x7FFFFFFF  # of a float32: read as integers, they order non-negative floats
_INFINITY_BITS = 0x7F800000


def kept_count(count: int, prune: float) -> int:
    """How many of `count` weights survive pruning: `max(1, n - round(n * prune))`."""
    return max(1, count - round(count * prune))


def mask_entropy(count: int, kept: int) -> float:
    """n·H(kept/n), the entropy in bits of a mask of which only the density is known."""
    share = kept / max(count, 1)
    if share in (0, 1):
        return 0.0
    return -count * (share * math.log2(share) + (1 - share) * math.log2(1 - share))


def sign(x: Tensor) -> Tensor:
    """-1 where `x < 0` and +1 elsewhere: `sign(0) = sign(-0.0) = +1`."""
    # {-1, 0, 1} -> {-0.5, 0.5, 1.5} -> {-1, 1, 1}: vectorized, unlike `torch.where`
    return torch.sign(x).add_(0.5).sign_()


# -- selection -----------------------------------------------------------------------------------


def select_mask(scores: Tensor, kept: int) -> Tensor:
    """The boolean mask of the `kept` scores of largest magnitude; ties go to the lower flat index.

    Flat indices count in row-major order, so the mask depends neither on the memory format nor on
    the device. Magnitudes are compared as the integers that their float32 bits spell. This order
    is total and puts NaN above everything, so exactly `kept` weights survive for any scores.
    """
    flat = _checked_flat(scores, kept)
    if kept == flat.numel() or flat.is_meta:
        return torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    magnitudes = _magnitudes(flat)
    if flat.device.type == "cpu":
        mask = _mask_at(magnitudes, _partition(magnitudes.clone(), kept)[0], kept)
    else:
        mask = _select_on_device(magnitudes, kept)
    return mask.view(scores.shape)


class Selection(NamedTuple):
    """What a selection of survivors gives.

    The mask itself is not stored: it is where `effective` is not 0.

    Attributes:
        effective: The weight to compute with.
        gain: Its gain.
        compact: The same in a bit per weight, where the C++ library has selected.
    """

    effective: Tensor
    gain: Tensor
    compact: Compact | None = None


class Compact(NamedTuple):
    """A selection in a bit per weight.

    Attributes:
        bits: Which weights survive, as `native.select` packs them.
        gain: The gain.
        kind: Which effective weight there is.
        hint: Where the next selection starts to search for its threshold.
    """

    bits: Tensor
    gain: Tensor
    kind: native.Effective
    hint: native.Hint

    def expand(self, frozen: Tensor) -> Tensor:
        """The effective weight."""
        return native.expand(self.bits, frozen.detach(), float(self.gain), self.kind)


def select(
    scores: Tensor,
    frozen: Tensor,
    kept: int,
    *,
    weight_bits: int = 1,
    includes_gain: bool = True,
    out: Tensor | None = None,
    hint: native.Hint = native.NO_HINT,
) -> Selection:
    r"""Select the survivors: their effective weight and gain.

    On a CPU this takes two C++ passes over the scores, one that selects and one that writes.

    Args:
        scores: The scores $S$.
        frozen: The frozen weights $W$.
        kept: How many weights survive.
        weight_bits: 1 for $\alpha\,M \odot B$, 32 for $M \odot W$.
        includes_gain: Whether a 1-bit weight includes the gain $\alpha$.
        out: A tensor that may be overwritten with the effective weight.
        hint: The hint of the last selection, which saves the search for the threshold.
    """
    if native.can_select(scores, frozen):
        _check_kept(scores, kept)
        if out is None or not native.can_select(out, frozen):
            out = native.empty_strided(scores.shape, scores.stride())
        signs = native.Effective.SCALED_SIGNS if includes_gain else native.Effective.SIGNS
        kind = native.Effective.WEIGHTS if weight_bits == 32 else signs
        bits = native.bits_for(scores.numel())
        mean, hint = native.select(scores.detach(), frozen.detach(), out, bits, kept, kind, hint)
        gain = torch.tensor(1.0 if weight_bits == 32 else mean, dtype=torch.float32)
        return Selection(out, gain, Compact(bits, gain, kind, hint))
    return weigh(frozen, select_survivors(scores, frozen, kept), kept, weight_bits, includes_gain)


def select_survivors(scores: Tensor, frozen: Tensor, kept: int) -> Tensor:
    r"""$M \odot B$: the frozen sign of each survivor, 0 for the rest (float32).

    On a CPU no boolean mask is made, since torch does not vectorize boolean operations: the
    threshold becomes the $\lambda$ of a hard shrinkage. `frozen` must not hold -0.0, because its
    sign bit is read.
    """
    flat = _checked_flat(scores, kept)
    signs = frozen.detach()
    if flat.is_meta or kept == flat.numel() or flat.device.type != "cpu":
        return survivors(signs, select_mask(scores, kept))
    scratch = _scratch(flat.numel()).view(torch.int32)
    magnitudes = torch.bitwise_and(flat.view(torch.int32), _MAGNITUDE_BITS, out=scratch)
    threshold, unique = _partition(magnitudes, kept)
    if not unique:
        return survivors(signs, _mask_at(_magnitudes(flat), threshold, kept).view(scores.shape))
    below = float(np.array(threshold - 1, np.int32).view(np.float32))
    sparse = torch.nn.functional.hardshrink(flat.view(scores.shape), below)
    return torch.copysign(sparse.sign_(), signs, out=sparse)


def survivors(frozen: Tensor, mask: Tensor) -> Tensor:
    r"""$M \odot B$ for a given mask."""
    return sign(frozen.detach()).mul_(mask)


def weigh(
    frozen: Tensor, survivors: Tensor, kept: int, weight_bits: int, includes_gain: bool
) -> Selection:
    r"""Gain and effective weight from $M \odot B$ (`survivors`)."""
    gain = torch.ones((), dtype=torch.float32, device=frozen.device)
    if weight_bits == 1:
        gain = _gain_of_survivors(frozen, survivors, kept)
    return Selection(_effective(frozen, survivors, gain, weight_bits, includes_gain), gain)


@torch.library.custom_op("mptify::select", mutates_args=())
def _select_op(
    scores: Tensor, frozen: Tensor, kept: int, weight_bits: int, includes_gain: bool
) -> tuple[Tensor, Tensor]:
    found = select(scores, frozen, kept, weight_bits=weight_bits, includes_gain=includes_gain)
    return found.effective, found.gain


@_select_op.register_fake
def _(
    scores: Tensor, frozen: Tensor, kept: int, weight_bits: int, includes_gain: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(frozen), frozen.new_empty(())


def traceable_select(
    scores: Tensor, frozen: Tensor, kept: int, weight_bits: int, includes_gain: bool
) -> Selection:
    """`select` as one opaque operation, which `torch.compile` keeps in its graph."""
    return Selection(
        *_select_op(scores.detach(), frozen.detach(), kept, weight_bits, includes_gain)
    )


def _check_kept(scores: Tensor, kept: int) -> None:
    if not 1 <= kept <= scores.numel():
        raise ValueError(
            f"kept must be between 1 and the number of scores, {scores.numel()}; got {kept}"
        )


def _checked_flat(scores: Tensor, kept: int) -> Tensor:
    _check_kept(scores, kept)
    return scores.detach().to(torch.float32).contiguous().view(-1)


def _magnitudes(flat: Tensor) -> Tensor:
    return flat.view(torch.int32) & _MAGNITUDE_BITS


def _partition(magnitudes: Tensor, kept: int) -> tuple[int, bool]:
    """The `kept`-th largest value; whether exactly `kept` values reach it, all positive, no NaN.

    NumPy partitions in place, vectorized: a hundred times as fast as a sort.
    """
    values = magnitudes.numpy()
    below = values.size - kept
    values.partition(below)
    threshold = int(values[below])
    unique = threshold > 0 and int(values[:below].max()) < threshold
    return threshold, unique and int(values[below:].max()) <= _INFINITY_BITS


def _mask_at(magnitudes: Tensor, threshold: int, kept: int) -> Tensor:
    mask = magnitudes >= threshold
    surplus = int(mask.sum()) - kept
    if surplus:
        ties = torch.nonzero(magnitudes == threshold).view(-1)
        mask[ties[-surplus:]] = False
    return mask


def _select_on_device(magnitudes: Tensor, kept: int) -> Tensor:
    """The same mask without leaving the device or synchronizing with it."""
    # GPUs sort one long row faster than they find its k-th value.
    threshold = magnitudes.sort().values[magnitudes.numel() - kept]
    above = magnitudes > threshold
    tied = magnitudes == threshold
    return above | (tied & (tied.cumsum(0) <= kept - above.sum()))


_of_thread = threading.local()


def _scratch(count: int) -> Tensor:
    """A reused buffer of `count` float32 numbers, since touching fresh pages is slow."""
    buffer = getattr(_of_thread, "buffer", None)
    if buffer is None or buffer.numel() < count:
        with torch.inference_mode(False):
            buffer = _of_thread.buffer = torch.empty(count, dtype=torch.float32)
    return buffer[:count]


# -- gain and effective weight -------------------------------------------------------------------


def _gain_of_survivors(frozen: Tensor, survivors: Tensor, kept: int) -> Tensor:
    r"""The scale that brings binarized survivors closest to the originals, without a gradient.

    $\alpha = \lVert M \odot W \rVert_1 / \lVert M \rVert_1$ (paper, section 2.2). Since
    $B \odot W = |W|$, it is the mean of $M \odot B \odot W$.
    """
    product = _product(survivors, frozen.detach())
    # In float64, the mean of equal values is exactly that value; loaded tickets rely on it.
    dtype = torch.float32 if product.device.type == "mps" else torch.float64
    return (product.view(-1).sum(dtype=dtype) / kept).to(torch.float32)


def _product(one: Tensor, other: Tensor) -> Tensor:
    if one.device.type != "cpu" or torch.compiler.is_compiling() or not one.is_contiguous():
        return (one * other).contiguous()
    return torch.mul(one, other, out=_scratch(one.numel()).view(one.shape))


def _effective(
    frozen: Tensor, survivors: Tensor, gain: Tensor, weight_bits: int, includes_gain: bool
) -> Tensor:
    if weight_bits == 32:
        return survivors * frozen.detach().abs()
    return survivors * gain if includes_gain else survivors


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, frozen, effective, gain, score_grad, includes_gain):
        ctx.save_for_backward(scores, frozen, gain)
        ctx.score_grad, ctx.includes_gain = score_grad, includes_gain
        return effective.detach()

    @staticmethod
    def backward(ctx, grad):
        scores, frozen, gain = ctx.saved_tensors
        alpha = ctx.score_grad == "alpha"
        grad = grad.contiguous()  # as the scores are; convs on channels-last images return others
        on_cpu = native.can_select(scores, frozen) and native.can_select(grad, frozen)
        if on_cpu and not torch.is_grad_enabled():
            size = float(gain)
            factor = 1.0 if ctx.includes_gain else 1 / size if size else 0.0
            factor = factor * size if alpha else factor
            return native.score_gradient(grad, frozen, scores, factor, alpha), *[None] * 5
        result = grad * sign(frozen) * gain if alpha else grad * frozen
        if not ctx.includes_gain:
            result = result * torch.where(gain > 0, 1 / gain, 0.0)
        return result * sign(scores), *[None] * 5


def straight_through_weight(
    scores: Tensor,
    frozen: Tensor,
    effective: Tensor,
    gain: Tensor,
    score_grad: str,
    includes_gain: bool = True,
) -> Tensor:
    r"""The effective weight, with a gradient that goes straight through the mask to the scores.

    Forward: `effective`. Backward: $\partial L/\partial S = \partial L/\partial W_{\mathrm{eff}}
    \odot B \odot \mathrm{scale} \odot \mathrm{sgn}(S)$, where scale is $|W|$ for
    `score_grad="biprop"` (the authors' released code) and $\alpha$ for `"alpha"` (the paper's
    text). The formula printed in section 2.2.1 lacks $\mathrm{sgn}(S)$ although the ranking is by
    $|S|$; it diverges.

    Args:
        scores: The scores $S$.
        frozen: The frozen weights $W$.
        effective: The effective weight, $\alpha\,M \odot B$ or $M \odot W$.
        gain: The gain $\alpha$.
        score_grad: The scale of the gradient.
        includes_gain: Whether `effective` includes the gain. Otherwise it is $M \odot B$, and the
            gain multiplies the layer's output; the gradient is with respect to
            $W_{\mathrm{eff}} = \alpha\,M \odot B$ all the same.
    """
    return _StraightThrough.apply(scores, frozen, effective, gain, score_grad, includes_gain)
