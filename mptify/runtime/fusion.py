"""Fusion: finds each ticket layer together with what one kernel can compute along with it.

We walk back from each sign to the layer that it comes from. BatchNorm, max-pool and additions on
the way become the layer's epilogue.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from mptify.nn.layers import TicketConv2d, TicketLinear
from mptify.nn.norms import ChannelBatchNorm, TokenBatchNorm
from mptify.nn.quantizers import Sign
from mptify.runtime.geometry import Geometry
from mptify.runtime.nodes import (
    is_concat,
    is_flatten,
    is_global_average,
    is_identity,
    is_plain_pool,
    module_of,
    shape_of,
)
from mptify.runtime.survivors import max_kept
from mptify.runtime.thresholds import (
    Thresholds,
    find_joint_thresholds,
    find_real_thresholds,
    find_thresholds,
)

__all__ = ["Branch", "Fusion", "Pattern"]

_NORMS: dict[str, tuple[type[nn.Module], ...]] = {
    "channels": (nn.BatchNorm2d, ChannelBatchNorm),
    "tokens": (TokenBatchNorm,),
    "vectors": (TokenBatchNorm, nn.BatchNorm1d),
}
_ALL_NORMS = tuple({norm for norms in _NORMS.values() for norm in norms})
_ADD = (operator.add, operator.iadd, torch.add)


@dataclass
class Branch:
    """A ticket layer, and the modules between it and a sign or an addition.

    Attributes:
        layer: A TicketConv2d or a TicketLinear.
        layout: "channels" for convolutions, "tokens" or "vectors" for linear layers.
        nodes: The nodes of the layer and of the modules behind it.
    """

    node: fx.Node
    layer: Any
    layout: str
    epilogue: list[Any] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def source(self) -> Any:
        return self.node.args[0]

    @property
    def filter_size(self) -> int:
        """The weights of one filter."""
        return self.layer.count // self.layer.shape[0]

    @property
    def is_pooled(self) -> bool:
        return any(map(is_plain_pool, self.epilogue))

    @property
    def pads_with_zeros(self) -> bool:
        """Whether it is a linear layer, or a convolution whose padding is a number of zeros."""
        mode = getattr(self.layer, "padding_mode", "zeros")
        return mode == "zeros" and not isinstance(getattr(self.layer, "padding", 0), str)

    def geometry(self) -> Geometry:
        layer, shape = self.layer, shape_of(self.source)
        if self.layout == "tokens":
            return Geometry(layer.in_features, (1, shape[1:-1].numel()), (1, 1))
        window = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        return Geometry(layer.in_channels, (shape[2], shape[3]), *window)

    def weight(self) -> Tensor:
        """M ⊙ B, as -1, 0 and 1; for a linear layer on tokens, as a 1×1 convolution."""
        weight = self.layer.weight.detach().to(torch.int8)
        return weight[:, :, None, None] if self.layout == "tokens" else weight

    def run_epilogue(self, sums: Tensor) -> Tensor:
        """The float path behind the layer's sums (1 × filters × 1 × n)."""
        sums = _to_layout(self.layout, sums)
        return _run(self.epilogue, self.layer.finish(sums))


@dataclass
class Pattern:
    """What a kernel is asked to compute: a ticket layer and everything that is fused with it.

    Attributes:
        branch: The layer, and the modules behind it up to a sign or an addition.
        source: The node that it reads.
        reads_signs: Whether `source` is ±1; otherwise it is numbers, as in a first layer.
        makes_signs: Whether the result is ±1; otherwise it is the layer's output.
        averages: Whether the layer reads the mean of each channel of `source`.
        other: Another layer, whose output is added.
        other_reads_signs: Whether the other layer reads ±1.
        shortcut: A node of ±1 that is added.
        pool: A max-pool directly behind the layer. It is a kernel of its own: the kernel of the
            pattern takes the signs of all pixels, as if there were no pool.
        epilogue: The modules between the addition, or the layer, and the sign.
        nodes: All nodes that the pattern replaces but for the one that is its result.

    `weight`, `other_weight` and `thresholds` are computed when they are first read.
    """

    branch: Branch
    source: Any
    reads_signs: bool
    makes_signs: bool
    averages: bool = False
    other: Branch | None = None
    other_reads_signs: bool = False
    shortcut: fx.Node | None = None
    pool: nn.MaxPool2d | None = None
    epilogue: list[Any] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether it is a layer without an average pool before it and an addition behind it."""
        return not self.averages and self.other is None and self.shortcut is None

    @cached_property
    def weight(self) -> Tensor:
        """M ⊙ B of the layer: int8, -1, 0 and 1."""
        return self.branch.weight()

    @cached_property
    def other_weight(self) -> Tensor:
        assert self.other is not None
        return self.other.weight()

    @cached_property
    def thresholds(self) -> Thresholds | None:
        """Where the sign changes; None if the epilogue is not monotone, or there is no sign."""
        if not self.makes_signs:
            return None
        filters = len(self.weight)
        if not self.reads_signs:
            return find_real_thresholds(self.signs, filters)
        limit = max_kept(self.weight)
        if self.other is not None:
            return find_joint_thresholds(self.signs, filters, limit, max_kept(self.other_weight))
        return find_thresholds(self.signs, filters, limit, self.shortcut is not None)

    @property
    def rising_weight(self) -> Tensor:
        """The weight, with the signs of falling filters flipped: larger sums then give +1."""
        if self.thresholds is None:
            return self.weight
        falling = self.thresholds.falling.view(-1, *[1] * (self.weight.dim() - 1))
        return torch.where(falling, -self.weight, self.weight)

    def signs(self, sums: Tensor, added: Any) -> Tensor:
        """The float path, from the layer's sums (1 × filters × 1 × n) to signs.

        Args:
            sums: The layer's sums.
            added: What is added to its output: the shortcut's value, or the other layer's sums.
        """
        y = self.branch.run_epilogue(sums)
        if self.other is not None:
            y = y + self.other.run_epilogue(added)
        elif self.shortcut is not None:
            y = y + added
        y = torch.where(_run(self.epilogue, y) >= 0, 1.0, -1.0)
        if self.branch.layout == "vectors":
            return y.T[None, :, None]
        return y.transpose(1, 2)[:, :, None] if self.branch.layout == "tokens" else y


class Fusion:
    """The patterns of a graph whose nodes know their shapes.

    Attributes:
        binary: The nodes whose value is ±1.
        patterns: Patterns by the node that is their result: a sign, or a linear layer behind a
            global average pool.
    """

    def __init__(self, model: fx.GraphModule):
        self.modules = dict(model.named_modules())
        self.order = {node: number for number, node in enumerate(model.graph.nodes)}
        self.binary: set[fx.Node] = set()
        self.patterns: dict[fx.Node, Pattern] = {}
        for node in model.graph.nodes:
            pattern = None
            if isinstance(module_of(node, self.modules), Sign):
                self.binary.add(node)
                pattern = self._match_sign(node.args[0])
            elif self._keeps_signs(node):
                self.binary.add(node)
            else:
                pattern = self._match_pooled_linear(node)
            if pattern is not None:
                self.patterns[node] = pattern

    def match_layer(self, node: fx.Node) -> Pattern | None:
        """The pattern of a layer that reads signs, and whose output is wanted as numbers."""
        branch = self._layer_at(node)
        if branch is None or branch.source not in self.binary:
            return None
        return Pattern(branch, branch.source, reads_signs=True, makes_signs=False)

    def _keeps_signs(self, node: fx.Node) -> bool:
        """Whether a node moves ±1 around, and nothing else."""
        if is_concat(node):
            return all(one in self.binary for one in node.args[0])  # type: ignore[union-attr]
        if not node.args or node.args[0] not in self.binary:
            return False
        module = module_of(node, self.modules)
        return is_identity(module) or is_plain_pool(module) or is_flatten(node, module)

    def _layer_at(self, node: Any) -> Branch | None:
        """The layer at a node, if kernels can compute such layers."""
        layer = module_of(node, self.modules)
        if type(layer) not in (TicketConv2d, TicketLinear) or not layer.scales_output:
            return None
        if layer.input_quantizer is not None or layer.compute_dtype != torch.float32:
            return None
        layout = "channels"
        if type(layer) is TicketLinear:
            layout = "vectors" if len(shape_of(node)) == 2 else "tokens"
        return Branch(node, layer, layout, nodes=[node])

    def _match_pooled_linear(self, node: fx.Node) -> Pattern | None:
        branch = self._layer_at(node)
        if branch is None or branch.layout != "vectors":
            return None
        top, averages = branch.source, False
        nodes: list[fx.Node] = []
        while (
            isinstance(top, fx.Node) and top not in self.binary and len(top.users) == 1 and top.args
        ):
            module = module_of(top, self.modules)
            if is_global_average(top, module):
                averages = True
            elif not is_identity(module) and not is_flatten(top, module):
                return None
            nodes.insert(0, top)
            top = top.args[0]
        if not averages or top not in self.binary or len(shape_of(top)) != 4:
            return None
        return Pattern(branch, top, True, makes_signs=False, averages=True, nodes=nodes)

    def _match_sign(self, node: Any) -> Pattern | None:
        branch = self._branch(node)
        if branch is None:
            return self._match_addition(node)
        epilogue, branch.epilogue = branch.epilogue, []
        pool = epilogue.pop(0) if epilogue and is_plain_pool(epilogue[0]) else None
        if any(map(is_plain_pool, epilogue)):
            return None
        return self._signs_of(branch, pool=pool, epilogue=epilogue, nodes=branch.nodes)

    def _match_addition(self, node: Any) -> Pattern | None:
        """A layer's output plus a shortcut of ±1 or another layer's output, before a sign."""
        epilogue, nodes, top = self._walk_back(node)
        if any(map(is_plain_pool, epilogue)) or not self._adds_two(top):
            return None
        found = [self._branch(one) for one in top.args]
        branches = [
            branch
            for branch in found
            if branch is not None and not branch.is_pooled and branch.layout != "vectors"
        ]
        branches.sort(key=lambda branch: -branch.filter_size)  # thresholds are listed by the sums
        shortcuts: list[Any] = [one for one in top.args if one in self.binary]  # of the smaller
        inner = [one for branch in branches for one in branch.nodes]
        nodes = sorted([*nodes, top, *inner], key=self.order.__getitem__)
        if len(branches) == 2 and branches[0].layout == branches[1].layout:
            first, other = branches
            return self._signs_of(first, other=other, epilogue=epilogue, nodes=nodes)
        if len(branches) == len(shortcuts) == 1:
            added = shortcuts[0]
            return self._signs_of(branches[0], shortcut=added, epilogue=epilogue, nodes=nodes)
        return None

    def _signs_of(self, branch: Branch, **fused: Any) -> Pattern:
        reads_signs = branch.source in self.binary
        other = fused.get("other")
        if other is not None:
            fused["other_reads_signs"] = other.source in self.binary
        return Pattern(branch, branch.source, reads_signs, makes_signs=True, **fused)

    def _adds_two(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node.target not in _ADD or len(node.users) != 1:
            return False
        if len(node.args) != 2 or node.kwargs:
            return False
        shape = shape_of(node)
        return all(isinstance(one, fx.Node) and shape_of(one) == shape for one in node.args)

    def _branch(self, node: Any) -> Branch | None:
        """The layer that a value comes from, through modules whose values nothing else reads."""
        epilogue, nodes, top = self._walk_back(node)
        branch = self._layer_at(top)
        if branch is None or len(top.users) != 1:
            return None
        known = _NORMS[branch.layout]
        known = (*known, nn.MaxPool2d) if branch.layout == "channels" else known
        if not all(is_identity(module) or isinstance(module, known) for module in epilogue):
            return None
        branch.epilogue, branch.nodes = epilogue, [top, *nodes]
        return branch

    def _walk_back(self, node: Any) -> tuple[list[Any], list[fx.Node], fx.Node]:
        """The norms, pools and identities before a node; their nodes; and what they read."""
        modules: list[Any] = []
        nodes: list[fx.Node] = []
        while len(node.users) == 1 and node not in self.binary:
            module = module_of(node, self.modules)
            is_norm = isinstance(module, _ALL_NORMS)
            if not (is_identity(module) or is_plain_pool(module) or is_norm):
                break
            modules.insert(0, module)
            nodes.insert(0, node)
            node = node.args[0]
        return modules, nodes, node


def _to_layout(layout: str, sums: Tensor) -> Tensor:
    """From 1 × filters × 1 × n to what a layer of this layout returns."""
    if layout == "vectors":
        return sums[0, :, 0].T.contiguous()
    return sums[:, :, 0].transpose(1, 2).contiguous() if layout == "tokens" else sums


def _run(modules: list[Any], y: Tensor) -> Tensor:
    for module in modules:
        y = module(y)
    return y
