"""From a ticket model to a packed program: the same graph, with binary layers on bit planes and the rest as it was."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from mptify.errors import MptifyError
from mptify.layers import TicketConv2d, Ticketed, TicketLinear
from mptify.norms import ChannelBatchNorm, Sign, TokenBatchNorm
from mptify.runtime.bitsliced import BitslicedConv, Geometry, fits
from mptify.runtime.library import library
from mptify.runtime.linear import PopcountLinear
from mptify.runtime.pixels import PixelConv
from mptify.runtime.planes import LAYOUTS, Planes, pack_as, pool, unpack
from mptify.runtime.thresholds import find_real_thresholds, find_thresholds

__all__ = ["pack"]

_THROUGH = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d)  # what hands its input on in eval()
_NORMS = {"channels": (nn.BatchNorm2d, ChannelBatchNorm), "tokens": (TokenBatchNorm,)}
_ADD = (operator.add, operator.iadd, torch.add)


def pack(model: nn.Module, example: Tensor) -> nn.Module:
    """A packed program of a 1/1 ticket model on a CPU: takes and returns ordinary tensors, for inference only.

    `example` is an input of the size that it will be used with; other sizes work too. Where mptify was installed without a C++
    compiler, the model itself is returned, with a warning.
    """
    if model.training:
        raise MptifyError("A packed program is made from a model in eval(); call model.eval() first.")
    if not any(isinstance(module, Ticketed) and module.gain_outside for module in model.modules()):
        raise MptifyError("Packed programs are for 1/1 tickets: what 1/32 tickets gain is size, not speed.")
    if not isinstance(model, fx.GraphModule):
        raise MptifyError("Of this network only parts have a graph (detectors are such); packing needs one of the whole.")
    if any(tensor.device.type != "cpu" for tensor in (*model.parameters(), *model.buffers(), example)):
        raise MptifyError("Packed programs run on CPUs; call model.cpu() first.")
    if library is None:
        warnings.warn("mptify was installed without a C++ compiler: this model runs as a float32 network.", stacklevel=2)
        return model
    with torch.no_grad():
        ShapeProp(model).propagate(example[:1])
        return _Compiler(model).run()


@dataclass
class _Tail:
    """What stands between a layer and the sign behind it."""

    sign: fx.Node
    steps: list[Any] = field(default_factory=list)
    shortcut: fx.Node | None = None
    before: int = 0  # steps in front of the shortcut's addition
    pool: nn.MaxPool2d | None = None
    nodes: set[fx.Node] = field(default_factory=set)

    def behind(self, layer: Any, layout: str) -> Callable[[Tensor, float], Tensor]:
        """The float path from the layer's sums (1 × filters × 1 × n) to signs."""

        def run(sums: Tensor, shortcut: float) -> Tensor:
            y = layer.finish(sums[:, :, 0].transpose(1, 2).contiguous() if layout == "tokens" else sums, layer.gain)
            for step in self.steps[: self.before]:
                y = step(y)
            if self.shortcut is not None:
                y = y + shortcut
            for step in self.steps[self.before :]:
                y = step(y)
            y = torch.where(y >= 0, 1.0, -1.0)
            return y.transpose(1, 2)[:, :, None] if layout == "tokens" else y

        return run


class _Compiler:
    def __init__(self, model: fx.GraphModule):
        self.model = model
        self.modules = dict(model.named_modules())
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.floats: dict[fx.Node, fx.Node] = {}
        self.planes: dict[tuple[fx.Node, str], fx.Node] = {}
        self.before_sign: dict[fx.Node, fx.Node] = {}  # of signs that are not taken yet: what to take them of
        self.absorbed: set[fx.Node] = set()

    def run(self) -> fx.GraphModule:
        for node in self.model.graph.nodes:
            if node not in self.absorbed:
                self.convert(node)
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, f"Packed{type(self.model).__name__}").eval()

    def convert(self, node: fx.Node) -> None:
        module = self.module_of(node)
        source: Any = node.args[0] if module is not None and node.args else None
        if isinstance(module, Sign):
            self.before_sign[node] = self.float_of(source)
        elif isinstance(module, _THROUGH) and self.is_binary(source):
            self.hand_on(source, node)
        elif _is_plain_pool(module) and self.is_binary(source):
            self.planes[node, "channels"] = self.call(node, _Pool(module, None), self.planes_of(source, "channels"))
        elif not (type(module) in (TicketConv2d, TicketLinear) and self.pack_layer(node, module, source)):
            if node.op in ("call_module", "get_attr"):
                _put(self.root, str(node.target), operator.attrgetter(str(node.target))(self.model))
            self.floats[node] = self.graph.node_copy(node, self.float_of)

    # -- layers ----------------------------------------------------------------------------------------------------------------

    def pack_layer(self, node: fx.Node, layer: Any, source: Any) -> bool:
        """Whether a kernel could be found for this layer."""
        if not layer.gain_outside or layer.before is not None or layer.weight.dtype != torch.float32:
            return False
        weight = layer.weight.detach().to(torch.int8)
        if type(layer) is TicketLinear and self.is_binary(source) and len(_shape(source)) == 2:
            self.finish(node, layer, PopcountLinear(weight), self.planes_of(source, "vectors"))
            return True
        if type(layer) is TicketLinear:
            layout, weight = "tokens", weight[:, :, None, None]
            geometry = Geometry(layer.in_features, (1, _shape(source)[1:-1].numel()), (1, 1))
        elif layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return False
        else:
            layout, size = "channels", _shape(source)[2:]
            geometry = Geometry(layer.in_channels, (size[0], size[1]), layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        tail = self.tail_of(node, layout)
        if self.is_binary(source):
            return self.pack_binary(node, layer, weight, source, tail, geometry, layout)
        if layout == "tokens" or tail is None or tail.shortcut is not None:
            return False
        real = find_real_thresholds(tail.behind(layer, layout), len(weight))
        self.end(node, tail, layout, self.call(node, PixelConv(weight, real, geometry), self.float_of(source)), real.falling)
        return True

    def pack_binary(
        self, node: fx.Node, layer: Any, weight: Tensor, source: fx.Node, tail: _Tail | None, geometry: Geometry, layout: str
    ) -> bool:
        kept = int((weight != 0).flatten(1).sum(1).max())
        if not fits(geometry, kept):
            return False
        inputs = [self.planes_of(source, layout)]
        found = find_thresholds(tail.behind(layer, layout), len(weight), kept, tail.shortcut is not None) if tail else None
        if tail is None or found is None:
            self.finish(node, layer, BitslicedConv(weight, None, geometry), *inputs)
            return True
        weight[found.falling] *= -1
        if tail.shortcut is not None:
            inputs.append(self.planes_of(tail.shortcut, layout))
        self.end(node, tail, layout, self.call(node, BitslicedConv(weight, found.least, geometry), *inputs), found.falling)
        return True

    def end(self, node: fx.Node, tail: _Tail, layout: str, value: fx.Node, falling: Tensor) -> None:
        if tail.pool is not None:
            value = self.call(node, _Pool(tail.pool, falling), value, name="pool")
        self.planes[tail.sign, layout] = value
        self.absorbed |= tail.nodes

    def finish(self, node: fx.Node, layer: Any, module: nn.Module, *inputs: fx.Node) -> None:
        """The layer's output as numbers."""
        self.floats[node] = self.call(node, _Finish(layer), self.call(node, module, *inputs), name="finish")

    def tail_of(self, node: fx.Node, layout: str) -> _Tail | None:
        tail = _Tail(node)
        while len(node.users) == 1:
            node, last = next(iter(node.users)), node
            tail.nodes.add(node)
            module = self.module_of(node)
            if isinstance(module, Sign):
                tail.sign = node
                return tail
            if _is_plain_pool(module) and not tail.steps and tail.shortcut is None and tail.pool is None:
                tail.pool = module
            elif isinstance(module, (*_THROUGH, *_NORMS[layout])):
                tail.steps.append(module)
                tail.before += tail.shortcut is None
            elif node.op == "call_function" and node.target in _ADD and tail.shortcut is None and tail.pool is None and not node.kwargs:
                others: list[Any] = [one for one in node.args if one is not last]
                if len(others) != 1 or not self.is_binary(others[0]) or _shape(others[0]) != _shape(node):
                    return None
                tail.shortcut = others[0]
            else:
                return None
        return None

    # -- values --------------------------------------------------------------------------------------------------------------------

    def module_of(self, node: fx.Node) -> Any:
        return self.modules.get(str(node.target)) if node.op == "call_module" else None

    def is_binary(self, node: Any) -> bool:
        return node in self.before_sign or any((node, layout) in self.planes for layout in LAYOUTS)

    def hand_on(self, source: fx.Node, node: fx.Node) -> None:
        if source in self.before_sign:
            self.before_sign[node] = self.before_sign[source]
        for layout in LAYOUTS:
            if (source, layout) in self.planes:
                self.planes[node, layout] = self.planes[source, layout]

    def planes_of(self, node: fx.Node, layout: str) -> fx.Node:
        if (node, layout) not in self.planes:
            numbers = self.before_sign[node] if node in self.before_sign else self.float_of(node)
            self.planes[node, layout] = self.call(node, _Pack(layout), numbers, name=layout)
        return self.planes[node, layout]

    def float_of(self, node: Any) -> Any:
        if node not in self.floats and node in self.before_sign:
            self.floats[node] = self.call(node, Sign(), self.before_sign[node], name="sign")
        elif node not in self.floats:
            planes = next(self.planes[node, layout] for layout in LAYOUTS if (node, layout) in self.planes)
            self.floats[node] = self.call(node, _Unpack(), planes, name="unpack")
        return self.floats[node]

    def call(self, node: fx.Node, module: nn.Module, *args: Any, name: str = "") -> fx.Node:
        path = node.name + (f"_{name}" if name else "")
        self.root.add_module(path, module)
        return self.graph.call_module(path, args)


def _shape(node: fx.Node) -> torch.Size:
    return node.meta["tensor_meta"].shape


def _is_plain_pool(module: Any) -> bool:
    return type(module) is nn.MaxPool2d and not module.ceil_mode and not module.return_indices  # others pad in ways of their own


def _put(root: nn.Module, path: str, value: Any) -> None:
    *prefix, name = path.split(".")
    for part in prefix:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)


class _Pack(nn.Module):
    def __init__(self, layout: str):
        super().__init__()
        self.layout = layout

    def forward(self, x: Tensor) -> Planes:
        return pack_as(self.layout, x)


class _Unpack(nn.Module):
    def forward(self, x: Planes) -> Tensor:
        return unpack(x)


class _Finish(nn.Module):
    """Gain and offset."""

    def __init__(self, layer: Any):
        super().__init__()
        self.behind = layer.finish
        self.gain = layer.gain

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(x, self.gain)


class _Pool(nn.Module):
    falling: Tensor | None

    def __init__(self, module: nn.MaxPool2d, falling: Tensor | None):
        super().__init__()
        pair = nn.modules.utils._pair
        self.sizes = tuple(pair(one) for one in (module.kernel_size, module.stride, module.padding, module.dilation))
        self.register_buffer("falling", None if falling is None else falling.to(torch.uint8))

    def forward(self, x: Planes) -> Planes:
        kernel, stride, padding, dilation = self.sizes
        out = Geometry(x.channels, (x.height, x.width), kernel, stride, padding, dilation).out_size
        falling = torch.zeros(x.channels, dtype=torch.uint8) if self.falling is None else self.falling
        return pool(x, falling, kernel, stride, padding, dilation, out)
