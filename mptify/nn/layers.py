"""Ticket layers: torch layers whose `weight` is computed from frozen weights and learned scores.

A ticket layer *is* the layer it replaces: it inherits its class, keeps its attributes and runs its
`forward`. Only `weight` differs: a property that follows the scores, so code that calls
`F.linear(x, layer.weight)` itself uses the ticket too.
"""

from __future__ import annotations

import contextlib
import math
import re
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from mptify.config import TicketConfig
from mptify.errors import BadConfig, CannotConvert, NotKept, NoTorchScript
from mptify.nn import init, topk
from mptify.nn.leaf import recorded_call
from mptify.nn.quantizers import InputQuantizer, RunningQuantizer
from mptify.nn.quantizing_weight import QuantizingWeight
from mptify.nn.saving import saved_compactly
from mptify.nn.scopes import SharedScope

__all__ = [
    "TicketConv1d", "TicketConv2d", "TicketConv3d", "TicketConvTranspose1d",
    "TicketConvTranspose2d", "TicketConvTranspose3d", "TicketLinear", "TicketParameter", "Ticketed",
    "WeightState", "ticket_class",
]  # fmt: skip


class WeightState(Enum):
    """What a ticket layer computes its weight from."""

    SEARCHING = "searching"  # frozen weights and scores; the mask follows the scores
    FIXED = "fixed"  # one effective weight, from a file; there are no scores
    LAZY = "lazy"  # like FIXED, but the weight is loaded each time it is read


class Ticketed:
    r"""A mixin that turns a torch layer into a ticket layer.

    In state `SEARCHING`, `frozen` holds $W$ and never changes, and `scores` is the parameter that
    the search trains. Mask and gain are recomputed only after the scores have changed. In state
    `FIXED`, `fixed_weight` and `fixed_gain` hold what a ticket file says, and nothing else.

    With activations of at most 8 bits `weight` is $M \odot B$, and the gain multiplies the layer's
    output. The layer then accumulates whole numbers, times a step of few significant bits, so its
    sums are exact and equal on every device.
    """

    state: WeightState
    ticket_name: str
    weight_bits: int
    activation_bits: int
    score_grad: str
    init_std: float  # the standard deviation of the frozen weights, where they were drawn
    compute_dtype: torch.dtype
    input_quantizer: InputQuantizer | RunningQuantizer | None
    scope: SharedScope | None  # where layers share a budget of survivors
    weight_escapes: bool  # whether code other than `forward` multiplies inputs by `weight`
    channel_axis = 1
    training: bool

    # Parameters and buffers, `None` in the other states:
    frozen: Any
    scores: Any
    fixed_weight: Any
    fixed_gain: Any
    output_bias: Any  # added after the gain, where the gain multiplies the output
    _parameters: dict[str, Any]
    _buffers: dict[str, Any]

    # SEARCHING: the last selection, its mask if it was asked for, and what they were made from.
    # In training, only the compact form remains after a forward pass.
    _selection: topk.Selection | None
    _compact: topk.Compact | None
    _mask: Tensor | None
    _made_from: tuple | None
    _traced: topk.Selection | None = None  # while `torch.compile` traces `forward`
    _load: Callable[[], Tensor]  # LAZY: makes the effective weight
    weight_name = "weight"
    _linear_in_weight = True  # whether scaling the weight scales the output of `forward`

    # -- construction ----------------------------------------------------------------------------

    @classmethod
    def from_layer(
        cls,
        layer: nn.Module,
        config: TicketConfig,
        *,
        name: str,
        fan_in: int,
        weight: Tensor | None = None,
        bias: str = "bias",
        linear_in_weight: bool = True,
    ) -> Any:
        """The ticket layer that replaces `layer`, with the same attributes, mode and hooks.

        Args:
            layer: The dense layer.
            config: The settings of the ticket.
            name: The layer's name, from which its random streams are keyed.
            fan_in: How many weights contribute to one output.
            weight: The weight the layer computes with, where it is not simply its parameter
                (weight-standardized convs).
            bias: The name of its bias.
            linear_in_weight: Whether scaling the weight scales the output, once the bias is out.
        """
        ticket = cls.__new__(cls)
        ticket.__dict__.update(layer.__dict__)
        for store in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            ticket.__dict__[store] = layer.__dict__[store].copy()
        ticket._linear_in_weight = linear_in_weight
        own = ticket._parameters.pop(cls.weight_name, None)
        ticket._set_up(own if weight is None else weight, config, name, fan_in)
        value = ticket._parameters.get(bias)
        if value is not None:
            ticket._parameters[bias] = None
            if config.bias == "learn":
                learned = nn.Parameter(value.detach().clone())
                ticket._parameters["output_bias" if ticket.scales_output else bias] = learned
        return ticket

    def _set_up(self, weight: Tensor, config: TicketConfig, name: str, fan_in: int) -> None:
        prune = config.prune_of(name)
        self.state = WeightState.SEARCHING
        self.ticket_name = name
        self.weight_bits, self.activation_bits = config.weight_bits, config.activation_bits
        self.score_grad = config.score_grad
        self.init_std = init.standard_deviation(fan_in, prune)
        self.compute_dtype = weight.dtype
        self.input_quantizer = self.scope = None
        self.weight_escapes = False
        self.kept = topk.kept_count(weight.numel(), prune)
        shape = tuple(weight.shape)

        def first_scores() -> Any:
            return init.scores(config.seed, name, weight.numel(), 1 / math.sqrt(fan_in))

        # A parameter, not a buffer: DistributedDataParallel broadcasts buffers in every step.
        frozen = nn.Parameter(_frozen(weight, config, name, self.init_std), requires_grad=False)
        self._parameters["frozen"] = frozen
        self._parameters["scores"] = nn.Parameter(_drawn(first_scores, shape, weight.device))
        self._parameters["fixed_weight"] = self._buffers["fixed_gain"] = None
        self._parameters["output_bias"] = None
        self._forget()

    def tie_to_(self, other: Ticketed) -> None:
        """Share weights and scores with another ticket layer, as the dense layers shared them."""
        self._parameters["scores"] = other.scores
        self._parameters["frozen"] = other.frozen
        self.ticket_name, self.kept, self.init_std = other.ticket_name, other.kept, other.init_std

    @classmethod
    def dense_class(cls) -> type:
        """The class of the dense layers that this class replaces."""
        return cls.__bases__[1]

    # -- what it holds ---------------------------------------------------------------------------

    @property
    def _stored(self) -> Tensor:
        return self.frozen if self.state is WeightState.SEARCHING else self.fixed_weight

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return tuple(self._stored.shape)

    @property
    def count(self) -> int:
        """How many weights the layer has, kept or not."""
        return self._stored.numel()

    @property
    def is_meta(self) -> bool:
        """Whether the weights are on the meta device."""
        return self._stored.is_meta

    @property
    def scales_output(self) -> bool:
        """Whether the gain multiplies the layer's output rather than its weight."""
        return self.activation_bits <= 8 and self.weight_bits == 1 and self._linear_in_weight

    @property
    def kept(self) -> int:
        """How many weights survive."""
        if self.scope is not None:
            self.scope.refresh_()
        return self._kept

    @kept.setter
    def kept(self, kept: int) -> None:
        self._kept = kept

    @property
    def mask(self) -> Tensor:
        """Which weights survive (bool)."""
        weight, gain, _ = self._current()
        if self._mask is not None:
            return self._mask
        if self.state is not WeightState.SEARCHING:
            return weight != 0
        nonzero_survivors = self.weight_bits == 1 and not weight.is_meta and bool(gain > 0)
        self._mask = weight != 0 if nonzero_survivors else topk.select_mask(self.scores, self.kept)
        return self._mask

    @property
    def gain(self) -> Tensor:
        """The layer's scale; 1 for 32-bit weights, which keep their own magnitudes."""
        if self.state is not WeightState.SEARCHING:
            return self.fixed_gain
        if self._traced is None and not torch.compiler.is_compiling() and self._is_released():
            return self._compact.gain  # type: ignore[union-attr]
        return self._current().gain

    @property
    def sign(self) -> Tensor:
        """The frozen signs, ±1; in a layer without scores, those of the survivors."""
        return topk.sign(self._stored)

    def survivor_values(self) -> Tensor:
        """The surviving weights in row-major order; of 1-bit weights, only the signs matter."""
        weight = self.frozen if self.state is WeightState.SEARCHING else self._current().effective
        return weight.detach()[self.mask]

    def ticket_weight(self) -> Tensor:
        """The effective weight: gain · mask ⊙ sign (1-bit) or mask ⊙ frozen (32-bit)."""
        weight, gain, _ = self._current()
        weight = weight * gain if self.scales_output else weight
        return self._straight_through(weight, gain, includes_gain=True)

    def operand(self) -> Tensor:
        """The weight as the layer's operation takes it: without a gain that scales the output."""
        weight, gain, _ = self._current()
        weight = self._straight_through(weight, gain, includes_gain=not self.scales_output)
        return weight.to(self.compute_dtype)

    @property
    def weight(self) -> Any:
        """`operand()`, for code that reads the weight of a torch layer.

        If `weight_escapes`, a [`QuantizingWeight`][mptify.nn.quantizing_weight.QuantizingWeight].
        A torch.fx tracer records the read, so that its graph reads the weight each time it runs.
        """
        stored: Any = self._stored
        if isinstance(stored, fx.Proxy):
            tracer: Any = stored.tracer
            layer = tracer.create_proxy("get_attr", tracer.path_of_module(self), (), {})
            return tracer.create_proxy("call_function", getattr, (layer, self.weight_name), {})
        return QuantizingWeight(self) if self.weight_escapes else self.operand()

    def register_parameter(self, name: str, param: Any) -> None:
        if name == self.weight_name:
            raise NotKept(
                f"{self.ticket_name}: its weight is computed from frozen weights and scores, so it "
                "can't be assigned or fused; `mptify export --to dense` writes the weights for the "
                "dense network, where that can be done."
            )
        super().register_parameter(name, param)  # type: ignore[misc]

    # -- the effective weight --------------------------------------------------------------------

    def _current(self) -> topk.Selection:
        """The effective weight and gain, up to date."""
        if self._traced is not None:
            return self._traced
        if self.state is WeightState.FIXED:
            return topk.Selection(self.fixed_weight, self.fixed_gain)
        if self.state is WeightState.LAZY:
            return topk.Selection(self._load(), self.fixed_gain)
        if torch.compiler.is_exporting():  # exports the selection that `eval()` has made
            if self._selection is None:
                raise CannotConvert(
                    f"{self.ticket_name}: call eval() on the model before exporting it, so that "
                    "its mask is settled."
                )
        elif torch.compiler.is_compiling() and self.scope is None:
            return topk.traceable_select(
                self.scores,
                self.frozen,
                self.kept,
                self.weight_bits,
                includes_gain=not self.scales_output,
            )
        elif torch.compiler.is_compiling():
            torch.compiler.disable(self.refresh_)()
        else:
            self.refresh_()
        assert self._selection is not None
        return self._selection

    def _straight_through(self, weight: Tensor, gain: Tensor, includes_gain: bool) -> Tensor:
        if self.state is not WeightState.SEARCHING:
            return weight
        return topk.straight_through_weight(
            self.scores, self.frozen, weight, gain, self.score_grad, includes_gain
        )

    def refresh_(self) -> None:
        """Select the survivors again if the scores, or how many to keep, have changed.

        An optimizer step only changes the scores; the next forward pass selects.
        """
        if self.state is not WeightState.SEARCHING:
            return
        if self.scope is not None:
            self.scope.refresh_()
            return
        if self._is_released():
            self._expand()
        if self.is_fresh():
            return
        reuse: dict[str, Any] = {}
        if self._compact is not None:
            reuse["hint"] = self._compact.hint
        if self._selection is not None:
            reuse["out"] = self._selection.effective.detach()
        with torch.inference_mode(False):
            selection = topk.select(
                self.scores,
                self.frozen,
                self.kept,
                weight_bits=self.weight_bits,
                includes_gain=not self.scales_output,
                **reuse,
            )
        self._remember(selection)

    def is_fresh(self) -> bool:
        """Whether the mask belongs to the scores as they are now."""
        # `weight` shares memory with the selection: code that writes to it raises its version.
        selection = self._selection
        return selection is not None and self._is_made_from_scores(selection.effective._version)

    def _is_released(self) -> bool:
        """Whether only the compact form remains of a mask that belongs to the scores."""
        return self._selection is None and self._is_made_from_scores(None)

    def _is_made_from_scores(self, weight_version: int | None) -> bool:
        if self._made_from is None or self.scores.is_inference():
            return False
        scores, *rest = self._made_from
        return scores() is self.scores and rest == [weight_version, *self._score_version()]

    def _release(self) -> None:
        """Drop the effective weight, which backward and the next forward pass make again."""
        if self._compact is not None and self._saves_compactly() and self.is_fresh():
            self._selection = None
            self._made_from = (weakref.ref(self.scores), None, *self._score_version())

    def _expand(self) -> None:
        assert self._compact is not None
        with torch.inference_mode(False), torch.no_grad():
            effective = self._compact.expand(self.frozen)
        self._remember(topk.Selection(effective, self._compact.gain, self._compact), self._mask)

    def _saves_compactly(self) -> bool:
        return self.training and self.state is WeightState.SEARCHING and torch.is_grad_enabled()

    def _score_version(self) -> tuple:
        kept = self._kept if self.scope is None else self.scope.kept
        version = None if self.scores.is_inference() else self.scores._version
        return version, self.scores.data_ptr(), self.scores.device, kept

    def _remember(self, selection: topk.Selection, mask: Tensor | None = None) -> None:
        self._selection, self._compact, self._mask = selection, selection.compact, mask
        version = selection.effective._version
        self._made_from = (weakref.ref(self.scores), version, *self._score_version())

    def _forget(self) -> None:
        self._selection = self._compact = self._mask = self._made_from = None

    def _refresh_in_eval(self) -> None:
        if not self.training and not self.is_meta and self.scope is None:
            self.refresh_()

    def set_prune_(self, prune: float) -> None:
        """Remove another fraction of the weights from now on (a step of a prune schedule)."""
        if self.state is not WeightState.SEARCHING:
            raise BadConfig(
                f"{self.ticket_name}: was loaded from a file, without the scores that say which "
                "weights to remove."
            )
        if self.scope is not None:
            self.scope.set_prune_(prune)
        else:
            self.kept = topk.kept_count(self.count, prune)
        self._refresh_in_eval()

    def set_mask_(self, mask: Tensor) -> None:
        """Use the mask that a scope shared with other layers has selected."""
        if not mask.is_meta:
            self.kept = int(mask.sum())
        signs = topk.survivors(self.frozen, mask)
        selection = topk.weigh(
            self.frozen, signs, self._kept, self.weight_bits, includes_gain=not self.scales_output
        )
        self._remember(selection, mask)

    # -- tickets from files ----------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def set_ticket_(self, mask: Tensor, weights: Tensor, gain: float, kept: int) -> None:
        """Hold a given ticket, in place.

        A layer without scores takes the effective weight alone. A layer with scores takes 1 as the
        score of survivors and 0 for the rest; with 1-bit weights, all of `weights` are ±`gain`.
        Then the scores give the same mask, gain and effective weight as those set here.

        Args:
            mask: The survivors.
            weights: The frozen weights.
            gain: The mean magnitude of the survivors; ignored for 32-bit weights.
            kept: The number of survivors.
        """
        self.scope = None
        self.kept = kept
        gain = gain if self.weight_bits == 1 else 1.0
        if self.state is not WeightState.SEARCHING:
            effective = self.effective_weight(mask, weights)
            if self.state is WeightState.LAZY:
                self._parameters["fixed_weight"] = _without_grad(torch.empty_like(effective))
                self.state = WeightState.FIXED
                del self._load
            self.fixed_weight.copy_(effective)
            self.fixed_gain.fill_(gain)
            zero_survivors = not torch.equal(effective != 0, mask)
            self._mask = mask.to(self.fixed_weight.device) if zero_survivors else None
            return
        self.frozen.copy_(weights)
        self.scores.copy_(mask)
        last = self._selection
        weight = torch.empty_like(self.frozen) if last is None else last.effective.detach()
        operand = topk.sign(self.frozen) if self.scales_output else self.frozen
        torch.mul(operand, self.scores, out=weight)
        scale = torch.tensor(gain, dtype=torch.float32, device=self.scores.device)
        self._remember(topk.Selection(weight, scale))

    def effective_weight(self, mask: Tensor, weights: Tensor) -> Tensor:
        """The `fixed_weight` of a ticket: without a gain that scales the output."""
        return (topk.sign(weights) if self.scales_output else weights) * mask

    def drop_scores_(self, share_with: Ticketed | None = None) -> None:
        """Drop scores and frozen weights, and hold one effective weight (see `set_ticket_`).

        Args:
            share_with: A layer whose effective weight this one shares.
        """
        self.scope = None
        self._forget()
        if share_with is None:
            device = torch.device("cpu") if self.is_meta else self._stored.device
            empty = torch.empty(self.shape, dtype=torch.float32, device=device)
            weight = _without_grad(empty)
            gain = torch.ones((), dtype=torch.float32, device=device)
        else:
            weight, gain = share_with.fixed_weight, share_with.fixed_gain
        self._parameters["fixed_weight"], self._buffers["fixed_gain"] = weight, gain
        self._parameters["frozen"] = self._parameters["scores"] = None
        self.state = WeightState.FIXED

    def load_lazily_(self, load: Callable[[], Tensor], gain: float, kept: int) -> None:
        """Hold no weight at all: call `load` whenever it is read, until `set_ticket_`."""
        self.drop_scores_()
        empty = torch.empty(self.shape, dtype=torch.float32, device="meta")
        self._parameters["fixed_weight"] = _without_grad(empty)
        self.fixed_gain.fill_(gain if self.weight_bits == 1 else 1.0)
        self.kept, self._load, self.state = kept, load, WeightState.LAZY

    # -- nn.Module -------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Any:
        if not mode:
            self.refresh_()
        return super().train(mode)  # type: ignore[misc]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Scores and weights stay float32: `.half()` changes only the dtype of the computation.
        masters = [self.frozen, self.scores, self.fixed_weight, self.fixed_gain]
        masters += [] if self.scores is None else [self.scores.grad]

        def keep_masters_wide(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            if not any(tensor is master for master in masters):
                return applied
            self.compute_dtype = applied.dtype
            same = applied.dtype == tensor.dtype
            return (applied if same else tensor.to(applied.device)).contiguous()

        super()._apply(keep_masters_wide, recurse)  # type: ignore[misc]
        if self.state is WeightState.SEARCHING:
            self._forget()
            self._refresh_in_eval()
        elif self._mask is not None:
            self._mask = fn(self._mask)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        self._refresh_in_eval()

    def __getstate__(self) -> dict:
        # A copy makes its own selection: version counters of another tensor mean nothing there.
        mask = None if self.state is WeightState.SEARCHING else self._mask
        return self.__dict__ | {
            "_selection": None, "_compact": None, "_mask": mask, "_made_from": None,
        }  # fmt: skip

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._refresh_in_eval()

    def __reduce__(self) -> Any:
        dynamic = type(self).__module__ == _DYNAMIC_MODULE
        base = self.dense_class() if dynamic else type(self)
        return _empty_ticket, (base, self.weight_name), self.__getstate__()

    def __prepare_scriptable__(self) -> Any:
        """Called by `torch.jit.script`."""
        raise NoTorchScript

    def extra_repr(self) -> str:
        dense = super().extra_repr()  # type: ignore[misc]
        dense = re.sub(r", (bias=False|stride=\(1(, 1)*,?\))", "", dense)
        gain = "meta" if self.is_meta else f"{float(self.gain):.4f}"
        bits = f"{self.weight_bits}/{self.activation_bits}"
        ticket = f"bits={bits}, kept={self.kept}/{self.count}, gain={gain}"
        return f"{dense}, {ticket}" if dense else ticket

    def __repr__(self) -> str:
        quantizer = self.input_quantizer
        after = "" if quantizer is None else f" after {quantizer}"
        return f"{type(self).__name__}({self.extra_repr()}){after}"

    # -- forward ---------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recorded = recorded_call(self, args, kwargs, self._stored)
        if recorded is not None:
            return recorded
        if self.weight_escapes:
            y = self._without_escape().forward(*args, **kwargs)
            self._release()
            return y
        if args:
            args = (self.quantize_input(args[0]), *args[1:])
        else:  # called by keyword; the input is the first argument there too
            name = next(iter(kwargs))
            kwargs[name] = self.quantize_input(kwargs[name])
        if not torch.compiler.is_compiling():
            with self._saving(args[0] if args else kwargs[name]):
                y = super().forward(*args, **kwargs)  # type: ignore[misc]
            self._release()
            return self.finish(y)
        # The compiled graph selects once for weight and gain. Only the tracer sees the attribute.
        self._traced = self._current()
        try:
            return self.finish(super().forward(*args, **kwargs))  # type: ignore[misc]
        finally:
            self._traced = None

    def _saving(self, x: Any) -> Any:
        """A context for the layer's operation on `x`, in which backward's share takes few bits."""
        if not self._saves_compactly() or torch.compiler.is_compiling():
            return contextlib.nullcontext()
        selection = self._current()
        return saved_compactly(self, x, selection.effective, selection.compact)

    def _without_escape(self) -> Any:
        """This layer with the same tensors, for `forward`, which quantizes its input itself."""
        if not torch.compiler.is_compiling():  # which selects in its own way
            self.refresh_()
        alias = type(self).__new__(type(self))
        alias.__dict__.update(self.__dict__, weight_escapes=False)
        return alias

    def quantize_input(self, x: Tensor, quantizer: nn.Module | None = None) -> Tensor:
        """The input as the layer's operation takes it: levels, if `scale` multiplies by the step.

        Args:
            x: The input.
            quantizer: The quantizer to use instead of the layer's own.
        """
        quantizer = quantizer or self.input_quantizer
        if isinstance(quantizer, RunningQuantizer) and self.scales_output:
            return quantizer.levels(x)
        return x if quantizer is None else quantizer(x)

    def finish(self, y: Tensor) -> Tensor:
        """The layer's output from that of its operation: times the scale, plus the bias."""
        return self.add_bias(self.scale(y), self.output_bias)

    def scale(self, y: Tensor, quantizer: nn.Module | None = None) -> Tensor:
        """Multiply by the gain, and by the step of an 8-bit input, if they scale the output."""
        if not self.scales_output:
            return y
        quantizer, scale = quantizer or self.input_quantizer, self.gain
        if isinstance(quantizer, RunningQuantizer):
            scale = scale * quantizer.step
        return y * scale.to(y.dtype)

    def add_bias(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Add a bias along the layer's output channels."""
        if bias is None:
            return y
        if self.channel_axis != -1:
            bias = bias.view(-1, *[1] * (len(self.shape) - 2))
        return y + bias.to(y.dtype)

    def run(
        self,
        function: Callable[..., Tensor] | str,
        x: Tensor,
        bias: Tensor | None,
        *args: Any,
        quantizer: nn.Module | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Call `function(x, weight, bias, ...)` as the layer itself would.

        Args:
            function: One of `torch.nn.functional`, or its name.
            x: The input.
            bias: A bias that the function would add.
            *args: Further arguments of the function.
            quantizer: A quantizer to use instead of the layer's own.
            **kwargs: Further arguments of the function.
        """
        function = getattr(F, function) if isinstance(function, str) else function
        x = self.quantize_input(x) if quantizer is None else self.quantize_input(x, quantizer)
        with self._saving(x):
            inner_bias = None if self.scales_output else bias
            y = function(x, self.operand(), inner_bias, *args, **kwargs)
        self._release()
        return self.add_bias(self.scale(y, quantizer), bias) if self.scales_output else y


def _without_grad(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _empty_ticket(base: type, weight_name: str) -> Any:
    cls = base if issubclass(base, Ticketed) else ticket_class(base, weight_name)
    return cls.__new__(cls)


def _frozen(weight: Tensor, config: TicketConfig, name: str, std: float) -> Tensor:
    if config.init == "keep":
        # Adding 0 turns -0.0 into 0.0, whose sign is +1.
        return weight.detach().to(torch.float32).contiguous() + 0.0
    shape = tuple(weight.shape)

    def draw() -> Any:
        return init.frozen_weight(config.seed, name, shape, config.init, std)

    return _drawn(draw, shape, weight.device)


def _drawn(draw: Callable[[], Any], shape: tuple[int, ...], device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.float32, device=device)
    return torch.from_numpy(draw().reshape(shape)).to(device)


# To a type checker these classes clash with torch's: `weight` is read-only, and `forward` takes
# whatever the dense layer's does.


class TicketConv1d(Ticketed, nn.Conv1d):  # type: ignore[misc, override]
    """A ticket layer in place of `nn.Conv1d`."""


class TicketConv2d(Ticketed, nn.Conv2d):  # type: ignore[misc, override]
    """A ticket layer in place of `nn.Conv2d`."""


class TicketConv3d(Ticketed, nn.Conv3d):  # type: ignore[misc, override]
    """A ticket layer in place of `nn.Conv3d`."""


class TicketConvTranspose1d(Ticketed, nn.ConvTranspose1d):  # type: ignore[misc, override]
    """A ticket layer in place of `nn.ConvTranspose1d`."""


class TicketConvTranspose2d(Ticketed, nn.ConvTranspose2d):  # type: ignore[misc, override]
    """A ticket layer in place of `nn.ConvTranspose2d`."""


class TicketConvTranspose3d(Ticketed, nn.ConvTranspose3d):  # type: ignore[misc, override]
    """A ticket layer in place of `nn.ConvTranspose3d`."""


class TicketLinear(Ticketed, nn.Linear):  # type: ignore[misc, override]
    """A ticket layer in place of `nn.Linear`."""

    channel_axis = -1


class TicketParameter(Ticketed, nn.Module):
    """The ticket of a parameter that its owner passes to `F.linear` or `F.conv*` itself.

    The owner keeps its class and reads the parameter by its old name. Calling this module runs the
    function of the given name.
    """

    bias = None

    def __init__(
        self, parameter: Tensor, config: TicketConfig, *, name: str, fan_in: int, axis: int = -1
    ):
        super().__init__()
        self._set_up(parameter, config, name, fan_in)
        self.channel_axis = axis

    def forward(self, x: Tensor, function: str = "linear", *args: Any, **kwargs: Any) -> Any:
        recorded = recorded_call(self, (x, function, *args), kwargs, self._stored)
        if recorded is not None:
            return recorded
        return self.run(function, x, None, *args, **kwargs)


_STATIC: dict[type, type[Ticketed]] = {
    nn.Conv1d: TicketConv1d,
    nn.Conv2d: TicketConv2d,
    nn.Conv3d: TicketConv3d,
    nn.ConvTranspose1d: TicketConvTranspose1d,
    nn.ConvTranspose2d: TicketConvTranspose2d,
    nn.ConvTranspose3d: TicketConvTranspose3d,
    nn.Linear: TicketLinear,
}
_DYNAMIC: dict[tuple, Any] = {}
_DYNAMIC_MODULE = f"{__name__}.dynamic"


def ticket_class(layer_type: type, weight_name: str = "weight") -> type[Ticketed]:
    """The ticket version of a layer class: `Ticket<Name>`, made once per class."""
    if layer_type in _STATIC and weight_name == "weight":
        return _STATIC[layer_type]
    key = (layer_type, weight_name)
    if key not in _DYNAMIC:
        name = layer_type.__name__
        doc = f"A ticket layer in place of `{name}`."
        body: dict[str, Any] = {"__module__": _DYNAMIC_MODULE, "__doc__": doc}
        if weight_name != "weight":
            body |= {"weight_name": weight_name, weight_name: Ticketed.weight}
        if issubclass(layer_type, nn.Linear):
            body["channel_axis"] = -1
        return _DYNAMIC.setdefault(key, type(f"Ticket{name}", (Ticketed, layer_type), body))
    return _DYNAMIC[key]


def _raise_versions_of_fused_steps(optimizer: Any, *_: Any) -> None:
    """Fused optimizers change scores without raising the version by which layers notice it."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version(group["params"])


register_optimizer_step_post_hook(_raise_versions_of_fused_steps)
