"""Apply the edits of a plan to the graphs of one region."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from mptify.config import TicketConfig
from mptify.nn.layers import Ticketed, TicketParameter
from mptify.nn.norms import ChannelBatchNorm, ScalarBatchNorm, TokenBatchNorm
from mptify.nn.quantizers import make_quantizer
from mptify.surgery import layer_registry
from mptify.surgery.graphs import TicketGraph
from mptify.surgery.hooks import copy_hooks_, is_hooked
from mptify.surgery.plans import NormBefore, RegionEdits
from mptify.surgery.trace import Region, join

__all__ = ["edited_region", "make_norm", "split_fused_norms_"]

# A sign ignores the scale of its input, so epsilon changes no output, and other quantizers hardly
# notice it. It bounds the factor by which a channel of almost no variance (a depthwise filter
# without survivors, say) multiplies gradients: 10 with this epsilon, 316 with torch's 1e-5. In
# EfficientNetV2-M, 75 % pruned, these factors multiply to 1e38 at the first blocks with torch's
# epsilon, and to 1e2 with this one.
EPS_BEFORE_QUANTIZER = 1e-2


def make_norm(norm: NormBefore, config: TicketConfig, like: torch.Tensor) -> nn.Module:
    """The norm that a plan asks for, with the dtype and device of the tensor `like`."""
    eps = EPS_BEFORE_QUANTIZER if config.quantizes_activations else 1e-5
    options: Any = {
        "eps": eps,
        "affine": config.learn_bn,
        "device": like.device,
        "dtype": like.dtype,
    }
    if norm.channels is None:
        return ScalarBatchNorm(**options)
    if norm.axis == -1:
        return TokenBatchNorm(norm.channels, **options)
    return ChannelBatchNorm(norm.channels, **options)


def edited_region(
    region: Region,
    edits: dict[bool, RegionEdits],
    layers: dict[str, Any],
    config: TicketConfig,
    like: torch.Tensor,
) -> TicketGraph:
    root = region.module
    graphs: dict[bool, fx.Graph] = {}
    inserted: dict[Any, str] = {}
    split_fused_norms_(list(region.graphs.values()), root)
    before = _parameters_read(region.graphs.values(), root)
    for training, graph in region.graphs.items():
        editor = _GraphEditor(region, graph, edits[training], layers, config, like, inserted)
        graphs[training] = editor.edit()
    return TicketGraph.of(root, graphs, before - _parameters_read(graphs.values(), root))


def _parameters_read(graphs: Iterable[fx.Graph], root: nn.Module) -> set[str]:
    """The parameters of `root` that a graph uses, directly or through modules that it calls."""
    read: set[str] = set()
    names: dict[int, list[str]] = {id(parameter): [] for parameter in root.parameters()}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for graph in graphs:
        for node in graph.nodes:
            if node.op == "call_module":
                used = list(root.get_submodule(str(node.target)).parameters())
            elif node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(root)
                used = list(value.parameters()) if isinstance(value, nn.Module) else [value]
            else:
                continue
            read.update(name for parameter in used for name in names.get(id(parameter), ()))
    return read


class _GraphEditor:
    def __init__(
        self,
        region: Region,
        graph: fx.Graph,
        edits: RegionEdits,
        layers: dict[str, Any],
        config: TicketConfig,
        like: torch.Tensor,
        inserted: dict[Any, str],
    ):
        self.region, self.graph, self.edits, self.layers = region, graph, edits, layers
        self.root, self.config, self.like = region.module, config, like
        self.suffix = "sign" if config.activation_bits == 1 else "quantizer"
        self.nodes = {node.name: node for node in graph.nodes}
        self.inserted = inserted  # by site and role, for both modes: the path of the module

    def edit(self) -> fx.Graph:
        for pool, conv in self.edits.pools.items():
            self._move_pool(self.nodes[pool], self.nodes[conv])
        for name in self.edits.vanished:
            node = self.nodes[name]
            self.nodes[name] = (
                self._hooked_identity(node) if self._is_hooked(node) else node.all_input_nodes[0]
            )
            self._replace(node, self.nodes[name])
        for name, inserted in self.edits.norms.items():
            node = self.nodes[name]
            value = node.all_input_nodes[0]
            node.replace_input_with(value, self._normalised(value, inserted, node, _site(node)))
        for name, norm in self.edits.quantizers.items():
            self._quantize_activation(self.nodes[name], norm)
        for name, norm in self.edits.edges.items():
            self._quantize_edge(
                self.nodes[name], norm, [self.nodes[reader] for reader in self.edits.readers[name]]
            )
        for name, layer in self.edits.calls.items():
            self._call_layer(self.nodes[name], layer)
        self._read_through_tickets()
        self._make_out_of_place()
        for node in reversed(list(self.graph.nodes)):  # weights that layers now read themselves
            if node.op == "get_attr" and not node.users:
                self.graph.erase_node(node)
        self.graph.lint()
        return self.graph

    def _replace(self, node: fx.Node, other: fx.Node) -> None:
        node.replace_all_uses_with(other)
        _move_marks(node, other)
        self.graph.erase_node(node)

    def _read_through_tickets(self) -> None:
        """Read `layer.weight` at run time, since fx would store its current value as a buffer."""
        for node in list(self.graph.nodes):
            if node.op != "get_attr" or not node.users:
                continue
            owner, _, attribute = str(node.target).rpartition(".")
            module = self.root.get_submodule(owner)
            if f"{attribute}_ticket" in module._modules:
                owner, attribute = f"{node.target}_ticket", "weight"
            elif not isinstance(module, Ticketed):
                continue
            with self.graph.inserting_before(node):
                layer = self.graph.get_attr(owner)
                value = self.graph.call_function(getattr, (layer, attribute))
            node.replace_all_uses_with(value)

    def _make_out_of_place(self) -> None:
        """Make in-place operations out of place: they would change what a quantizer has saved."""
        swaps = {
            operator.iadd: operator.add,
            operator.imul: operator.mul,
            operator.isub: operator.sub,
        }
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target in swaps:
                node.target = swaps[node.target]
            elif (
                node.op == "call_method"
                and node.target in ("add_", "sub_", "mul_", "div_")
                and node.users
            ):
                later = [user for user in node.args[0].users if user > node]
                if not later:  # no later node reads the old value
                    node.target = node.target.removesuffix("_")

    def _move_pool(self, pool: fx.Node, conv: fx.Node) -> None:
        """Turn conv → (norm) → activation → pool into conv → pool → (norm) → activation."""
        activation = pool.all_input_nodes[0]
        pool.replace_all_uses_with(activation)
        _move_marks(pool, activation)
        below = next(iter(conv.users))
        conv.append(pool)
        pool.replace_input_with(activation, conv)
        below.replace_input_with(conv, pool)

    def _quantize_activation(self, node: fx.Node, norm: NormBefore | None) -> None:
        value = node.all_input_nodes[0]
        module = make_quantizer(self.config, signed=False, like=self.like)
        with self.graph.inserting_before(node):
            if norm is not None:
                value = self._normalised(value, norm, node, _site(node))
            key = (node.meta["key"], "quantizer")
            quantized = self._call(f"{_site(node)}_{self.suffix}", key, module, value)
        if self._is_hooked(node):
            self._hand_on_hooks(node, quantized if norm is None else value, quantized)
        self._replace(node, quantized)

    def _hooked_identity(self, node: fx.Node) -> fx.Node:
        """Keep the hooks of an activation that disappears."""
        with self.graph.inserting_before(node):
            identity = self._call(
                f"{_site(node)}_hooked",
                (node.meta["key"], "hooked"),
                nn.Identity(),
                node.all_input_nodes[0],
            )
        self._hand_on_hooks(node, identity, identity)
        return identity

    def _is_hooked(self, node: fx.Node) -> bool:
        return node.op == "call_module" and is_hooked(self.root.get_submodule(str(node.target)))

    def _hand_on_hooks(self, node: fx.Node, first: fx.Node, last: fx.Node) -> None:
        """Move pre-hooks of an activation to the first module in its place, hooks to the last."""
        module = self.root.get_submodule(str(node.target))
        copy_hooks_(module, self.root.get_submodule(str(first.target)), before=True, behind=False)
        copy_hooks_(module, self.root.get_submodule(str(last.target)), before=False, behind=True)

    def _quantize_edge(
        self, value: fx.Node, norm: NormBefore | None, readers: list[fx.Node]
    ) -> None:
        first = readers[0]
        site = f"{_site(first)}_input"
        module = make_quantizer(self.config, signed=True, like=self.like)
        with self.graph.inserting_before(first):
            quantized = value if norm is None else self._normalised(value, norm, first, site)
            key = (first.meta["key"], "input", "quantizer")
            quantized = self._call(f"{site}_{self.suffix}", key, module, quantized)
        for reader in readers:
            _replace_first_input(reader, value, quantized)

    def _normalised(self, value: fx.Node, norm: NormBefore, before: fx.Node, site: str) -> fx.Node:
        with self.graph.inserting_before(before):
            return self._call(
                f"{site}_norm",
                (before.meta["key"], site.endswith("_input"), "norm"),
                make_norm(norm, self.config, self.like),
                value,
            )

    def _call(self, path: str, key: Any, module: nn.Module, value: fx.Node) -> fx.Node:
        """Call an inserted module: that of the other mode at the same site, else `module`."""
        if key not in self.inserted:
            parent_path, _, name = path.replace("#", "_").rpartition(".")
            parent = self.root.get_submodule(parent_path)
            while hasattr(parent, name):
                name += "_"
            module.train(self.root.training)
            parent.add_module(name, module)
            self.inserted[key] = join(parent_path, name)
        return self.graph.call_module(self.inserted[key], (value,))

    def _call_layer(self, node: fx.Node, layer: str) -> None:
        """Turn `F.linear(x, layer.weight, bias)` into `layer(x) + bias`."""
        relative = layer.removeprefix(self.region.path + ".") if self.region.path else layer
        names = ("input", "weight", "bias")
        given = dict(zip(names, node.args[:3], strict=False)) | {
            k: v for k, v in node.kwargs.items() if k in names
        }
        rest = tuple(node.args[3:])
        options = {k: v for k, v in node.kwargs.items() if k not in names}
        ticket = self.layers[layer]
        function: Any = node.target
        with self.graph.inserting_before(node):
            if isinstance(ticket, TicketParameter):
                call = self.graph.call_module(
                    f"{relative}_ticket", (given["input"], function.__name__, *rest), options
                )
            elif (
                rest
                or options
                or (
                    ticket.output_bias is not None
                    and not self._is_own_bias(given.get("bias"), relative)
                )
            ):
                bias = given.get("bias")
                fetched = self.graph.get_attr(relative)
                if self._is_own_bias(bias, relative):
                    bias = self.graph.call_function(getattr, (fetched, "output_bias"))
                # Fx can write names into its code, but not functions.
                name = getattr(node.target, "__name__", "")
                call = self.graph.call_method(
                    "run", (fetched, name, given["input"], bias, *rest), options
                )
                given["bias"] = None
            else:
                call = self.graph.call_module(relative, (given["input"],))
            bias = given.get("bias")
            if isinstance(bias, fx.Node) and not self._is_own_bias(bias, relative):
                shape = (-1,) + (1,) * _spatial_dims(function)
                call = self.graph.call_function(
                    torch.add, (call, self.graph.call_method("view", (bias, *shape)))
                )
        self._replace(node, call)

    def _is_own_bias(self, bias: Any, layer: str) -> bool:
        return (
            isinstance(bias, fx.Node) and bias.op == "get_attr" and bias.target == f"{layer}.bias"
        )


def _spatial_dims(function: Any) -> int:
    return {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}.get(function, 0)


def _move_marks(node: fx.Node, other: fx.Node) -> None:
    """Move the marks of where a part of the original `forward` begins or ends."""
    for role in ("result_of", "input_of"):
        if role in node.meta:
            other.meta[role] = node.meta.pop(role)


def _site(node: fx.Node) -> str:
    return node.meta["site"]


def _replace_first_input(reader: fx.Node, value: fx.Node, quantized: fx.Node) -> None:
    """Replace the layer's input only: the value may enter the same call in another role too."""
    if reader.args and reader.args[0] is value:
        reader.update_arg(0, quantized)
    else:
        key = next(key for key, one in reader.kwargs.items() if one is value)
        reader.update_kwarg(key, quantized)


def split_fused_norms_(graphs: list[fx.Graph], root: nn.Module) -> None:
    """Drop the activation inside norms that were traced as two calls."""
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_module"]
    for norm in sorted({str(node.target) for node in nodes if node.meta.get("norm_only")}):
        module = root.get_submodule(norm)
        parent_path, _, name = norm.rpartition(".")
        last = (layer_registry.fused_activation(module) or [module])[-1]
        if last is not module:  # forward hooks of the module belong to its activation
            copy_hooks_(module, last, before=False, behind=True)
            module._forward_hooks.clear()
        for part in ("act", "drop"):
            original = module._modules.get(part)
            if original is not None:
                root.get_submodule(parent_path).add_module(f"{name}_{part}", original)
                for node in nodes:
                    if node.target == f"{norm}.{part}":
                        node.target = f"{norm}_{part}"
                        node.meta["site"] = node.meta["site"].replace(
                            f"{norm}.{part}", f"{norm}_{part}", 1
                        )
        layer_registry.without_activation(module)
