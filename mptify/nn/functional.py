r"""The maths of a ticket layer, as pure functions on tensors.

With frozen weights $W$ (n of them), scores $S$ and $B = \mathrm{sign}(W)$, where $\mathrm{sign}(0) = +1$ everywhere:

- the mask $M$ keeps the `kept` weights of largest $|S|$; among equals the lower flat index wins;
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
    "Chosen", "choose", "gain", "kept_count", "mask_entropy", "select_mask", "select_survivors", "sign", "sign_ste", "survivors",
    "ticket_weight",
]  # fmt: skip

_MAGNITUDE_BITS = 0x7FFFFFFF  # of a float32: as integers, these order non-negative floats
_INFINITY_BITS = 0x7F800000


def kept_count(count: int, prune: float) -> int:
    """How many of `count` weights survive when the fraction `prune` is removed: `max(1, n - round(n * prune))`."""
    return max(1, count - round(count * prune))


def mask_entropy(count: int, kept: int) -> float:
    """n·H(kept/n), in bits: what a mask takes that is known by its density alone."""
    share = kept / max(count, 1)
    return 0.0 if share in (0, 1) else -count * (share * math.log2(share) + (1 - share) * math.log2(1 - share))


def select_mask(scores: Tensor, kept: int) -> Tensor:
    """The boolean mask of the `kept` scores of largest magnitude; among equal ones the lower flat index wins.

    Flat indices count in logical (row-major) order, so the mask depends neither on the memory format nor on the device.
    Magnitudes are compared as the integers that their float32 bits spell: the order is that of the floats,
    is total, and puts a NaN above everything, so that exactly `kept` weights survive whatever the scores are.
    """
    flat = _checked_flat(scores, kept)
    if kept == flat.numel() or flat.is_meta:
        return torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    magnitudes = _magnitudes(flat)
    if flat.device.type == "cpu":
        mask = _mask_at(magnitudes, _partition(magnitudes.clone(), kept)[0], kept)
    else:
        mask = _select_anywhere(magnitudes, kept)
    return mask.view(scores.shape)


class Chosen(NamedTuple):
    """What `choose` found: the weight to compute with, its gain, and where the next choice should look for its threshold."""

    weight: Tensor
    gain: Tensor
    hint: native.Hint = native.NO_HINT


def choose(
    scores: Tensor,
    weight: Tensor,
    kept: int,
    *,
    weight_bits: int = 1,
    scaled: bool = True,
    into: Tensor | None = None,
    hint: native.Hint = native.NO_HINT,
) -> Chosen:
    r"""Mask, gain and effective weight in one go: $\alpha\,M \odot B$ (without $\alpha$ unless `scaled`), or $M \odot W$.

    The result may be written into the tensor `into`. On a CPU this is a C++ pass over the scores, a second one that
    writes, and nothing in between; `hint`, from the last choice, spares it the search for the threshold.
    """
    if native.can_choose(scores, weight):
        _check_kept(scores, kept)
        out = into if into is not None and native.can_choose(into, weight) else torch.empty(scores.shape, dtype=torch.float32)
        value, hint = native.choose(scores.detach(), weight.detach(), out, kept, "weights" if weight_bits == 32 else scaled, hint)
        return Chosen(out, torch.tensor(1.0 if weight_bits == 32 else value, dtype=torch.float32), hint)
    return weigh(weight, select_survivors(scores, weight, kept), kept, weight_bits, scaled)


def weigh(weight: Tensor, survivors: Tensor, kept: int, weight_bits: int, scaled: bool) -> Chosen:
    r"""Gain and effective weight from $M \odot B$."""
    size = gain_of_survivors(weight, survivors, kept) if weight_bits == 1 else torch.ones((), dtype=torch.float32, device=weight.device)
    return Chosen(_effective(weight, survivors, size, weight_bits, scaled), size)


def _effective(weight: Tensor, survivors: Tensor, gain: Tensor, weight_bits: int, scaled: bool) -> Tensor:
    if weight_bits == 32:
        return survivors * weight.detach().abs()
    return survivors * gain if scaled else survivors


def select_survivors(scores: Tensor, weight: Tensor, kept: int) -> Tensor:
    r"""$M \odot B$ in one go: the frozen sign of each survivor, 0 for the rest (float32).

    On a CPU the mask never takes shape as booleans, which torch handles an element at a time: the threshold becomes the
    $\lambda$ of a hard shrinkage, and all passes run vectorised. `weight` must hold no -0.0, whose sign bit is read here.
    """
    flat = _checked_flat(scores, kept)
    signs = weight.detach()
    if flat.is_meta or kept == flat.numel() or flat.device.type != "cpu":
        return survivors(signs, select_mask(scores, kept))
    magnitudes = torch.bitwise_and(flat.view(torch.int32), _MAGNITUDE_BITS, out=_scratch(flat.numel()).view(torch.int32))
    threshold, clear = _partition(magnitudes, kept)
    if not clear:
        return survivors(signs, _mask_at(_magnitudes(flat), threshold, kept).view(scores.shape))
    below = float(np.array(threshold - 1, np.int32).view(np.float32))
    sparse = torch.nn.functional.hardshrink(flat.view(scores.shape), below)
    return torch.copysign(sparse.sign_(), signs, out=sparse)


_kept_for_later = threading.local()


def _scratch(count: int) -> Tensor:
    """Room for `count` float32 numbers, kept from call to call: fresh pages cost more than the arithmetic done on them."""
    room = getattr(_kept_for_later, "room", None)
    if room is None or room.numel() < count:
        with torch.inference_mode(False):
            room = _kept_for_later.room = torch.empty(count, dtype=torch.float32)
    return room[:count]


def _magnitudes(flat: Tensor) -> Tensor:
    return flat.view(torch.int32) & _MAGNITUDE_BITS


def _partition(magnitudes: Tensor, kept: int) -> tuple[int, bool]:
    """The `kept`-th largest value, and whether exactly `kept` values reach it, all of them positive and no NaN.

    One selection by NumPy, in place: it is vectorised, and a hundred times faster than a sort.
    """
    values = magnitudes.numpy()
    below = values.size - kept
    values.partition(below)
    threshold = int(values[below])
    clear = threshold > 0 and int(values[:below].max()) < threshold and int(values[below:].max()) <= _INFINITY_BITS
    return threshold, clear


def survivors(weight: Tensor, mask: Tensor) -> Tensor:
    r"""$M \odot B$ for a given mask."""
    return sign(weight.detach()).mul_(mask)


def _check_kept(scores: Tensor, kept: int) -> None:
    if not 1 <= kept <= scores.numel():
        raise ValueError(f"kept must be between 1 and the number of scores, {scores.numel()}; got {kept}")


def _checked_flat(scores: Tensor, kept: int) -> Tensor:
    _check_kept(scores, kept)
    return scores.detach().to(torch.float32).contiguous().view(-1)


def _mask_at(magnitudes: Tensor, threshold: int, kept: int) -> Tensor:
    mask = magnitudes >= threshold
    surplus = int(mask.sum()) - kept
    if surplus:
        ties = torch.nonzero(magnitudes == threshold).view(-1)
        mask[ties[-surplus:]] = False
    return mask


def _select_anywhere(magnitudes: Tensor, kept: int) -> Tensor:
    """The same mask in torch operations alone: nothing leaves the device, nothing waits for it."""
    threshold = magnitudes.sort().values[magnitudes.numel() - kept]  # of one long row, GPUs sort faster than they find the k-th
    above = magnitudes > threshold
    tied = magnitudes == threshold
    return above | (tied & (tied.cumsum(0) <= kept - above.sum()))


@torch.library.custom_op("mptify::choose", mutates_args=())
def _choose_op(scores: Tensor, weight: Tensor, kept: int, weight_bits: int, scaled: bool) -> tuple[Tensor, Tensor]:
    chosen = choose(scores, weight, kept, weight_bits=weight_bits, scaled=scaled)
    return chosen.weight, chosen.gain


@_choose_op.register_fake
def _(scores: Tensor, weight: Tensor, kept: int, weight_bits: int, scaled: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), weight.new_empty(())


def traceable_choose(scores: Tensor, weight: Tensor, kept: int, weight_bits: int, scaled: bool) -> Chosen:
    """`choose` as one opaque operation, which `torch.compile` keeps in its graph."""
    return Chosen(*_choose_op(scores.detach(), weight.detach(), kept, weight_bits, scaled))


def gain(weight: Tensor, mask: Tensor) -> Tensor:
    r"""The scale that brings binarized survivors closest to the originals.

    $\alpha = \lVert M \odot W \rVert_1 / \lVert M \rVert_1$ (paper, section 2.2); no gradient flows through it.
    """
    return gain_of_survivors(weight, survivors(weight, mask), int(mask.sum()))


def gain_of_survivors(weight: Tensor, survivors: Tensor, kept: int) -> Tensor:
    r"""The gain from $M \odot B$: since $B \odot W = |W|$, it is $\sum (M \odot B \odot W) / \sum |M \odot B|$."""
    product = _times(survivors, weight.detach())
    return (_accurate_sum(product.view(-1)) / kept).to(torch.float32)


def _times(one: Tensor, other: Tensor) -> Tensor:
    if one.device.type != "cpu" or torch.compiler.is_compiling() or not one.is_contiguous():
        return (one * other).contiguous()
    return torch.mul(one, other, out=_scratch(one.numel()).view(one.shape))


def _accurate_sum(values: Tensor) -> Tensor:
    """In float64 where there is one: of equal values, the mean is then exactly that value, which a loaded ticket relies on."""
    return values.sum(dtype=torch.float32 if values.device.type == "mps" else torch.float64)


def sign(x: Tensor) -> Tensor:
    """-1 where `x < 0` and +1 elsewhere: `sign(0) = sign(-0.0) = +1`."""
    return torch.sign(x).add_(0.5).sign_()  # {-1, 0, 1} -> {-0.5, 0.5, 1.5} -> {-1, 1, 1}: vectorised, unlike `where`


class _TicketWeight(torch.autograd.Function):
    """Hands out an effective weight that was made already, and pulls its gradient back to the scores."""

    @staticmethod
    def forward(ctx, scores, weight, effective, gain, score_grad, divide):
        ctx.save_for_backward(scores, weight, gain)
        ctx.score_grad, ctx.divide = score_grad, divide
        return effective.detach()

    @staticmethod
    def backward(ctx, grad):
        scores, weight, gain = ctx.saved_tensors
        grad = grad.contiguous()  # as the scores are: convs on channels-last images give it in that order
        if not torch.is_grad_enabled() and native.can_choose(scores, weight) and native.can_choose(grad, weight):
            size = float(gain)
            by = (0.0 if size == 0 else 1 / size) if ctx.divide else 1.0
            pulled = native.pull(grad, weight, scores, by if ctx.score_grad == "biprop" else by * size, ctx.score_grad == "alpha")
        else:
            pulled = grad * weight if ctx.score_grad == "biprop" else grad * sign(weight) * gain
            if ctx.divide:
                pulled = pulled * torch.where(gain > 0, 1 / gain, 0.0)
            pulled = pulled * sign(scores)
        return pulled, None, None, None, None, None


def ticket_weight(
    scores: Tensor,
    weight: Tensor,
    mask: Tensor,
    gain: Tensor,
    *,
    weight_bits: int = 1,
    score_grad: str = "biprop",
    scaled: bool = True,
) -> Tensor:
    r"""What a ticket layer computes with: $\alpha\,M \odot B$ for 1-bit weights, $M \odot W$ for 32-bit ones.

    Backward goes straight through the mask to the scores, and nowhere else:
    $\partial L/\partial S = \partial L/\partial W_{\mathrm{eff}} \odot B \odot \mathrm{scale} \odot \mathrm{sgn}(S)$,
    where scale is $|W|$ for `score_grad="biprop"` (the authors' released code) and $\alpha$ for `"alpha"` (the paper's text).
    The formula printed in section 2.2.1 lacks $\mathrm{sgn}(S)$ although the ranking is by $|S|$; it diverges.

    With `scaled=False` a 1-bit weight comes back as $M \odot B$, whose gain the caller applies to the layer's output;
    the gradient is still the one above, with respect to $W_{\mathrm{eff}} = \alpha\,M \odot B$.
    """
    effective = _effective(weight, survivors(weight, mask), gain, weight_bits, scaled)
    return attach(scores, weight, effective, gain, score_grad, divide=weight_bits == 1 and not scaled)


def attach(scores: Tensor, weight: Tensor, effective: Tensor, gain: Tensor, score_grad: str, divide: bool) -> Tensor:
    """The effective weight, tied to the scores for backward; `divide` where it came without its gain."""
    return _TicketWeight.apply(scores, weight, effective, gain, score_grad, divide)


class _SignSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width):
        ctx.save_for_backward(x)
        ctx.width = width
        return native.sign(x) if native.can_map(x) else sign(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if not torch.is_grad_enabled() and native.can_map(x, grad):
            return native.pull_sign(grad, x, ctx.width), None
        slope = x.abs().mul_(-2 / ctx.width**2).add_(2 / ctx.width).relu_()
        return slope.mul_(grad), None


def sign_ste(x: Tensor, width: float = 1.0) -> Tensor:
    r"""Sign, with the derivative of a spline in place of its own.

    Forward: $\mathrm{sign}(x)$. Backward: $s_t'(x) = \max(0, \tfrac{2}{t}(1 - |x|/t))$ with $t$ = `width`
    (paper, appendix A). Of the forward pass only `x` is kept alive.
    """
    return _SignSTE.apply(x, width)
