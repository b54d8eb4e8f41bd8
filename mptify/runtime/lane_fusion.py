"""Finds ticket layers of real or few-bit inputs, with what one kernel can compute along with them.

We walk on from each layer through operations whose input nothing else reads: BatchNorm, the
addition of another value, and ReLU-like activations, in this order.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mptify.nn.layers import TicketConv2d, TicketLinear
from mptify.nn.norms import ChannelBatchNorm, TokenBatchNorm
from mptify.nn.quantizers import RunningQuantizer, UniformQuantizer, level_range
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernel import Kernel
from mptify.runtime.nodes import is_identity, is_plain_pool, module_name, module_of, shape_of

__all__ = ["LanePattern", "Levels", "lane_patterns", "quantizer_of"]

_LARGE = 2.0**60
_ADD = (operator.add, operator.iadd, torch.add)
_RELU = (F.relu, torch.relu, "relu", F.relu_, torch.relu_, "relu_")


class Levels(NamedTuple):
    """How numbers become levels: round(clip(x · inverse)); a level stands for level · step."""

    inverse: float
    lowest: float
    highest: float
    step: float

    @classmethod
    def of(cls, quantizer: UniformQuantizer | RunningQuantizer) -> Levels:
        step = quantizer.step
        inverse = float(1 / step)
        if isinstance(quantizer, RunningQuantizer):
            lowest, highest = (-127, 127) if quantizer.is_signed else (0, 255)
        else:
            lowest, highest = level_range(quantizer.bits, quantizer.signed)
        return cls(inverse, float(lowest), float(highest), float(step))


@dataclass
class LanePattern:
    """What a kernel on lanes is asked to compute.

    Attributes:
        node: The node of the layer.
        layer: A TicketConv2d, or a TicketLinear on tokens.
        source: The node that it reads.
        levels: The levels that it reads; None for float32 inputs.
        unit: The value of level 1 in its sums.
        other: A node whose value is added.
        other_levels: The levels of `other`, if it is read as levels.
        epilogue: What follows: see `mptify.runtime.kernels.lanes_conv`.
        fused: Whether the norms in the epilogue round once, as torch's do on some machines.
        pool: A max-pool before the first norm. The kernel applies the norm first, which is
            monotone, so that another kernel can pool what this one makes.
        rounding: The levels that it makes; None if it makes numbers.
        kernel: The kernel from a file that computes it. It says which norms follow the layer.
        nodes: All nodes that the pattern replaces, the result last.
    """

    node: fx.Node
    layer: Any
    source: fx.Node
    levels: Levels | None = None
    unit: float = 1.0
    other: fx.Node | None = None
    other_levels: Levels | None = None
    epilogue: dict[str, Tensor] = field(default_factory=dict)
    fused: bool = False
    pool: nn.MaxPool2d | None = None
    rounding: Levels | None = None
    kernel: Kernel | None = None
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def tokens(self) -> bool:
        """Whether channels are the last dimension."""
        return isinstance(self.layer, TicketLinear)

    @property
    def is_vector(self) -> bool:
        """Whether it is a linear layer on one vector per image."""
        return self.tokens and len(shape_of(self.source)) == 2

    @property
    def reads_numbers(self) -> bool:
        """Whether the kernel reads numbers, which it may round for itself."""
        return self.levels is None or self.is_vector

    def geometry(self) -> Geometry:
        layer, shape = self.layer, shape_of(self.source)
        if self.tokens:
            return Geometry(layer.in_features, (1, shape[1:-1].numel()), (1, 1))
        window = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        return Geometry(layer.in_channels, (shape[2], shape[3]), *window)

    def weight(self) -> Tensor:
        """M ⊙ B, as -1, 0 and 1; for a linear layer on tokens, as a 1×1 convolution."""
        weight = self.layer.weight.detach().sign().to(torch.int8)
        return weight[:, :, None, None] if self.tokens else weight

    def scale(self) -> Tensor:
        """What multiplies the sums of inputs, or of levels."""
        gain, quantizer = self.layer.gain.detach(), self.layer.input_quantizer
        return gain * quantizer.step if isinstance(quantizer, RunningQuantizer) else gain


def lane_patterns(
    model: fx.GraphModule, given: Mapping[str, Kernel] | None = None
) -> dict[fx.Node, LanePattern]:
    """The patterns of a graph whose nodes know their shapes, by the node of their result.

    Args:
        model: The graph.
        given: Kernels by name, from a file. Only layers that they replace have patterns, and the
            norms of a pattern are those that its kernel holds: the model's are not filled.
    """
    modules = dict(model.named_modules())
    order = {node: number for number, node in enumerate(model.graph.nodes)}
    matcher = _Matcher(modules, order, given)
    found = [matcher.match(node) for node in model.graph.nodes]
    return {pattern.nodes[-1]: pattern for pattern in found if pattern is not None}


class _Matcher:
    def __init__(
        self,
        modules: dict[str, nn.Module],
        order: dict[fx.Node, int],
        given: Mapping[str, Kernel] | None,
    ):
        self.modules, self.order, self.given = modules, order, given

    def match(self, node: fx.Node) -> LanePattern | None:
        layer = module_of(node, self.modules)
        if type(layer) not in (TicketConv2d, TicketLinear) or layer.weight_bits != 1:
            return None
        if layer.activation_bits == 1 or layer.compute_dtype != torch.float32:
            return None
        mode, padding = getattr(layer, "padding_mode", "zeros"), getattr(layer, "padding", 0)
        if mode != "zeros" or isinstance(padding, str):
            return None
        if isinstance(layer, TicketConv2d) and len(shape_of(node)) != 4:
            return None
        pattern = LanePattern(node, layer, node.args[0], nodes=[node])  # type: ignore[arg-type]
        if self.given is not None:
            pattern.kernel = self.given.get(module_name(node))
            if pattern.kernel is None:
                return None
        if not self._read_levels(pattern):
            return None
        bias = layer.output_bias if layer.scales_output else layer.bias
        if bias is not None:
            pattern.epilogue["bias"] = bias
        self._fuse_epilogue(pattern)
        return pattern

    def _read_levels(self, pattern: LanePattern) -> bool:
        """Set the levels that a pattern reads; False if no kernel can read its input."""
        layer = pattern.layer
        if layer.activation_bits == 32:
            return True
        if layer.activation_bits == 8:
            if isinstance(layer.input_quantizer, RunningQuantizer):
                pattern.levels = Levels.of(layer.input_quantizer)
            return pattern.levels is not None
        if layer.input_quantizer is not None:
            return False
        if pattern.is_vector:
            return True  # sums of few-bit numbers are exact
        quantizer = quantizer_of(pattern.source, self.modules)
        if quantizer is not None:  # it otherwise reads pixels, or pooled features
            pattern.levels = Levels.of(quantizer)
            pattern.unit = pattern.levels.step
        return True

    def _fuse_epilogue(self, pattern: LanePattern) -> None:
        norms = (TokenBatchNorm,) if pattern.tokens else (nn.BatchNorm2d, ChannelBatchNorm)
        epilogue = pattern.epilogue
        while True:
            node = pattern.nodes[-1]
            if len(node.users) != 1:
                return
            user = next(iter(node.users))
            module = module_of(user, self.modules)
            if is_identity(module):
                pass
            elif pattern.is_vector and not _range(user, module):
                return
            elif is_plain_pool(module) and self._pools(user, pattern):
                pattern.pool = module
            elif isinstance(module, norms):
                before = "alpha" not in epilogue and pattern.other is None
                name = "" if before and "range" not in epilogue else "last_"
                if "last_alpha" in epilogue or (name and pattern.pool is not None):
                    return
                affine = _folded(module, name, pattern)
                if affine is None:
                    return
                if "alpha" in epilogue and affine.fused != pattern.fused:
                    return
                epilogue[f"{name}alpha"], epilogue[f"{name}beta"], pattern.fused = affine
            elif self._adds(user, pattern):
                first, second = user.args
                other: Any = second if first is node else first
                pattern.other = other
            elif "range" not in epilogue and "last_alpha" not in epilogue and _range(user, module):
                epilogue["range"] = torch.tensor(_range(user, module))
            else:
                return
            pattern.nodes.append(user)

    def _pools(self, user: fx.Node, pattern: LanePattern) -> bool:
        """Whether a max-pool stands between a pattern's sums and the norm that follows them."""
        if pattern.pool is not None or pattern.other is not None or pattern.tokens:
            return False
        if pattern.epilogue.keys() - {"bias"} or len(user.users) != 1:
            return False
        follower = module_of(next(iter(user.users)), self.modules)
        return (
            isinstance(follower, (nn.BatchNorm2d, ChannelBatchNorm))
            and _folded(follower, "", pattern) is not None
        )

    def _adds(self, user: fx.Node, pattern: LanePattern) -> bool:
        """Whether a node adds an earlier value of the same shape to the pattern's."""
        if user.op != "call_function" or user.target not in _ADD or user.kwargs:
            return False
        if pattern.other is not None or pattern.epilogue.keys() & {"range", "last_alpha"}:
            return False
        if pattern.pool is not None:
            return False
        if len(user.args) != 2 or not all(isinstance(one, fx.Node) for one in user.args):
            return False
        others: list[Any] = [one for one in user.args if one is not pattern.nodes[-1]]
        if len(others) != 1 or self.order[others[0]] > self.order[pattern.node]:
            return False
        return shape_of(others[0]) == shape_of(user)


def quantizer_of(node: Any, modules: dict[str, nn.Module]) -> UniformQuantizer | None:
    """The quantizer whose levels a node has; None if there is none."""
    while isinstance(node, fx.Node):
        module = module_of(node, modules)
        if isinstance(module, UniformQuantizer):
            return module
        if not (is_identity(module) or is_plain_pool(module)):
            return None
        node = node.args[0]
    return None


def _range(user: fx.Node, module: Any) -> tuple[float, float] | None:
    """The range that a ReLU-like activation clips to."""
    if isinstance(module, nn.ReLU) or (module is None and user.target in _RELU):
        return 0.0, inf
    if type(module) is nn.ReLU6:
        return 0.0, 6.0
    return None


class _Affine(NamedTuple):
    alpha: Tensor
    beta: Tensor
    fused: bool


def _folded(module: Any, name: str, pattern: LanePattern) -> _Affine | None:
    """A BatchNorm as the `name`alpha and `name`beta of a kernel; None if it can't be that."""
    kernel: Any = pattern.kernel
    if kernel is None:
        return _affine(module)
    alpha, beta = (getattr(kernel, f"{name}{part}", None) for part in ("alpha", "beta"))
    return None if alpha is None or beta is None else _Affine(alpha, beta, kernel.fused)


def _affine(module: Any) -> _Affine | None:
    """A BatchNorm as x · alpha + beta, rounded once or twice; None if it is neither.

    Both are found by running the norm, since their last bits depend on how torch computes them:
    beta at 0, and alpha where beta is too small to matter.
    """
    norm: Any = module.norm if isinstance(module, TokenBatchNorm) else module
    if norm.running_mean is None or norm.training:
        return None

    def run(*values: float) -> Tensor:
        x = torch.tensor(values)[:, None] * torch.ones_like(norm.running_mean)
        y = norm(x) if isinstance(norm, nn.BatchNorm1d) else norm(x[:, :, None, None])
        return y.view(x.shape)

    with torch.no_grad():
        beta, large = run(0.0, _LARGE)
        alpha = large / _LARGE
        probe = torch.linspace(-40, 40, 97)
        found, x = run(*probe.tolist()), probe[:, None]
        for fused in (False, True):
            once = (x.double() * alpha.double() + beta.double()).float()
            if torch.equal(found, once if fused else x * alpha + beta):
                return _Affine(alpha, beta, fused)
    return None
