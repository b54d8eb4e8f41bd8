r"""The maths of a ticket layer, as pure functions on tensors.

With frozen weights $W$ (n of them), scores $S$ and $B = \mathrm{sign}(W)$, where $\mathrm{sign}(0) = +1$ everywhere:

- the mask $M$ keeps the `kept` weights of largest $|S|$; among equals the lower flat index wins;
- the gain is $\alpha = \sum M|W| / \sum M$;
- the effective weight is $\alpha \, M \odot B$ (1-bit) or $M \odot W$ (32-bit).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["kept_count", "select_mask", "gain", "sign", "sign_ste", "ticket_weight"]

_MAGNITUDE_BITS = 0x7FFFFFFF  # of a float32: as integers, these order non-negative floats


def kept_count(count: int, prune: float) -> int:
    """How many of `count` weights survive when the fraction `prune` is removed: `max(1, n - round(n * prune))`."""
    return max(1, count - round(count * prune))


def select_mask(scores: Tensor, kept: int) -> Tensor:
    """The boolean mask of the `kept` scores of largest magnitude; among equal ones the lower flat index wins.

    Flat indices count in logical (row-major) order, so the mask depends neither on the memory format nor on the device.
    Magnitudes are compared as the integers that their float32 bits spell: the order is that of the floats,
    is total, and puts a NaN above everything, so that exactly `kept` weights survive whatever the scores are.
    """
    count = scores.numel()
    if not 1 <= kept <= count:
        raise ValueError(f"kept must be between 1 and the number of scores, {count}; got {kept}")
    flat = scores.detach().to(torch.float32).contiguous().view(-1)
    if kept == count or flat.is_meta:
        return torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    magnitudes = flat.view(torch.int32) & _MAGNITUDE_BITS
    if flat.device.type == "cpu":
        mask = _select_on_cpu(magnitudes, kept)
    else:
        mask = _select_anywhere(magnitudes, kept)
    return mask.view(scores.shape)


def _select_on_cpu(magnitudes: Tensor, kept: int) -> Tensor:
    threshold = _kth_largest(magnitudes.numpy(), kept)
    mask = magnitudes >= threshold
    surplus = int(mask.sum()) - kept
    if surplus:
        ties = torch.nonzero(magnitudes == threshold).view(-1)
        mask[ties[-surplus:]] = False
    return mask


def _kth_largest(magnitudes: np.ndarray, kept: int) -> int:
    """The `kept`-th largest value, by one selection instead of a sort.

    A strided sample brackets the answer first: the exact selection then runs over the few per cent of the values that
    lie inside the bracket. When the bracket misses (it is checked, not assumed), everything is selected over.
    """
    count = magnitudes.size
    if count >= 1 << 16:
        sample = np.sort(magnitudes[:: count >> 13])
        centre = sample.size * (1 - kept / count)
        reach = 4 * np.sqrt(sample.size) / 2 + 2
        low = sample[max(0, int(centre - reach))]
        high = sample[min(sample.size - 1, int(centre + reach))]
        above = torch.from_numpy(magnitudes) > int(high)
        rank = kept - int(above.sum())
        inside = magnitudes[((torch.from_numpy(magnitudes) >= int(low)) & ~above).numpy()]
        if 0 < rank <= inside.size:
            return int(np.partition(inside, inside.size - rank)[inside.size - rank])
    return int(np.partition(magnitudes, count - kept)[count - kept])


def _select_anywhere(magnitudes: Tensor, kept: int) -> Tensor:
    """The same mask in torch operations alone: nothing leaves the device, nothing waits for it."""
    rank = magnitudes.numel() - kept
    if magnitudes.device.type == "mps":
        threshold = magnitudes.sort().values[rank]
    else:
        threshold = magnitudes.kthvalue(rank + 1).values
    above = magnitudes > threshold
    tied = magnitudes == threshold
    return above | (tied & (tied.cumsum(0) <= kept - above.sum()))


@torch.library.custom_op("mptify::select_mask", mutates_args=())
def _select_mask_op(scores: Tensor, kept: int) -> Tensor:
    return select_mask(scores, kept)


@_select_mask_op.register_fake
def _(scores: Tensor, kept: int) -> Tensor:
    return torch.empty(scores.shape, dtype=torch.bool, device=scores.device)


def traceable_mask(scores: Tensor, kept: int) -> Tensor:
    """`select_mask` as one opaque operation, which `torch.compile` keeps in its graph."""
    return _select_mask_op(scores.detach(), kept)


def gain(weight: Tensor, mask: Tensor) -> Tensor:
    r"""The scale that brings binarized survivors closest to the originals.

    $\alpha = \lVert M \odot W \rVert_1 / \lVert M \rVert_1$ (paper, section 2.2); no gradient flows through it.
    Accumulated in float64 where the device has it, so that the order of summation does not show.
    """
    wide = torch.float32 if weight.device.type == "mps" else torch.float64
    survivors = torch.where(mask, weight.detach(), 0.0)
    return (torch.linalg.vector_norm(survivors, 1, dtype=wide) / mask.sum()).to(torch.float32)


def sign(x: Tensor) -> Tensor:
    """-1 where `x < 0` and +1 elsewhere: `sign(0) = sign(-0.0) = +1`."""
    one = torch.ones((), dtype=x.dtype, device=x.device)
    return torch.where(x < 0, -one, one)


class _TicketWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, weight, mask, gain, weight_bits, score_grad, scaled):
        ctx.save_for_backward(scores, weight, gain)
        ctx.score_grad, ctx.divide = score_grad, weight_bits == 1 and not scaled
        if weight_bits == 32:
            return torch.where(mask, weight, 0.0)
        size = gain if scaled else torch.ones_like(gain)
        return torch.where(mask, torch.where(weight < 0, -size, size), 0.0)

    @staticmethod
    def backward(ctx, grad):
        scores, weight, gain = ctx.saved_tensors
        if ctx.score_grad == "biprop":
            grad = grad * weight
        else:
            grad = torch.where(weight < 0, -grad, grad) * gain
        if ctx.divide:
            grad = grad * torch.where(gain > 0, 1 / gain, 0.0)
        return torch.where(scores < 0, -grad, grad), None, None, None, None, None, None


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
    return _TicketWeight.apply(scores, weight, mask, gain, weight_bits, score_grad, scaled)


class _SignSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width):
        ctx.save_for_backward(x)
        ctx.width = width
        return sign(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        slope = x.abs().mul_(-2 / ctx.width**2).add_(2 / ctx.width).clamp_(min=0)
        return grad * slope, None


def sign_ste(x: Tensor, width: float = 1.0) -> Tensor:
    r"""Sign, with the derivative of a spline in place of its own.

    Forward: $\mathrm{sign}(x)$. Backward: $s_t'(x) = \max(0, \tfrac{2}{t}(1 - |x|/t))$ with $t$ = `width`
    (paper, appendix A). Of the forward pass only `x` is kept alive.
    """
    return _SignSTE.apply(x, width)

