"""The invariants of every ticket model, checked from the outside.

- I1: With few-bit activations, the input of every ticket layer that is not exempt holds only its
  quantizer's levels.
- I2: Every quantizer that replaced an activation is fed by a batch-normalised value.
- I3: The null surgery (`bits="32/32", prune=0, init="keep", bias="learn"`) is the identity, in
  `eval()` and in `train()`.
- I4: Only what the config names requires grad, and one backward pass gives the scores of every
  layer a finite, non-zero gradient.
- I5: Every conv and linear weight is converted, or listed with a reason.
- I6: `deepcopy`, `state_dict`, `torch.compile`, `torch.export`, autocast, channels_last and DDP
  work on the result; so do the attributes that a training script reads from a timm model.

I3 and I6 are checked by the tests and by `mptify zoo`. The checks here do not use the plan's
decisions: they analyze graphs and observe forward passes themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mptify.nn.layers import Ticketed
from mptify.nn.norms import ChannelBatchNorm, ScalarBatchNorm, TokenBatchNorm
from mptify.nn.quantizers import InputQuantizer, Quantizer, RunningQuantizer
from mptify.nn.quantizing_weight import CONTRACTIONS, PRODUCTS, QuantizingWeight
from mptify.surgery import ticket_layers
from mptify.surgery.graphs import TicketGraph
from mptify.surgery.layer_registry import target_name
from mptify.surgery.plans import plan_of
from mptify.surgery.trainable import parameter_kinds

__all__ = [
    "bad_gradients",
    "lost_layers",
    "real_inputs",
    "unnormalised_quantizers",
    "watch_inputs",
    "wrongly_trainable",
]

_TRANSPARENT_MODULES = (
    nn.Identity, nn.modules.dropout._DropoutNd, nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd, nn.Flatten, nn.Upsample, nn.PixelShuffle,
    nn.ChannelShuffle,
)  # fmt: skip


def unnormalised_quantizers(model: nn.Module) -> list[str]:
    """I2: the quantizers of at most 4 bits that are not fed by a batch-normalised value."""
    bad = []
    in_graphs: set[int] = set()
    for path, part in model.named_modules():
        if isinstance(part, TicketGraph):
            for graph in part._graphs.values():
                for node in graph.nodes:
                    module = part.get_submodule(node.target) if node.op == "call_module" else None
                    if isinstance(module, Quantizer):
                        in_graphs.add(id(module))
                        if not _normalised(node.all_input_nodes[0], part):
                            bad.append(f"{path}.{node.target}".lstrip("."))
        if isinstance(part, InputQuantizer):
            norm, quantizer = part
            in_graphs.add(id(quantizer))
            if not _is_batchnorm(norm):
                bad.append(path)
    bad += [
        path
        for path, part in model.named_modules()
        if isinstance(part, Quantizer) and id(part) not in in_graphs
    ]
    return bad


def _is_batchnorm(module: Any) -> bool:
    known = (nn.modules.batchnorm._BatchNorm, ChannelBatchNorm, TokenBatchNorm, ScalarBatchNorm)
    return isinstance(module, known) or type(module).__name__.startswith("FrozenBatchNorm")


def _normalised(node: fx.Node, root: nn.Module) -> bool:
    """Whether `node` combines BatchNorms and quantizers only, with at least one BatchNorm."""
    ends = _ends_above(node, root)
    return "other" not in ends and "batchnorm" in ends


def _ends_above(node: fx.Node, root: nn.Module) -> set[str]:
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if _is_batchnorm(module):
            return {"batchnorm"}
        if isinstance(module, Quantizer):
            return {"quantizer"}
        stochastic = type(module).__name__ in ("DropPath", "StochasticDepth", "DropBlock2d")
        if (
            not isinstance(module, _TRANSPARENT_MODULES)
            and not stochastic
            and "Pool" not in type(module).__name__
        ):
            return {"other"}
    elif node.op not in ("call_function", "call_method") or _name(node) not in _KEEPING:
        return {"other"}
    inputs = [one for one in node.all_input_nodes if _is_value(one)]
    return set().union(*(_ends_above(one, root) for one in inputs)) if inputs else {"other"}


def _is_value(node: fx.Node) -> bool:
    """Whether a node is a tensor of activations rather than a size or another number."""
    return not (
        _name(node) in ("size", "shape", "floordiv", "getattr", "mul", "sub", "dim", "len")
        or _of_shape(node)
    )


def _of_shape(node: fx.Node) -> bool:
    return (
        _name(node) == "getitem"
        and bool(node.all_input_nodes)
        and _name(node.all_input_nodes[0]) in ("size", "getattr")
    )


_KEEPING = {
    "add", "iadd", "sub", "cat", "concat", "stack", "view", "reshape", "flatten", "unflatten",
    "permute", "transpose", "squeeze", "unsqueeze", "expand", "contiguous", "clone", "chunk",
    "split", "unbind", "getitem", "roll", "mean", "dropout", "pad", "interpolate", "max_pool1d",
    "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d",
    "adaptive_avg_pool1d", "adaptive_avg_pool3d", "repeat", "flip", "select", "to", "tensor_split",
    "narrow", "window_partition", "window_reverse", "amax", "adaptive_max_pool2d", "unfold",
    "movedim", "channel_shuffle", "index_select", "t", "pixel_shuffle", "pixel_unshuffle",
    "repeat_interleave", "swapaxes", "expand_as", "type_as", "float",
}  # fmt: skip


def _name(node: fx.Node) -> str:
    return target_name(node.target).rstrip("_")


@contextmanager
def watch_inputs(model: nn.Module, report: Callable[[Any, bool], None]) -> Iterator[None]:
    """Call `report(layer, quantized)` for each operation that runs with a ticket's weight.

    The operation itself is watched, so that none is missed. A weight that enters another product
    first, as that of timm's CondConv2d does, is reported with the layer's quantized input.
    """
    operands: dict[int, tuple[Any, Tensor]] = {}
    was_quantized: dict[int, bool] = {}
    layers = [part for part in model.modules() if isinstance(part, Ticketed)]

    def operand(layer: Any) -> Tensor:
        weight = type(layer).operand(layer)
        operands[id(weight)] = (layer, weight)  # held, so that no other tensor can get this id
        return weight

    def quantize_input(layer: Any, x: Tensor, *quantizer: Any) -> Tensor:
        x = type(layer).quantize_input(layer, x, *quantizer)
        was_quantized[id(layer)] = _holds_levels(x.detach(), layer)
        return x

    class InputObserver(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if function in CONTRACTIONS:
                weight = args[1] if len(args) > 1 else kwargs.get("weight")
                if isinstance(weight, QuantizingWeight):
                    with self:  # it calls the operation again, on a tensor
                        return weight.__torch_function__(function, types, args, kwargs)
                if id(weight) in operands:
                    layer = operands[id(weight)][0]
                    value = (args[0] if args else kwargs["input"]).detach()
                    padded = was_quantized.pop(id(layer), False)
                    axis = -1 if function is F.linear else 1
                    report(layer, _holds_levels(value, layer, axis, padded))
            elif target_name(function).strip("_") in PRODUCTS:
                for weight in args:
                    layer = operands[id(weight)][0] if id(weight) in operands else None
                    if id(layer) in was_quantized:
                        report(layer, was_quantized[id(layer)])
            elif function is F.multi_head_attention_forward:  # only for 32-bit activations
                for layer, weight in list(operands.values()):
                    if any(weight is value for value in (*args, *kwargs.values())):
                        report(layer, False)
            return function(*args, **kwargs)

    try:
        for layer in layers:
            observed: Any = layer
            observed.operand = partial(operand, layer)
            observed.quantize_input = partial(quantize_input, layer)
        with InputObserver():
            yield
    finally:
        for layer in layers:
            vars(layer).pop("operand", None)
            vars(layer).pop("quantize_input", None)


def _holds_levels(x: Tensor, layer: Any, axis: int | None = None, padded: bool = False) -> bool:
    """Whether a value holds the levels of one quantizer, or of one per channel.

    Args:
        x: The value.
        layer: The ticket layer that reads it.
        axis: The dimension of its channels, if there is one.
        padded: Whether ±1 may be padded with zeros, as by timm's Conv2dSame behind its quantizer.
    """
    bits = layer.activation_bits
    if bits == 32:
        return False
    if bits == 1:
        return bool(((x.abs() == 1) | ((x == 0) & padded)).all())
    if isinstance(layer.input_quantizer, RunningQuantizer) and layer.scales_output:
        return bool(((x == x.round()) & (x >= -127) & (x <= 255)).all())
    if x.unique().numel() <= 2**bits:
        return True
    if axis is None:
        return False
    channels = x.movedim(axis, 0).flatten(1)  # several quantizers may have been concatenated
    ordered = channels.sort(dim=1).values
    return bool(((ordered.diff(dim=1) != 0).sum(1) < 2**bits).all())


def real_inputs(model: nn.Module, run: Callable[[], Any]) -> tuple[set[str], set[str]]:
    """I1: which ticket layers ran in `run()`, and which saw other inputs than levels."""
    ran: set[str] = set()
    real: set[str] = set()

    def look(layer: Any, quantized: bool) -> None:
        ran.add(layer.ticket_name)
        if not quantized:
            real.add(layer.ticket_name)

    with watch_inputs(model, look):
        run()
    return ran, real


def lost_layers(model: nn.Module) -> list[str]:
    """I5: planned layers that are missing."""
    return sorted({layer.name for layer in plan_of(model).layers} - set(ticket_layers(model)))


def wrongly_trainable(model: nn.Module) -> list[str]:
    """I4, first half: parameters that require grad contrary to the config, or wrongly do not."""
    plan = plan_of(model)
    config = plan.config
    wanted = {
        "scores": True,
        "frozen": False,
        "norm": config.learn_bn,
        "bias": config.bias == "learn",
        "clip": True,
        "other": config.other == "learn",
        "dense": True,
    }
    kinds = parameter_kinds(model)
    held = {name for name in plan.held if kinds.get(name) in ("other", "dense")}
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad != (wanted[kinds[name]] and name not in held)
    ]


def bad_gradients(model: nn.Module) -> dict[str, str]:
    """I4, second half: layers whose scores have a zero, infinite or missing gradient."""
    bad = {}
    for name, module in model.named_modules():
        if isinstance(module, Ticketed):
            grad = module.scores.grad
            if grad is None:
                bad[name] = "none"
            else:
                largest = float(grad.abs().max())  # NaN if any is
                if not math.isfinite(largest):
                    bad[name] = "not finite"
                elif largest == 0:
                    bad[name] = "zero"
    return bad
