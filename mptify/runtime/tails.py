"""What stands between binary layers and the signs behind them, found by going back from each sign."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mptify.nn.layers import TicketConv2d, TicketLinear
from mptify.nn.norms import ChannelBatchNorm, TokenBatchNorm
from mptify.nn.quantizers import Sign
from mptify.runtime.geometry import Geometry

__all__ = ["Branch", "Head", "Tail", "Tails", "is_concat", "is_plain_pool", "is_through", "module_of"]

_THROUGH = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d)  # what hands its input on in eval()
_NORMS = {"channels": (nn.BatchNorm2d, ChannelBatchNorm), "tokens": (TokenBatchNorm,), "vectors": (TokenBatchNorm, nn.BatchNorm1d)}
_ALL_NORMS = tuple({norm for norms in _NORMS.values() for norm in norms})
_ADD = (operator.add, operator.iadd, torch.add)


@dataclass
class Branch:
    """A layer that has kernels, and the steps behind it up to a sign or to an addition."""

    node: fx.Node
    layer: Any  # TicketConv2d or TicketLinear
    layout: str
    steps: list[Any] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)  # of the layer and the steps

    @property
    def source(self) -> Any:
        return self.node.args[0]

    @property
    def size(self) -> int:
        """Weights per filter."""
        return self.layer.count // self.layer.shape[0]

    @property
    def is_pooled(self) -> bool:
        return any(map(is_plain_pool, self.steps))

    def geometry(self) -> Geometry:
        layer, shape = self.layer, shape_of(self.source)
        if self.layout == "tokens":
            return Geometry(layer.in_features, (1, shape[1:-1].numel()), (1, 1))
        return Geometry(layer.in_channels, (shape[2], shape[3]), layer.kernel_size, layer.stride, layer.padding, layer.dilation)

    def weight(self) -> Tensor:
        """M ⊙ B, as -1, 0 and 1: of a linear layer on tokens as a convolution's."""
        weight = self.layer.weight.detach().to(torch.int8)
        return weight[:, :, None, None] if self.layout == "tokens" else weight

    def behind(self, sums: Tensor) -> Tensor:
        """The float path, from the layer's sums (1 × filters × 1 × n) on."""
        return _through(self.steps, self.layer.finish(_turned_to(self.layout, sums)))


@dataclass
class Tail:
    """What a sign is taken of: a layer's output, on which there may have been a max-pool, or to which a ±1 shortcut or another
    layer's output was added; and the steps behind that."""

    branch: Branch
    other: Branch | None = None
    shortcut: fx.Node | None = None
    pool: nn.MaxPool2d | None = None
    steps: list[Any] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)  # all that the tail stands for, but for the sign

    def signs(self, sums: Tensor, added: Any) -> Tensor:
        """The float path, from the layer's sums and from what is added to its output: the shortcut's value, or the other layer's sums."""
        y = self.branch.behind(sums)
        if self.other is not None:
            y = y + self.other.behind(added)
        elif self.shortcut is not None:
            y = y + added
        y = torch.where(_through(self.steps, y) >= 0, 1.0, -1.0)
        if self.branch.layout == "vectors":
            return y.T[None, :, None]
        return y.transpose(1, 2)[:, :, None] if self.branch.layout == "tokens" else y


@dataclass
class Head:
    """A linear layer that reads nothing but the mean of each channel of signs: what it stands for, and the signs."""

    branch: Branch
    signs: fx.Node
    nodes: list[fx.Node]  # between the signs and the layer


class Tails:
    """Of a graph whose nodes know their shapes: the `binary` ones, whose value is ±1; for signs that have one their tail; heads."""

    def __init__(self, model: fx.GraphModule):
        self.modules = dict(model.named_modules())
        self.order = {node: place for place, node in enumerate(model.graph.nodes)}
        self.binary: set[fx.Node] = set()
        self.of: dict[fx.Node, Tail] = {}
        self.heads: dict[fx.Node, Head] = {}
        for node in model.graph.nodes:
            module = module_of(node, self.modules)
            if isinstance(module, Sign):
                self.binary.add(node)
                tail = self._tail(node.args[0])
                if tail is not None:
                    self.of[node] = tail
            elif (
                node.args and node.args[0] in self.binary and (is_through(module) or is_plain_pool(module) or is_flatten(node, module))
            ) or (is_concat(node) and all(one in self.binary for one in node.args[0])):
                self.binary.add(node)
            elif (head := self._head(node)) is not None:
                self.heads[node] = head

    def layer_at(self, node: Any) -> Branch | None:
        """The layer at a node, if it is one that has kernels."""
        layer = module_of(node, self.modules)
        if type(layer) not in (TicketConv2d, TicketLinear) or not layer.scales_output or layer.input_quantizer is not None:
            return None
        if layer.compute_dtype != torch.float32:
            return None
        if type(layer) is TicketLinear:
            return Branch(node, layer, "vectors" if len(shape_of(node)) == 2 else "tokens", nodes=[node])
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return None
        return Branch(node, layer, "channels", nodes=[node])

    def _head(self, node: fx.Node) -> Head | None:
        branch = self.layer_at(node)
        if branch is None or branch.layout != "vectors":
            return None
        top, averaged = branch.source, False
        nodes: list[fx.Node] = []
        while isinstance(top, fx.Node) and top not in self.binary and len(top.users) == 1 and top.args:
            module = module_of(top, self.modules)
            if is_mean(top, module):
                averaged = True
            elif not is_through(module) and not is_flatten(top, module):
                return None
            nodes.insert(0, top)
            top = top.args[0]
        return Head(branch, top, nodes) if averaged and top in self.binary and len(shape_of(top)) == 4 else None

    def _tail(self, node: Any) -> Tail | None:
        branch = self._branch(node)
        if branch is None:
            return self._sum(node)
        steps, branch.steps = branch.steps, []
        pool = steps.pop(0) if steps and is_plain_pool(steps[0]) else None
        return None if any(map(is_plain_pool, steps)) else Tail(branch, pool=pool, steps=steps, nodes=branch.nodes)

    def _sum(self, node: Any) -> Tail | None:
        """A sign's argument that is a layer's output and something else, added."""
        steps, nodes, top = self._steps_before(node)
        if any(map(is_plain_pool, steps)) or not self._adds_two(top):
            return None
        ends = [self._branch(one) for one in top.args]
        branches = [end for end in ends if end is not None and not end.is_pooled and end.layout != "vectors"]
        branches.sort(key=lambda end: -end.size)
        shortcuts: list[Any] = [one for one in top.args if one in self.binary]
        inner = [one for branch in branches for one in branch.nodes]
        tail: dict[str, Any] = {"steps": steps, "nodes": sorted([*nodes, top, *inner], key=self.order.__getitem__)}
        if len(branches) == 2 and branches[0].layout == branches[1].layout:
            return Tail(branches[0], other=branches[1], **tail)  # thresholds are listed by the sums of the smaller layer
        return Tail(branches[0], shortcut=shortcuts[0], **tail) if len(branches) == len(shortcuts) == 1 else None

    def _adds_two(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node.target not in _ADD or len(node.args) != 2 or node.kwargs or len(node.users) != 1:
            return False
        return all(isinstance(one, fx.Node) and shape_of(one) == shape_of(node) for one in node.args)

    def _branch(self, node: Any) -> Branch | None:
        """The layer that a value comes from, through steps that nothing else goes through."""
        steps, nodes, top = self._steps_before(node)
        branch = self.layer_at(top)
        if branch is None or len(top.users) != 1:
            return None
        known = (*_NORMS[branch.layout], nn.MaxPool2d) if branch.layout == "channels" else _NORMS[branch.layout]
        if not all(is_through(step) or isinstance(step, known) for step in steps):
            return None
        branch.steps, branch.nodes = steps, [top, *nodes]
        return branch

    def _steps_before(self, node: Any) -> tuple[list[Any], list[fx.Node], fx.Node]:
        """Norms, pools and the like through which a value came, the first one first; their nodes; and where it came from."""
        steps: list[Any] = []
        nodes: list[fx.Node] = []
        while len(node.users) == 1 and node not in self.binary:
            module = module_of(node, self.modules)
            if not (is_through(module) or is_plain_pool(module) or isinstance(module, _ALL_NORMS)):
                break
            steps.insert(0, module)
            nodes.insert(0, node)
            node = node.args[0]
        return steps, nodes, node


def module_of(node: fx.Node, modules: dict[str, nn.Module]) -> Any:
    return modules.get(str(node.target)) if node.op == "call_module" else None


def shape_of(node: Any) -> torch.Size:
    return node.meta["tensor_meta"].shape


def is_through(module: Any) -> bool:
    """Whether a module hands its input on, in `eval()`."""
    return isinstance(module, _THROUGH)


def is_plain_pool(module: Any) -> bool:
    return type(module) is nn.MaxPool2d and not module.ceil_mode and not module.return_indices  # others pad in ways of their own


def is_flatten(node: fx.Node, module: Any) -> bool:
    """Whether all that an image has becomes one vector."""
    if not isinstance(module, nn.Flatten) and node.target not in (torch.flatten, "flatten"):
        return False
    before = tuple(shape_of(node.args[0]))
    return len(before) == 4 and tuple(shape_of(node)) == (before[0], prod(before[1:]))


def is_mean(node: fx.Node, module: Any) -> bool:
    """Whether of each channel of an image its mean is left."""
    if isinstance(module, nn.AdaptiveAvgPool2d) or node.target is F.adaptive_avg_pool2d:
        size = module.output_size if module is not None else node.args[1] if len(node.args) > 1 else node.kwargs.get("output_size")
        return size in (1, (1, 1), [1, 1])
    if node.target not in (torch.mean, "mean") or len(shape_of(node.args[0])) != 4:
        return False
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return isinstance(dims, (list, tuple)) and {dim % 4 for dim in dims} == {2, 3} and len(dims) == 2 and "dtype" not in node.kwargs


def is_concat(node: fx.Node) -> bool:
    """Whether images are put together channel by channel."""
    if node.target not in (torch.cat, torch.concat) or not node.args or not isinstance(node.args[0], (list, tuple)):
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
    return dim in (1, -3) and all(isinstance(one, fx.Node) and len(shape_of(one)) == 4 for one in node.args[0])


def _turned_to(layout: str, sums: Tensor) -> Tensor:
    """From 1 × filters × 1 × n to what a layer of this kind gives."""
    if layout == "vectors":
        return sums[0, :, 0].T.contiguous()
    return sums[:, :, 0].transpose(1, 2).contiguous() if layout == "tokens" else sums


def _through(steps: list[Any], y: Tensor) -> Tensor:
    for step in steps:
        y = step(y)
    return y
