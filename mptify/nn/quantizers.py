r"""Activation quantizers of 1, 2, 4 and 8 bits, as functions found by name and as modules.

A quantizer of one bit maps to ±1. One of $a$ bits maps to `step` times an integer level: to
$0 \dots 2^a - 1$ where it replaces an activation, and to $-(2^{a-1}-1) \dots 2^{a-1}-1$ where
values can be negative. Steps have few significant bits, so that sums of such values are exact in
float32, in any order; an integer runtime computes the same.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mptify.errors import BadConfig
from mptify.nn import native, topk
from mptify.nn.leaf import recorded_call
from mptify.registry import quantizers

__all__ = [
    "InputQuantizer", "Quantizer", "RunningQuantizer", "Sign", "UniformQuantizer",
    "check_quantizer", "level_range", "make_quantizer", "sign", "uniform",
]  # fmt: skip


def level_range(bits: int, signed: bool) -> tuple[int, int]:
    """The lowest and the highest level of a quantizer of at least 2 bits."""
    return (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)


# -- functions -----------------------------------------------------------------------------------


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width):
        ctx.save_for_backward(x)
        ctx.width = width
        return native.sign(x) if native.can_map(x) else topk.sign(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if not torch.is_grad_enabled() and native.can_map(x, grad):
            return native.sign_gradient(grad, x, ctx.width), None
        slope = x.abs().mul_(-2 / ctx.width**2).add_(2 / ctx.width).relu_()
        return slope.mul_(grad), None


@quantizers.register("sign")
def sign(x: Tensor, *, width: float = 1.0) -> Tensor:
    r"""One bit, with the derivative of a spline as its estimator.

    Forward: $\mathrm{sign}(x)$, with $\mathrm{sign}(0) = +1$. Backward:
    $s_t'(x) = \max(0, \tfrac{2}{t}(1 - |x|/t))$ with $t$ = `width` (paper, appendix A). With
    $t = 1$ this is the ApproxSign of Bi-Real Net.
    """
    return _Sign.apply(x, width)


class _Round(torch.autograd.Function):
    """step · the levels of x · inverse; the gradient of x passes where x · inverse is in range."""

    @staticmethod
    def forward(ctx, x, inverse, lowest, highest, step):
        ctx.inverse, ctx.step = inverse, step
        ctx.strides = x.stride()
        ctx.in_bits = native.can_map(x)
        if ctx.in_bits:
            found, inside = native.round_levels(x, *map(float, (inverse, lowest, highest, step)))
        else:
            scaled = x * inverse
            levels = scaled.clamp(lowest, highest)
            inside = levels == scaled
            found = levels.round_() * step
        ctx.save_for_backward(inside)
        return found

    @staticmethod
    def backward(ctx, grad):
        (inside,) = ctx.saved_tensors
        if ctx.in_bits:
            if grad.stride() != ctx.strides:  # bits are in the order of memory
                grad = torch.empty_strided(grad.shape, ctx.strides).copy_(grad)
            if not torch.is_grad_enabled():
                inverse, step = float(ctx.inverse), float(ctx.step)
                return native.round_gradient(grad, inside, inverse, step), *[None] * 4
            inside = native.round_gradient(torch.ones_like(grad), inside, 1.0, 1.0)
        return grad * ctx.step * inside * ctx.inverse, *[None] * 4


class _LearnedRound(torch.autograd.Function):
    """The same times step, with a gradient for the step (LSQ)."""

    @staticmethod
    def forward(ctx, x, step, lowest, highest):
        ctx.save_for_backward(x, step)
        ctx.range = lowest, highest
        return (x * (1 / step)).clamp_(lowest, highest).round_().mul_(step)

    @staticmethod
    def backward(ctx, grad):
        x, step = ctx.saved_tensors
        scaled = x * (1 / step)
        clipped = scaled.clamp(*ctx.range)
        inside = clipped == scaled
        error = clipped.round_() - scaled * inside
        _, highest = ctx.range
        of_step = (grad * error).sum() / (grad.numel() * highest) ** 0.5
        return grad * inside, of_step.view_as(step), None, None


@quantizers.register("uniform")
def uniform(x: Tensor, *, step: Tensor | float, lowest: int, highest: int) -> Tensor:
    r"""Clip and round to multiples of a step.

    Forward: $s \cdot \mathrm{round}(\mathrm{clip}(x \cdot s^{-1}, l, h))$ with $s$ = `step`, half
    to even; the inverse is rounded first, as it is in the packed runtime.
    Backward: the gradient passes where $l \le x / s \le h$. A step that requires grad gets
    $\mathrm{round}(x/s) - x/s$ inside the range and $l$ or $h$ outside, summed and divided by
    $\sqrt{n h}$ for $n$ values (LSQ, Esser et al., ICLR 2020).
    """
    if isinstance(step, Tensor) and step.requires_grad:
        return _LearnedRound.apply(x, step, lowest, highest)
    return _Round.apply(x, 1 / step, lowest, highest, step)


def check_quantizer(name: str, bits: int, width: float = 1.0) -> None:
    """Raise unless the quantizer of this name maps to what layers of so many bits expect.

    Raises:
        BadConfig: There is no such quantizer, or its outputs are others.
    """
    probe = torch.tensor([-2.0, -0.5, -0.0, 0.0, 0.3, 0.5, 2.0, 9.0], device="cpu")
    step, (lowest, highest) = torch.tensor(0.5, device="cpu"), level_range(bits, signed=False)
    settings: dict[str, Any] = {"width": width}
    wanted, what = topk.sign(probe), "-1 for negative inputs and +1 for others"
    if bits > 1:
        settings = {"step": step, "lowest": lowest, "highest": highest}
        wanted = probe.div(step).clamp(lowest, highest).round() * step
        what = f"step times whole numbers from {lowest} to {highest}"
    with torch.no_grad():
        try:
            found = quantizers[name](probe, **settings)
        except TypeError as error:
            raise BadConfig(
                f"quantizer={name!r}: it is not one for {bits}-bit activations, since it does not "
                f"take {', '.join(settings)} ({error})."
            ) from None
    levels = found / step
    is_level = torch.equal(levels, levels.round().clamp(lowest, highest))
    if not (is_level if bits > 1 else torch.equal(found, wanted)):
        raise BadConfig(
            f"quantizer={name!r}: with {bits}-bit activations it must return {what}; for "
            f"{probe.tolist()} it returned {found.tolist()}."
        )


# -- modules -------------------------------------------------------------------------------------


class Quantizer(nn.Module):
    """Base class of the quantizers that surgery puts in place of activations and on edges.

    Attributes:
        bits: The bits of a value.
        signed: Whether values can be negative.
        quantizer: The registered name of the function.
    """

    bits: int
    signed: bool

    def __init__(self, quantizer: str):
        super().__init__()
        self.set_function_(quantizer)

    def set_function_(self, quantizer: str) -> None:
        """Use another registered function."""
        self.quantizer = quantizer
        self._quantize = quantizers[quantizer]

    def quantize(self, x: Tensor) -> Tensor:
        """The quantized value of each element."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        return self.quantize(x) if isinstance(x, Tensor) else recorded_call(self, (x,), {})

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_quantize"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.set_function_(self.quantizer)


class Sign(Quantizer):
    """A 1-bit quantizer.

    Args:
        width: The half-width of the range in which a gradient passes.
        quantizer: The registered name of the quantizer.
    """

    bits, signed = 1, True

    def __init__(self, width: float = 1.0, quantizer: str = "sign"):
        super().__init__(quantizer)
        self.width = width

    def quantize(self, x: Tensor) -> Tensor:
        return self._quantize(x, width=self.width)

    def extra_repr(self) -> str:
        shown = {"width": (self.width, 1.0), "quantizer": (self.quantizer, "sign")}
        return ", ".join(
            f"{key}={value}" for key, (value, usual) in shown.items() if value != usual
        )


class UniformQuantizer(Quantizer):
    """A quantizer of 2 or 4 bits: `step` times a level.

    Args:
        bits: The bits of a value.
        signed: Whether values can be negative.
        quantizer: The registered name of the quantizer.
        learn_clip: Whether the range is learned. It is otherwise fixed, for inputs of unit
            variance.
        like: A tensor whose dtype and device the range has.
    """

    # Near the steps of least squared error for normal inputs. The numerators are small.
    STEPS: ClassVar = {(2, False): 0.5, (2, True): 1.25, (4, False): 0.171875, (4, True): 0.34375}

    def __init__(
        self,
        bits: int,
        signed: bool,
        quantizer: str = "uniform",
        *,
        learn_clip: bool = False,
        like: Tensor | None = None,
    ):
        super().__init__(quantizer)
        self.bits, self.signed, self.learn_clip = bits, signed, learn_clip
        self.lowest, self.highest = level_range(bits, signed)
        if learn_clip:
            device = None if like is None else like.device
            self.raw_step = nn.Parameter(torch.tensor(self.STEPS[bits, signed], device=device))

    @property
    def step(self) -> Tensor | float:
        """The value of level 1."""
        if self.learn_clip:
            return _few_significant_bits(self.raw_step)
        return self.STEPS[self.bits, self.signed]

    def quantize(self, x: Tensor) -> Tensor:
        step = self.step
        step = step.to(x.dtype) if isinstance(step, Tensor) else step
        return self._quantize(x, step=step, lowest=self.lowest, highest=self.highest)

    def extra_repr(self) -> str:
        with torch.no_grad():
            step = float(self.step)
        return f"bits={self.bits}, levels={self.lowest}..{self.highest}, step={step:g}"


class RunningQuantizer(nn.Module):
    """An 8-bit quantizer of a layer's input, with a range that follows the values in training.

    The range is a running mean of the batches' extremes. Levels are 0 to 255 if no value was
    negative, and -127 to 127 otherwise.

    Args:
        like: A tensor whose device the range has.
    """

    running_low: Tensor
    running_high: Tensor
    batches: Tensor
    MOMENTUM: ClassVar[float] = 0.1

    def __init__(self, like: Tensor | None = None):
        super().__init__()
        device = None if like is None else like.device
        self.register_buffer("running_low", torch.tensor(-4.0, device=device))
        self.register_buffer("running_high", torch.tensor(4.0, device=device))
        self.register_buffer("batches", torch.tensor(0.0, device=device))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # The range stays float32: `.half()` changes only the dtype of the computation.
        super()._apply(lambda tensor: fn(tensor).float(), recurse)
        return self

    @torch.no_grad()
    def observe_(self, x: Tensor) -> None:
        """Let the range follow a batch."""
        if x.numel() == 0:
            return
        low, high = (extreme.float() for extreme in x.detach().aminmax())
        self.batches += 1
        share = (1 / self.batches).clamp_(min=self.MOMENTUM)
        self.running_low.lerp_(low, share)
        self.running_high.lerp_(high, share)

    @property
    def is_signed(self) -> Tensor:
        """Whether levels can be negative (bool)."""
        return self.running_low < 0

    @property
    def step(self) -> Tensor:
        """The value of level 1."""
        largest = torch.maximum(-self.running_low, self.running_high)
        step = largest / torch.where(self.is_signed, 127.0, 255.0)
        return torch.where(step > 0, step, 1.0)  # all values were 0

    def levels(self, x: Tensor) -> Tensor:
        """The level of each value."""
        if self.training:
            self.observe_(x)
        lowest = torch.where(self.is_signed, -127.0, 0.0).to(x.dtype)
        highest = torch.where(self.is_signed, 127.0, 255.0).to(x.dtype)
        return _Round.apply(x, (1 / self.step).to(x.dtype), lowest, highest, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.levels(x) * self.step.to(x.dtype)

    def extra_repr(self) -> str:
        return f"bits=8, range={float(self.running_low):g}..{float(self.running_high):g}"


class InputQuantizer(nn.Sequential):
    """BatchNorm → quantizer inside a ticket layer, for code that cannot be traced."""


def make_quantizer(config: Any, signed: bool, like: Tensor | None = None) -> Quantizer:
    """The quantizer that the settings of a ticket ask for, for at most 4 bits."""
    name = config.quantizer
    if config.activation_bits == 1:
        return Sign(config.sign_width, name)
    learn_clip = config.learn_clip
    return UniformQuantizer(config.activation_bits, signed, name, learn_clip=learn_clip, like=like)


def _few_significant_bits(step: Tensor) -> Tensor:
    """A positive float32 number with 6 significant bits; its gradient goes straight through."""
    dropped = 18  # bits of the mantissa
    bits = step.detach().float().clamp(min=2.0**-20).view(torch.int32)
    rounded = ((bits + (1 << dropped - 1)) & -(1 << dropped)).view(torch.float32)
    return rounded + (step - step.detach())
