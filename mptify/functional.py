r"""The maths of a ticket layer, as pure functions on tensors.

With frozen weights $W$ (n of them), scores $S$ and $B = \mathrm{sign}(W)$, where $\mathrm{sign}(0) = +1$ everywhere:

- the mask $M$ keeps the `kept` weights of largest $|S|$; among equals the lower flat index wins;
- the gain is $\alpha = \sum M|W| / \sum M$;
- the effective weight is $\alpha \, M \odot B$ (1-bit) or $M \odot W$ (32-bit).
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

__all__ = ["gain", "kept_count", "select_mask", "select_survivors", "sign", "sign_ste", "survivors", "ticket_weight"]

_MAGNITUDE_BITS = 0x7FFFFFFF  # of a float32: as integers, these order non-negative floats
_INFINITY_BITS = 0x7F800000


def kept_count(count: int, prune: float) -> int:
    """How many of `count` weights survive when the fraction `prune` is removed: `max(1, n - round(n * prune))`."""
    return max(1, count - round(count * prune))


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


def select_survivors(scores: Tensor, weight: Tensor, kept: int, into: Tensor | None = None) -> Tensor:
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
    sparse = torch.empty(scores.shape) if into is None or not into.is_contiguous() else into
    below = float(np.array(threshold - 1, np.int32).view(np.float32))
    torch.ops.aten.hardshrink.out(flat.view(scores.shape), below, out=sparse)
    return torch.copysign(sparse.sign_(), signs, out=sparse)


_kept_for_later = threading.local()


def _scratch(count: int) -> Tensor:
    """Room for `count` float32 numbers, kept from call to call: fresh pages cost more than the arithmetic done on them."""
    room = getattr(_kept_for_later, "room", None)
    if room is None or room.numel() < count:
        with torch.inference_mode(False):
            room = _kept_for_later.room = torch.empty(count)
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


def _checked_flat(scores: Tensor, kept: int) -> Tensor:
    count = scores.numel()
    if not 1 <= kept <= count:
        raise ValueError(f"kept must be between 1 and the number of scores, {count}; got {kept}")
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
    rank = magnitudes.numel() - kept
    on_mps = magnitudes.device.type == "mps"
    threshold = magnitudes.sort().values[rank] if on_mps else magnitudes.kthvalue(rank + 1).values
    above = magnitudes > threshold
    tied = magnitudes == threshold
    return above | (tied & (tied.cumsum(0) <= kept - above.sum()))


@torch.library.custom_op("mptify::select_survivors", mutates_args=())
def _select_survivors_op(scores: Tensor, weight: Tensor, kept: int) -> Tensor:
    return select_survivors(scores, weight, kept)


@_select_survivors_op.register_fake
def _(scores: Tensor, weight: Tensor, kept: int) -> Tensor:
    return torch.empty_like(weight)


def traceable_survivors(scores: Tensor, weight: Tensor, kept: int) -> Tensor:
    """`select_survivors` as one opaque operation, which `torch.compile` keeps in its graph."""
    return _select_survivors_op(scores.detach(), weight.detach(), kept)


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
    """Rows of 1024 in float32, which is vectorised and good to an ulp or two, and the sum of those in float64 where there is one."""
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    rows = values.numel() // 1024
    return values[: rows * 1024].view(rows, 1024).sum(1).sum(dtype=wide) + values[rows * 1024 :].sum(dtype=wide)


def sign(x: Tensor) -> Tensor:
    """-1 where `x < 0` and +1 elsewhere: `sign(0) = sign(-0.0) = +1`."""
    return torch.sign(x).add_(0.5).sign_()  # {-1, 0, 1} -> {-0.5, 0.5, 1.5} -> {-1, 1, 1}: vectorised, unlike `where`


class _TicketWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, weight, survivors, gain, weight_bits, score_grad, scaled):
        ctx.save_for_backward(scores, weight, gain)
        ctx.score_grad, ctx.divide = score_grad, weight_bits == 1 and not scaled
        if weight_bits == 32:
            return survivors * weight.abs()
        return survivors * gain if scaled else survivors.detach()

    @staticmethod
    def backward(ctx, grad):
        scores, weight, gain = ctx.saved_tensors
        scaled = grad * weight if ctx.score_grad == "biprop" else grad * sign(weight) * gain
        if ctx.divide:
            scaled.mul_(torch.where(gain > 0, 1 / gain, 0.0))
        return _flip_(scaled, scores), None, None, None, None, None, None


def _flip_(values: Tensor, scores: Tensor) -> Tensor:
    """values *= sgn(scores), with sgn(0) = +1."""
    if scores.device.type != "cpu" or torch.compiler.is_compiling() or not scores.is_contiguous():
        return values.mul_(sign(scores))
    signs = torch.sign(scores, out=_scratch(scores.numel()).view(scores.shape)).add_(0.5).sign_()
    return values.mul_(signs)


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
    return weight_from_survivors(scores, weight, survivors(weight, mask), gain, weight_bits, score_grad, scaled)


def weight_from_survivors(
    scores: Tensor, weight: Tensor, survivors: Tensor, gain: Tensor, weight_bits: int, score_grad: str, scaled: bool
) -> Tensor:
    r"""`ticket_weight` for a caller that has $M \odot B$ at hand."""
    return _TicketWeight.apply(scores, weight, survivors, gain, weight_bits, score_grad, scaled)


class _SignSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width):
        ctx.save_for_backward(x)
        ctx.width = width
        return sign(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        slope = x.abs().mul_(-2 / ctx.width**2).add_(2 / ctx.width).relu_()
        return slope.mul_(grad), None


def sign_ste(x: Tensor, width: float = 1.0) -> Tensor:
    r"""Sign, with the derivative of a spline in place of its own.

    Forward: $\mathrm{sign}(x)$. Backward: $s_t'(x) = \max(0, \tfrac{2}{t}(1 - |x|/t))$ with $t$ = `width`
    (paper, appendix A). Of the forward pass only `x` is kept alive.
    """
    return _SignSTE.apply(x, width)
