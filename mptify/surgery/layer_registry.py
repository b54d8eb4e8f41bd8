"""The layer registry: how modules hold their weights, and which modules are activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from mptify.config import TicketConfig
from mptify.errors import BadConfig, CannotConvert, shown
from mptify.nn.layers import ticket_class

__all__ = [
    "CompositeHandler", "Handler", "find", "find_composite", "fused_activation", "is_activation",
    "is_activation_function", "is_known", "register", "target_name",
]  # fmt: skip


@dataclass(frozen=True)
class Handler:
    """How a layer holds its weight.

    Attributes:
        weight: The name of its weight.
        bias: The name of its bias.
        inputs: How many input channels it has.
        outputs: How many output channels it has.
        axis: The dimension of the channels: 1 as in a conv, -1 as in a linear layer.
        fan_in: How many weights contribute to one output.
        kind: What plans and summaries call it.
        depthwise: Whether it is a depthwise conv.
        compute_weight: Computes the weight from the layer, where it is not simply the parameter.
        as_type: The class that the ticket layer inherits from, where it is not the layer's own.
        drop: Attributes that `compute_weight` makes superfluous.
        linear_in_weight: Whether scaling the weight scales the layer's output.
    """

    weight: str = "weight"
    bias: str = "bias"
    inputs: int = 0
    outputs: int = 0
    axis: int = 1
    fan_in: int = 0
    kind: str = ""
    depthwise: bool = False
    compute_weight: Callable[[nn.Module], Tensor] | None = None
    as_type: type | None = None
    drop: tuple[str, ...] = ()
    linear_in_weight: bool = False

    def convert(self, layer: nn.Module, config: TicketConfig, name: str) -> nn.Module:
        """The ticket layer that replaces `layer`."""
        cls = ticket_class(self.as_type or type(layer), self.weight)
        weight = self.compute_weight(layer).detach() if self.compute_weight else None
        ticket = cls.from_layer(
            layer,
            config,
            name=name,
            fan_in=self.fan_in,
            weight=weight,
            bias=self.bias,
            linear_in_weight=self.linear_in_weight,
        )
        ticket.channel_axis = self.axis
        for attribute in self.drop:
            for store in (ticket._parameters, ticket._buffers, ticket._modules, ticket.__dict__):
                store.pop(attribute, None)
        return ticket


@dataclass(frozen=True)
class CompositeHandler:
    """How a module holds several weights, which it multiplies with in its own `forward`.

    Its weights are converted together, or stay dense together.

    Attributes:
        weights: By the name of each weight parameter, the arguments of `forward` it is multiplied
            with. Where they are not the same value, each gets a quantizer of its own.
        outputs: How many channels its output has, along the last dimension.
        biases: The names of parameters that are biases of these weights.
        convert_: Turns a module into its ticket version, in place. It is called with the module,
            a `TicketParameter` for each weight, and input quantizers by the names of further
            arguments.
    """

    weights: Mapping[str, tuple[str, ...]]
    outputs: int
    convert_: Callable[[Any, dict[str, Any], dict[str, nn.Module]], None]
    biases: tuple[str, ...] = ()


Describe = Callable[[Any], Handler | CompositeHandler | None]
D = TypeVar("D", bound=Describe)
_REGISTERED: dict[type | str, Describe] = {}


def register(layer_type: type | str) -> Callable[[D], D]:
    """A decorator that registers the handler of a layer class.

    Args:
        layer_type: The class, or its dotted name if it should not be imported yet.

    Raises:
        BadConfig: It is neither.

    Example:
        @mptify.register(Dense)
        def describe(layer):
            return mptify.Handler(
                weight="kernel", inputs=layer.width_in, outputs=layer.width_out, axis=-1
            )
    """
    if not isinstance(layer_type, (type, str)):
        raise BadConfig(
            f"register: a layer class or its dotted name is needed, not {shown(layer_type)}."
        )

    def decorate(describe: D) -> D:
        if not callable(describe):
            raise BadConfig(
                "register: a function from a layer to its Handler is needed, not "
                f"{shown(describe)}."
            )
        _REGISTERED[layer_type] = describe
        return describe

    return decorate


def find(module: nn.Module) -> Handler | None:
    """The handler of a layer with one weight, or None for other modules."""
    found = _described(module)
    return found if isinstance(found, Handler) else None


def find_composite(module: nn.Module) -> CompositeHandler | None:
    """The handler of a module with several weights, or None for other modules."""
    found = _described(module)
    return found if isinstance(found, CompositeHandler) else None


def is_known(module: nn.Module) -> bool:
    """Whether the module has a handler of either kind, and so is a leaf of every trace."""
    return _described(module) is not None


def _described(module: nn.Module) -> Handler | CompositeHandler | None:
    for cls in type(module).__mro__:
        describe = _REGISTERED.get(cls) or _REGISTERED.get(f"{cls.__module__}.{cls.__qualname__}")
        if describe is not None:
            return describe(module)
    return None


def check_convertible(name: str, module: nn.Module) -> None:
    """Raise for layers whose weights are quantized to integers, or not initialized yet."""
    quantized = type(module).__module__.startswith(
        ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
    )
    if quantized and hasattr(module, "_packed_params"):
        raise CannotConvert(
            f"{name}: {type(module).__name__} holds integer weights; mptify converts the float "
            "model, so build it without quantize=True."
        )
    weight = module._parameters.get("weight")
    if isinstance(weight, nn.parameter.UninitializedParameter):
        raise CannotConvert(
            f"{name}: this lazy layer has no shape yet; run one batch through the model first."
        )
    if isinstance(weight, Tensor) and find(module) is not None and not weight.is_floating_point():
        raise CannotConvert(
            f"{name}: its weights are {weight.dtype}; mptify converts float weights only."
        )


@register(nn.modules.conv._ConvNd)
def _conv(layer: Any) -> Handler:
    reach = math.prod(layer.kernel_size)
    fan_in = layer.in_channels // layer.groups * reach
    if layer.transposed:  # with stride s, only every s-th tap contributes to an output
        fan_in = max(1, fan_in // math.prod(layer.stride))
    return Handler(
        inputs=layer.in_channels,
        outputs=layer.out_channels,
        axis=1,
        fan_in=fan_in,
        kind=_plain_name(layer),
        depthwise=layer.groups > 1 and layer.groups == layer.in_channels,
        linear_in_weight=True,
        **_parametrized(layer),
    )


@register(nn.Linear)
def _linear(layer: Any) -> Handler:
    return Handler(
        inputs=layer.in_features,
        outputs=layer.out_features,
        axis=-1,
        fan_in=layer.in_features,
        kind=_plain_name(layer),
        linear_in_weight=True,
        **_parametrized(layer),
    )


@register("timm.layers.std_conv.StdConv2d")
@register("timm.layers.std_conv.StdConv2dSame")
@register("timm.layers.std_conv.ScaledStdConv2d")
@register("timm.layers.std_conv.ScaledStdConv2dSame")
def _standardized_conv(layer: Any) -> Handler:
    """The standardized weight becomes the weight itself, since a ticket's weights are binary."""
    from timm.layers import Conv2dSame

    same = getattr(layer, "same_pad", False)
    plain = _conv(layer)
    assert plain is not None
    as_type = Conv2dSame if same else nn.Conv2d
    return replace(plain, compute_weight=_standardized, as_type=as_type, drop=("gain", "scale"))


def _standardized(layer: Any) -> Tensor:
    flat = layer.weight.reshape(1, layer.out_channels, -1)
    scale = (layer.gain * layer.scale).view(-1) if hasattr(layer, "gain") else None
    return F.batch_norm(
        flat, None, None, weight=scale, training=True, momentum=0.0, eps=layer.eps
    ).reshape_as(layer.weight)


@register("timm.layers.cond_conv2d.CondConv2d")
def _mixed_conv(layer: Any) -> Handler:
    """Weights of several convs, one per row, which each sample mixes; the ticket covers all."""
    return Handler(
        inputs=layer.in_channels,
        outputs=layer.out_channels,
        axis=1,
        fan_in=layer.in_channels // layer.groups * math.prod(layer.kernel_size),
        kind=_plain_name(layer),
        depthwise=layer.groups > 1 and layer.groups == layer.in_channels,
    )


def _parametrized(layer: nn.Module) -> dict[str, Any]:
    if not parametrize.is_parametrized(layer, "weight"):
        return {}
    return {
        "compute_weight": lambda one: one.weight,
        "as_type": type(layer).__mro__[1],
        "drop": ("parametrizations",),
    }


def _plain_name(layer: nn.Module) -> str:
    return type(layer).__name__.removeprefix("Parametrized")


# -- activations -----------------------------------------------------------------------------------

_ACTIVATIONS = {
    "relu", "relu6", "leakyrelu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "gelutanh",
    "quickgelu", "silu", "swish", "hardswish", "mish", "hardmish", "tanh", "hardtanh", "starrelu",
    "squaredrelu", "softsign", "tanhshrink", "newgelu",
}  # fmt: skip


def is_activation(module: nn.Module) -> bool:
    """Whether a module is a ReLU-like nonlinearity; gates (sigmoid, softmax) are not."""
    return _squeezed(type(module).__name__.removesuffix("Me")) in _ACTIVATIONS


def is_activation_function(target: Any) -> bool:
    """Whether a function, or a tensor method of this name, is a ReLU-like nonlinearity."""
    return _squeezed(target_name(target).removesuffix("_me")) in _ACTIVATIONS


def target_name(target: Any) -> str:
    """The name of what a graph node calls: a method, a module or a function."""
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _squeezed(name: str) -> str:
    return name.replace("_", "").lower()


def fused_activation(module: nn.Module) -> list[nn.Module] | None:
    """The modules that a norm of timm's norm_act family runs after it, if any activates."""
    if type(module).__module__ != "timm.layers.norm_act":
        return None
    act = getattr(module, "act", None)
    if not isinstance(act, nn.Module) or isinstance(act, nn.Identity):
        return None
    drop = getattr(module, "drop", None)
    return [part for part in (drop, act) if part is not None and not isinstance(part, nn.Identity)]


def without_activation(module: nn.Module) -> nn.Module:
    """Turn off the activation of a norm, in place; return the norm."""
    module.act = torch.nn.Identity()
    module.drop = torch.nn.Identity()
    return module
