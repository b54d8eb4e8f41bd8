"""Ticket layers: ordinary torch layers whose `weight` is computed from frozen weights and learned scores.

A ticket layer *is* the layer it stands for: it inherits its class, keeps its attributes and runs its `forward`. Only
`weight` changes: a property, recomputed from `frozen` and `scores` whenever someone reads it, so code that calls
`F.linear(x, layer.weight)` by itself gets the ticket too.
"""

from __future__ import annotations

import math
import re
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mptify.config import TicketConfig
from mptify.errors import BadConfig, CannotConvert, NotKept, NoTorchScript
from mptify.nn import functional, init
from mptify.nn.applying import EscapedWeight, along, apply_weight
from mptify.nn.bare import Bare
from mptify.nn.norms import Binarize, ChannelBatchNorm, ScalarBatchNorm, Sign, TokenBatchNorm, recorded_call
from mptify.nn.scopes import SharedThreshold

__all__ = [
    "ChannelBatchNorm", "ScalarBatchNorm", "Sign", "TicketConv1d", "TicketConv2d", "TicketConv3d",
    "TicketConvTranspose1d", "TicketConvTranspose2d", "TicketConvTranspose3d", "TicketLinear", "TicketParameter", "Ticketed",
    "TokenBatchNorm", "ticket_class",
]  # fmt: skip


class Ticketed(Bare):
    r"""What every ticket layer offers: `scores`, `mask`, `gain`, `sign`, `frozen`, `kept`, `ticket_weight()`.

    A mixin in front of a torch layer's class. `frozen` holds W and never changes; `scores` is the only parameter that
    stands for the weights. Mask and gain are recomputed when the scores have changed since, and only then.

    A layer that was loaded from a file is *bare* ([`Bare`][mptify.nn.bare.Bare]).

    With 1-bit activations `weight` is $M \odot B$ and the gain multiplies the layer's output:
    the accumulation is then a sum of ±1, an integer, the same on every device.
    """

    ticket_name: str
    weight_bits: int
    activation_bits: int
    score_grad: str
    deviation: float  # of the frozen weights, where they were drawn
    compute_dtype: torch.dtype
    before: Binarize | None
    threshold: SharedThreshold | None
    training: bool
    scores: Any  # these three are parameters
    frozen: Any
    offset: Any
    _parameters: dict[str, Any]
    _chosen: functional.Chosen | None  # the cache: effective weight and gain
    _mask: Any  # and the mask, once somebody asked for it
    _seen: tuple | None  # the state of the scores that they were made from
    _escapes: bool  # other code than its own `forward` reads the weight, and has to be given one that binarizes
    _running: dict[int, functional.Chosen]  # by thread, while `forward` runs: what it computes with

    # -- making one ---------------------------------------------------------------------------------------------------

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
        gain_can_move: bool = True,
    ) -> Any:
        """Stand in for `layer`: same attributes, mode and hooks; its weights replaced by a ticket's.

        `weight` is what the layer computes with where that is not simply its `.weight` (weight-standardised convs).
        """
        ticket = cls.__new__(cls)
        ticket.__dict__.update(layer.__dict__)
        for store in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            ticket.__dict__[store] = layer.__dict__[store].copy()
        ticket._gain_can_move = gain_can_move
        own = ticket._parameters.pop(cls._weight_name, None)
        ticket._set_up(own if weight is None else weight, config, name, fan_in)
        offset = ticket._parameters.get(bias)
        if offset is not None:
            ticket._parameters[bias] = None
            if config.bias == "learn":
                learned = nn.Parameter(offset.detach().clone())
                ticket._parameters["offset" if ticket.gain_outside else bias] = learned
        return ticket

    _weight_name = "weight"

    def _set_up(self, weight: Tensor, config: TicketConfig, name: str, fan_in: int) -> None:
        prune = config.prune_of(name)
        self.ticket_name = name
        self.weight_bits, self.activation_bits = config.weight_bits, config.activation_bits
        self.score_grad = config.score_grad
        self.before = None
        self.threshold = None
        self.kept = functional.kept_count(weight.numel(), prune)
        self.compute_dtype = weight.dtype
        self._escapes, self._running = False, {}
        self._parameters["offset"] = None
        shape, device = tuple(weight.shape), weight.device
        # A parameter, not a buffer: DistributedDataParallel sends buffers to every process again in every step.
        self.deviation = init.standard_deviation(fan_in, prune)
        self._parameters["frozen"] = nn.Parameter(_frozen(weight, config, name, self.deviation), requires_grad=False)
        first = _on_device(lambda: init.scores(config.seed, name, weight.numel(), 1 / math.sqrt(fan_in)), shape, device)
        self._parameters["scores"] = nn.Parameter(first)
        self._forget()

    def _forget(self) -> None:
        self._chosen = self._mask = self._seen = None

    def tie_to_(self, other: Any) -> None:
        """Share the weights and scores of another ticket layer, as the original layers shared one parameter."""
        self._parameters["scores"] = other.scores
        self._parameters["frozen"] = other.frozen
        self.ticket_name, self.kept, self.deviation = other.ticket_name, other.kept, other.deviation

    @classmethod
    def stands_for(cls) -> type:
        """The class of the ordinary layers that tickets of this class take the place of."""
        return cls.__bases__[1]

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many weights the layer has, kept or not."""
        return self.frozen.numel()

    @property
    def gain_outside(self) -> bool:
        """Whether the gain multiplies the layer's output rather than its weight."""
        return self.activation_bits == 1 and self.weight_bits == 1 and self._gain_can_move

    _gain_can_move = True  # whether `forward` is linear in the weight once the bias is out of it

    @property
    def mask(self) -> Tensor:
        """Which weights survive (bool)."""
        weight, gain, _ = self._live()
        if self._mask is None and self.is_bare:
            return weight != 0
        if self._mask is None:
            visible = self.weight_bits == 1 and not weight.is_meta and bool(gain > 0)  # whether each survivor shows
            self._mask = weight != 0 if visible else functional.select_mask(self.scores, self.kept)
        return self._mask

    @property
    def gain(self) -> Tensor:
        """The layer's one scale; 1 for 32-bit weights, which keep their own magnitudes."""
        return self._live().gain

    @property
    def sign(self) -> Tensor:
        """The frozen signs, ±1."""
        return functional.sign(self.frozen)

    def ticket_weight(self) -> Tensor:
        """The effective weight: gain · mask ⊙ sign for 1-bit weights, mask ⊙ frozen for 32-bit ones."""
        weight, gain, _ = self._live()
        return self._attached(weight * gain if self.gain_outside else weight, gain, divide=False)

    @property
    def weight(self) -> Any:
        """The weight as `forward` uses it: `ticket_weight()`, without the gain where that is applied to the output.

        A tracer of torch.fx records that the weight is read, so that its graph reads the weight anew whenever it runs.
        """
        if isinstance(self.frozen, fx.Proxy):
            tracer: Any = self.frozen.tracer
            layer = tracer.create_proxy("get_attr", tracer.path_of_module(self), (), {})
            return tracer.create_proxy("call_function", getattr, (layer, self._weight_name), {})
        weight = self._compute_weight().to(self.compute_dtype)
        return EscapedWeight(self, weight) if self._escapes and _thread() not in self._running else weight

    def register_parameter(self, name: str, param: Any) -> None:
        if name == self._weight_name:
            raise NotKept(
                f"{self.ticket_name}: its weight is computed from frozen weights and scores, so it can't be assigned or fused; "
                "`mptify export --to dense` writes the weights for the dense network, where that can be done."
            )
        super().register_parameter(name, param)  # type: ignore[misc]

    def _compute_weight(self) -> Tensor:
        """The weight that an operation takes: without the gain where that comes behind."""
        weight, gain, _ = self._running.get(_thread()) or self._live()
        return self._attached(weight, gain, divide=self.gain_outside)

    def _attached(self, weight: Tensor, gain: Tensor, divide: bool) -> Tensor:
        if self.is_bare:
            return weight
        return functional.attach(self.scores, self.frozen, weight, gain, self.score_grad, divide)

    def _live(self) -> functional.Chosen:
        """Effective weight and gain, up to date."""
        if self.is_bare:
            return functional.Chosen(self._fetched(), self.bare_gain)
        if torch.compiler.is_exporting():  # what is exported is a snapshot, taken by `eval()`
            if self._chosen is None:
                raise CannotConvert(f"{self.ticket_name}: call eval() on the model before exporting it, so that its mask is settled.")
        elif torch.compiler.is_compiling() and self.threshold is None:
            return functional.traceable_choose(self.scores, self.frozen, self.kept, self.weight_bits, not self.gain_outside)
        elif torch.compiler.is_compiling():
            torch.compiler.disable(self.refresh_)()
        else:
            self.refresh_()
        assert self._chosen is not None
        return self._chosen

    # -- keeping the mask fresh ----------------------------------------------------------------------------------------

    def refresh_(self) -> None:
        """Recompute mask and gain if the scores, or how many to keep, changed since the last time."""
        if self.is_bare:
            return
        if self.threshold is not None:
            self.threshold.refresh_()
            return
        if not self.is_fresh():
            with torch.inference_mode(False):
                settings: Any = {"weight_bits": self.weight_bits, "scaled": not self.gain_outside}
                if self._chosen is not None:
                    settings |= {"into": self._chosen.weight.detach(), "hint": self._chosen.hint}
                self._settle(functional.choose(self.scores, self.frozen, self.kept, **settings))

    def is_fresh(self) -> bool:
        """Whether the mask belongs to the scores as they are now."""
        if self._seen is None or self._chosen is None or self.scores.is_inference():
            return False
        return self._seen[0]() is self.scores and self._seen[1:] == (self._chosen.weight._version, *self._state())

    def _state(self) -> tuple:
        kept = self.kept if self.threshold is None else self.threshold.kept
        version = None if self.scores.is_inference() else self.scores._version
        return version, self.scores.data_ptr(), self.scores.device, kept

    def _settle(self, chosen: functional.Chosen) -> None:
        self._chosen, self._mask = chosen, None
        # The weight that is handed out shares this one's memory: whoever writes to it, as nn.init does, raises its version.
        self._seen = (weakref.ref(self.scores), chosen.weight._version, *self._state())

    def take_mask_(self, mask: Tensor) -> None:
        """Use a mask that was made elsewhere, by a threshold shared with other layers."""
        if not mask.is_meta:
            self.kept = int(mask.sum())
        survivors = functional.survivors(self.frozen, mask)
        self._settle(functional.weigh(self.frozen, survivors, self._kept, self.weight_bits, not self.gain_outside))
        self._mask = mask

    @torch.inference_mode(False)
    @torch.no_grad()
    def hold_(self, mask: Tensor, frozen: Tensor, gain: float, kept: int) -> None:
        """Become a found ticket, in place: these `kept` survivors of these weights, whose mean magnitude is `gain`.

        The scores are 1 for survivors and 0 for the rest. With 1-bit weights, all of `frozen` are ±`gain`: then the mask, the
        gain and the effective weight that are set here are those that the scores give again, whenever they are asked.
        A threshold shared with other layers is given up. A bare layer takes the effective weight alone.
        """
        self.threshold = None
        self.kept = kept
        size = gain if self.weight_bits == 1 else 1.0
        if self.is_bare:
            self._hold_bare_(self.bare_weight(mask, frozen), mask, size)
            return
        self.frozen.copy_(frozen)
        self.scores.copy_(mask)
        weight = torch.empty_like(self.frozen) if self._chosen is None else self._chosen.weight.detach()
        torch.mul(functional.sign(self.frozen) if self.gain_outside else self.frozen, self.scores, out=weight)
        self._settle(functional.Chosen(weight, torch.tensor(size, dtype=torch.float32, device=self.scores.device)))

    def set_prune_(self, prune: float) -> None:
        """Remove another fraction from now on (a prune schedule's step)."""
        if self.is_bare:
            raise BadConfig(f"{self.ticket_name}: was loaded from a file without scores, which would say what to remove.")
        if self.threshold is not None:
            self.threshold.set_prune_(prune)
        else:
            self.kept = functional.kept_count(self.count, prune)
        self._refresh_in_eval()

    @property
    def kept(self) -> int:
        """How many weights survive."""
        if self.threshold is not None:
            self.threshold.refresh_()
        return self._kept

    @kept.setter
    def kept(self, kept: int) -> None:
        self._kept = kept

    def train(self, mode: bool = True) -> Any:
        if not mode:
            self.refresh_()
        return super().train(mode)  # type: ignore[misc]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Scores and frozen weights are float32 masters: `.half()` changes what is computed in, never them.
        masters = (self.frozen, self.bare_gain) if self.is_bare else (self.frozen, self.scores, self.scores.grad)

        def keeping_masters_wide(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            if any(tensor is master for master in masters):
                self.compute_dtype = applied.dtype
                return (applied if applied.dtype == tensor.dtype else tensor.to(applied.device)).contiguous()
            return applied

        super()._apply(keeping_masters_wide, recurse)  # type: ignore[misc]
        if self.is_bare:
            self._mask = None if self._mask is None else fn(self._mask)
            return self
        self._forget()
        self._refresh_in_eval()
        return self

    def _refresh_in_eval(self) -> None:
        if not self.training and not self.frozen.is_meta and self.threshold is None:
            self.refresh_()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        self._refresh_in_eval()

    def __getstate__(self) -> dict:
        # Caches stay behind; ids and version counters of another object mean nothing in a copy.
        mask = self._mask if self.is_bare else None
        return self.__dict__ | {"_chosen": None, "_mask": mask, "_seen": None, "_running": {}}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._refresh_in_eval()

    def __reduce__(self) -> Any:
        base = type(self) if type(self).__module__ != _DYNAMIC_MODULE else self.stands_for()
        return _empty_ticket, (base, self._weight_name), self.__getstate__()

    def __prepare_scriptable__(self) -> Any:
        """Called by `torch.jit.script`."""
        raise NoTorchScript

    # -- running -------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recorded = recorded_call(self, args, kwargs, self.frozen)
        if recorded is not None:
            return recorded
        if args:
            args = (self._prepare(args[0]), *args[1:])
        else:  # called by keyword: the input comes first there too
            name = next(iter(kwargs))
            kwargs[name] = self._prepare(kwargs[name])
        thread = _thread()
        chosen = self._running[thread] = self._live()
        try:
            y = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            del self._running[thread]
        return self.finish(y, chosen.gain)

    def finish(self, y: Tensor, gain: Tensor) -> Tensor:
        """What comes behind the layer's own operation: the gain, where it multiplies the output, and the offset."""
        y = y * gain.to(y.dtype) if self.gain_outside else y
        return y if self.offset is None else y + along(self.offset, self).to(y.dtype)

    def _prepare(self, x: Tensor) -> Tensor:
        return x if self.before is None else self.before(x)

    channel_axis = 1

    def extra_repr(self) -> str:
        plain = super().extra_repr()  # type: ignore[misc]
        plain = re.sub(r", (bias=False|stride=\(1(, 1)*,?\))", "", plain)
        gain = "meta" if self.frozen.is_meta else f"{float(self.gain):.4f}"
        tail = f"bits={self.weight_bits}/{self.activation_bits}, kept={self.kept}/{self.count}, gain={gain}"
        return f"{plain}, {tail}" if plain else tail

    def __repr__(self) -> str:
        name = type(self).__name__
        before = f" after {self.before}" if self.before is not None else ""
        return f"{name}({self.extra_repr()}){before}"


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _empty_ticket(base: type, weight_name: str) -> Any:
    cls = base if issubclass(base, Ticketed) else ticket_class(base, weight_name)
    return cls.__new__(cls)


def _frozen(weight: Tensor, config: TicketConfig, name: str, deviation: float) -> Tensor:
    if config.init == "keep":
        return weight.detach().to(torch.float32).contiguous() + 0.0  # -0.0 becomes 0.0, whose sign is +1
    shape = tuple(weight.shape)
    return _on_device(lambda: init.frozen_weight(config.seed, name, shape, config.init, deviation), shape, weight.device)


def _on_device(draw: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.float32, device=device)
    return torch.from_numpy(draw().reshape(shape)).to(device)


# To a type checker these clash with torch's: `weight` can only be read, and `forward` takes whatever the layer's own does.


class TicketConv1d(Ticketed, nn.Conv1d):  # type: ignore[misc, override]
    """A conv whose weights are a ticket's."""


class TicketConv2d(Ticketed, nn.Conv2d):  # type: ignore[misc, override]
    """A conv whose weights are a ticket's."""


class TicketConv3d(Ticketed, nn.Conv3d):  # type: ignore[misc, override]
    """A conv whose weights are a ticket's."""


class TicketConvTranspose1d(Ticketed, nn.ConvTranspose1d):  # type: ignore[misc, override]
    """A transposed conv whose weights are a ticket's."""


class TicketConvTranspose2d(Ticketed, nn.ConvTranspose2d):  # type: ignore[misc, override]
    """A transposed conv whose weights are a ticket's."""


class TicketConvTranspose3d(Ticketed, nn.ConvTranspose3d):  # type: ignore[misc, override]
    """A transposed conv whose weights are a ticket's."""


class TicketLinear(Ticketed, nn.Linear):  # type: ignore[misc, override]
    """A linear layer whose weights are a ticket's."""

    channel_axis = -1


class TicketParameter(Ticketed, nn.Module):
    """The ticket of a bare parameter: of one that its owner hands to `F.linear` or `F.conv*` itself.

    The owner keeps its class and reads the parameter by its old name; calling this module runs the operation of that name.
    """

    bias = None

    def __init__(self, parameter: Tensor, config: TicketConfig, *, name: str, fan_in: int, axis: int = -1):
        super().__init__()
        self._set_up(parameter, config, name, fan_in)
        self.channel_axis = axis

    def forward(self, x: Tensor, function: str = "linear", *args: Any, **kwargs: Any) -> Any:
        recorded = recorded_call(self, (x, function, *args), kwargs, self.frozen)
        if recorded is not None:
            return recorded
        return apply_weight(self, function, x, None, *args, **kwargs)


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
    """The ticket version of a layer class: `Ticket<Name>`, a `Ticketed` subclass of it, made once per class."""
    if layer_type in _STATIC and weight_name == "weight":
        return _STATIC[layer_type]
    key = (layer_type, weight_name)
    if key not in _DYNAMIC:
        body: dict[str, Any] = {"__module__": _DYNAMIC_MODULE, "__doc__": f"{layer_type.__name__} with a ticket's weights."}
        if weight_name != "weight":
            body |= {"_weight_name": weight_name, weight_name: Ticketed.weight}
        if issubclass(layer_type, nn.Linear):
            body["channel_axis"] = -1
        return _DYNAMIC.setdefault(key, type(f"Ticket{layer_type.__name__}", (Ticketed, layer_type), body))
    return _DYNAMIC[key]


def _notice_fused_step(optimizer: Any, *_: Any) -> None:
    """A fused optimizer changes the scores without raising their version, by which a layer knows its mask is stale."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version(group["params"])


register_optimizer_step_post_hook(_notice_fused_step)
