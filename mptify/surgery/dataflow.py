"""Dataflow analysis: where each value of a traced graph has its channels, and what it holds.

One forward pass over the graph, with one rule per kind of operation. The rules are conservative:
where a value is unknown, the plan inserts a norm that may not be needed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from mptify.nn.quantizing_weight import CONTRACTIONS
from mptify.surgery import layer_registry

__all__ = ["ValueInfo", "analyze", "argument", "node_kind"]


@dataclass(frozen=True)
class ValueInfo:
    """What is known about a value.

    Attributes:
        channels: How many channels it has, if known.
        axis: The dimension of its channels, 1 or -1 as a rule; None if unknown.
        normalised: Whether it comes from a BatchNorm, or is a sum of such values and of quantized
            ones. A sum of quantized values alone is not: where |x| = 1, the gradient of the sign
            is 0, and a second sign would block every gradient.
        quantized: Whether it holds the levels of a quantizer only, as ±1.
        pixels: Whether it is computed from the network's input without any layer.
        pooled: Whether it is pooled over all positions.
        summed: Whether it is the sum of two values, up to operations that change no value.
    """

    channels: int | None = None
    axis: int | None = None
    normalised: bool = False
    quantized: bool = False
    pixels: bool = False
    pooled: bool = False
    summed: bool = False


UNKNOWN = ValueInfo()

_SAME = {
    "identity",
    "contiguous",
    "clone",
    "detach",
    "to",
    "type_as",
    "float",
    "half",
    "bfloat16",
    "requires_grad_",
    "dropout0",
}
_SHAPING = {
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "swapaxes", "swapdims",
    "squeeze", "unsqueeze", "expand", "expand_as", "repeat", "repeat_interleave", "roll", "flip",
    "movedim", "moveaxis", "chunk", "split", "unbind", "tensor_split", "getitem", "narrow",
    "select", "index_select", "gather", "t", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    "rearrange", "window_partition", "window_reverse", "tile", "rot90", "blockify", "deblockify",
    "window_partition_nchw", "window_reverse_nchw", "grid_partition", "grid_reverse",
    "grid_partition_nchw", "grid_reverse_nchw",
}  # fmt: skip
_ADDS = {"add", "iadd", "add_", "radd", "sub", "isub", "sub_", "rsub"}
_POOLS = {"max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"}
_GLOBAL_POOLS = {
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d",
    "mean", "amax", "global_pool_nlc", "global_pool",
}  # fmt: skip
_ELEMENTWISE = {
    "mul", "imul", "mul_", "div", "truediv", "sigmoid", "hardsigmoid", "softmax", "exp", "neg",
    "pow", "abs", "sqrt", "dropout", "clamp", "rsqrt", "softplus",
}  # fmt: skip


def node_kind(node: fx.Node, module: nn.Module | None) -> str:
    """What a node does: `layer`, `activation`, `batchnorm`, `maxpool`, ... or a function's name."""
    if node.op == "call_module":
        assert module is not None
        return _module_kind(module)
    if node.op in ("call_function", "call_method"):
        if layer_registry.is_activation_function(node.target):
            return "activation"
        name = _name_of(node)
        if name == "dropout" and _probability(node) == 0:
            return "dropout0"
        return name
    return node.op


def _name_of(node: fx.Node) -> str:
    name = layer_registry.target_name(node.target)
    return "getitem" if name == "__getitem__" else name.rstrip("_")


def _module_kind(module: nn.Module) -> str:
    if layer_registry.find(module) is not None:
        return "layer"
    if layer_registry.find_composite(module) is not None:
        return "composite"
    if layer_registry.is_activation(module):
        return "activation"
    if isinstance(module, nn.modules.batchnorm._BatchNorm) or type(module).__name__.startswith(
        "FrozenBatchNorm"
    ):
        return "batchnorm"
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm)) or type(module).__name__.lower().startswith(
        ("layernorm", "rmsnorm", "groupnorm")
    ):
        return "norm"
    if isinstance(module, nn.Identity):
        return "identity"
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return "identity" if module.p == 0 else "dropout"
    if type(module).__name__ in ("DropPath", "StochasticDepth", "DropBlock2d", "PatchDropout"):
        probability = getattr(
            module, "drop_prob", getattr(module, "p", getattr(module, "prob", 1.0))
        )
        return "identity" if not probability else "dropout"
    if isinstance(module, nn.modules.pooling._MaxPoolNd):
        return "maxpool"
    if isinstance(module, nn.modules.pooling._AvgPoolNd):
        return "avgpool"
    if isinstance(
        module, (nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd)
    ):
        return "globalpool" if _to_one_value(module.output_size) else "avgpool"
    if isinstance(module, nn.Flatten):
        return "flatten"
    if isinstance(module, (nn.PixelShuffle, nn.ChannelShuffle, nn.PixelUnshuffle)):
        return "pixel_shuffle"
    if isinstance(module, nn.Upsample):
        return "upsample_nearest" if module.mode == "nearest" else "upsample"
    return type(module).__name__.lower()


def _to_one_value(size: Any) -> bool:
    return all(one == 1 for one in (size if isinstance(size, (tuple, list)) else (size,)))


def _probability(node: fx.Node) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)


def analyze(
    graph: fx.Graph,
    root: nn.Module,
    pixels: bool,
    quantized: bool,
    passing: Collection[fx.Node] = (),
) -> dict[fx.Node, ValueInfo]:
    """What is known about the value of each node.

    Args:
        graph: The traced graph.
        root: The module that the graph calls into.
        pixels: Whether the graph's required inputs are images.
        quantized: Whether quantizers replace activations.
        passing: Activations that return their input unchanged.
    """
    infos: dict[fx.Node, ValueInfo] = {}
    for node in graph.nodes:
        module = root.get_submodule(node.target) if node.op == "call_module" else None
        if node.op == "placeholder":
            infos[node] = ValueInfo(pixels=pixels and not node.args)
        else:
            joins = node_kind(node, module) in ("cat", "concat", "stack")
            inputs = [
                infos[one]
                for one in node.all_input_nodes
                if joins or one.op != "get_attr" or len(node.all_input_nodes) == 1
            ]
            passes = node in passing and inputs
            if passes:
                infos[node] = inputs[0]
            elif node.op == "call_function" and node.target in CONTRACTIONS:
                infos[node] = _after_functional(node, root)
            else:
                infos[node] = _rule(node, module, node_kind(node, module), inputs, quantized)
    return infos


def _rule(
    node: fx.Node, module: Any, kind: str, inputs: list[ValueInfo], quantized: bool
) -> ValueInfo:
    first = inputs[0] if inputs else UNKNOWN
    if kind == "layer":
        handler = layer_registry.find(module)
        assert handler is not None
        return ValueInfo(handler.outputs or None, handler.axis)
    if kind == "composite":
        composite = layer_registry.find_composite(module)
        assert composite is not None
        return ValueInfo(composite.outputs, -1)
    if kind == "activation":
        if not quantized:
            return replace(first, normalised=False, quantized=False, summed=False, pixels=False)
        return ValueInfo(first.channels, first.axis, quantized=True, pooled=first.pooled)
    if kind == "batchnorm":
        return ValueInfo(
            getattr(module, "num_features", first.channels),
            1,
            normalised=True,
            pixels=first.pixels,
            pooled=first.pooled,
        )
    if kind == "norm":
        return _after_norm(module, first)
    if kind in _SAME:
        return first
    if kind in ("maxpool", "upsample_nearest") or (kind in _POOLS and kind.startswith("max")):
        return replace(first, summed=False)
    if kind in ("avgpool", "upsample", "interpolate") or kind in _POOLS:
        return replace(first, quantized=False, summed=False)
    if kind in ("mean", "amax"):
        return _after_mean(node, first)
    if kind.startswith("adaptive_") and not _to_one_value(argument(node, 1, "output_size")):
        return replace(first, quantized=False, summed=False)
    if (
        kind == "globalpool"
        or kind in _GLOBAL_POOLS
        or "adaptivepool" in kind
        or "attentionpool" in kind
    ):
        axis = first.axis if kind == "globalpool" or kind.startswith("adaptive_") else -1
        return replace(first, axis=axis, quantized=False, pooled=True, summed=False)
    if kind in _ADDS:
        return _after_add(inputs)
    if kind in ("cat", "concat", "stack"):
        return _after_cat(node, inputs)
    if kind in _SHAPING:
        return _after_shaping(node, kind, first)
    if kind in _ELEMENTWISE:
        known = next((info for info in inputs if info.axis is not None), first)
        return ValueInfo(
            known.channels,
            known.axis,
            pixels=all(f.pixels for f in inputs) and bool(inputs),
            pooled=bool(inputs) and all(f.pooled for f in inputs),
        )
    if kind == "pad":
        return replace(first, quantized=False, normalised=first.normalised, summed=False)
    if (
        inputs
        and all(info.pixels for info in inputs)
        and not (module is not None and any(True for _ in module.parameters()))
    ):
        return ValueInfo(pixels=True)
    return ValueInfo(pooled=first.pooled)


def _after_functional(node: fx.Node, root: nn.Module) -> ValueInfo:
    """After `F.linear` or `F.conv*` on a parameter, whose first dimension counts the outputs."""
    axis = -1 if node.target is F.linear else 1
    weight = argument(node, 1, "weight")
    if (
        not isinstance(weight, fx.Node)
        or weight.op != "get_attr"
        or "transpose" in layer_registry.target_name(node.target)
    ):
        return ValueInfo(axis=axis)
    owner, _, name = str(weight.target).rpartition(".")
    return ValueInfo(getattr(root.get_submodule(owner), name).shape[0], axis)


def argument(node: fx.Node, position: int, name: str) -> Any:
    """An argument of a call, passed by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _after_norm(module: Any, first: ValueInfo) -> ValueInfo:
    name = type(module).__name__
    shape = getattr(module, "normalized_shape", None)
    if name.endswith("2d") or isinstance(module, nn.GroupNorm):
        channels = shape[-1] if shape else getattr(module, "num_channels", first.channels)
        return ValueInfo(channels, 1, pooled=first.pooled)
    if shape is not None:
        return ValueInfo(
            tuple(shape)[-1] if not isinstance(shape, int) else shape, -1, pooled=first.pooled
        )
    return ValueInfo(first.channels, first.axis, pooled=first.pooled)


def _after_mean(node: fx.Node, first: ValueInfo) -> ValueInfo:
    """After a mean, which pools; the new axis depends on the dimensions and on `keepdim`."""
    dim, keep = argument(node, 1, "dim"), argument(node, 2, "keepdim")
    dims = (
        {dim}
        if isinstance(dim, int)
        else set(dim)
        if isinstance(dim, (tuple, list))
        else {first.axis}
    )
    pooled = replace(first, quantized=False, pooled=True, summed=False)
    if first.axis in dims:
        return replace(pooled, channels=None, axis=None)
    if keep:
        return pooled
    left_alone = dims <= {2, 3, 4, -1, -2} if first.axis == 1 else dims <= {1, 2, 3}
    return (
        replace(pooled, axis=-1)
        if left_alone and first.axis in (1, -1)
        else replace(pooled, channels=None, axis=None)
    )


def _after_add(inputs: list[ValueInfo]) -> ValueInfo:
    if len(inputs) < 2:  # the other operand is a constant or a parameter
        first = inputs[0] if inputs else UNKNOWN
        return ValueInfo(first.channels, first.axis, pixels=first.pixels, pooled=first.pooled)
    known = next((info for info in inputs if info.channels is not None), inputs[0])
    return ValueInfo(
        known.channels,
        known.axis,
        normalised=all(info.normalised or info.quantized for info in inputs)
        and any(info.normalised for info in inputs),
        pixels=all(info.pixels for info in inputs),
        pooled=all(info.pooled for info in inputs),
        summed=True,
    )


def _after_cat(node: fx.Node, inputs: list[ValueInfo]) -> ValueInfo:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
    axes = {info.axis for info in inputs}
    # `inputs` holds a value once, also if it is concatenated with itself.
    joined = node.args[0] if node.args else None
    is_complete = isinstance(joined, (tuple, list)) and len(inputs) == len(joined)
    axis = axes.pop() if len(axes) == 1 and is_complete else None
    channels = None
    if axis is not None and all(info.channels is not None for info in inputs) and dim == axis:
        channels = sum(info.channels or 0 for info in inputs)
    return ValueInfo(
        channels,
        axis if channels is not None else None,
        normalised=bool(inputs) and all(info.normalised for info in inputs),
        quantized=bool(inputs) and all(info.quantized for info in inputs),
        pixels=bool(inputs) and all(info.pixels for info in inputs),
        pooled=bool(inputs) and all(info.pooled for info in inputs),
    )


def _after_shaping(node: fx.Node, kind: str, first: ValueInfo) -> ValueInfo:
    moved = replace(first, channels=None, axis=None)
    dims = _integers(node.args[1:])
    if kind == "permute" and dims is not None and first.axis is not None:
        position = dims.index(first.axis % len(dims)) if first.axis % len(dims) in dims else None
        if position is not None:
            return replace(first, axis=-1 if position == len(dims) - 1 else position)
    if kind == "transpose" and dims in ([1, 2], [2, 1]) and first.axis in (1, -1):
        return replace(first, axis=-1 if first.axis == 1 else 1)
    if kind == "flatten":
        start = (
            node.args[1]
            if len(node.args) > 1
            else node.kwargs.get("start_dim", 1 if node.op == "call_module" else 0)
        )
        if start == 2 and first.axis == 1:
            return first
        if first.pooled and first.channels is not None:
            return replace(first, axis=-1)
    if kind == "chunk" and first.channels is not None:
        pieces, dim = argument(node, 1, "chunks"), argument(node, 2, "dim")
        if dim == first.axis and isinstance(pieces, int) and first.channels % pieces == 0:
            return replace(first, channels=first.channels // pieces)
    if kind == "getitem":
        return _after_getitem(node, first, moved)
    if kind in ("squeeze", "view", "reshape") and first.pooled:
        return replace(first, axis=-1)
    if kind in ("roll", "flip", "contiguous"):
        return first
    return moved


def _after_getitem(node: fx.Node, first: ValueInfo, moved: ValueInfo) -> ValueInfo:
    index = node.args[1]
    if isinstance(index, int) and _name_of(node.all_input_nodes[0]) == "chunk":
        return first
    if (
        isinstance(index, tuple)
        and len(index) == 2
        and index[0] == slice(None)
        and isinstance(index[1], int)
    ):
        is_token = first.axis == -1  # one of each sample
        return replace(first if is_token else moved, pooled=True)
    return moved


def _integers(args: tuple) -> list[int] | None:
    flat = list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else list(args)
    return flat if flat and all(isinstance(one, int) for one in flat) else None
