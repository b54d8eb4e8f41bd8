"""Make a plan from the regions of a network and a config.

With activations of at most 4 bits, the dataflow of each traced graph decides:

1. Each activation becomes a quantizer, with a BatchNorm before it unless its input is normalised.
2. Each ticket layer whose input is not quantized yet gets BatchNorm → quantizer on that edge.
   Layers that read the same value share one.
3. A max-pool after an activation moves up to right after the conv.
4. Pixels, and pooled features that enter the classifier, stay real.

With 8-bit activations the graphs stay as they are, and each ticket layer rounds its input.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from mptify.config import TicketConfig
from mptify.errors import BadConfig, CannotConvert, LeftDense, NothingToConvert
from mptify.nn.layers import Ticketed
from mptify.nn.quantizing_weight import CONTRACTIONS
from mptify.nn.topk import kept_count
from mptify.surgery import layer_registry
from mptify.surgery.dataflow import ValueInfo, analyze, argument, node_kind
from mptify.surgery.hooks import is_hooked
from mptify.surgery.plans import (
    LayerInput,
    LeftLayer,
    NormBefore,
    Obstacle,
    Plan,
    PlannedLayer,
    Reason,
    RegionEdits,
)
from mptify.surgery.trace import Region, Traced, is_opaque, join
from mptify.surgery.weights import other_parameters, weights_of

__all__ = ["make_plan"]


def make_plan(traced: Traced, config: TicketConfig, *, needs_layers: bool = True) -> Plan:
    """Decide what the surgery does, without changing the network.

    Raises:
        BadConfig: A pattern matches no layer.
        CannotConvert: The network is a ticket model already.
        LeftDense: With `strict`, a weight cannot be converted.
        NothingToConvert: There is no weight to convert, unless not `needs_layers`.
    """
    return _Planner(traced, config).plan(needs_layers)


@dataclass
class _Read:
    """One use of a layer's weight in a graph: the node, and the value it multiplies."""

    node: fx.Node
    layer: str
    value: fx.Node | None
    axis: int
    channels: int
    functional: bool = False


class _Planner:
    def __init__(self, traced: Traced, config: TicketConfig):
        self.traced, self.config = traced, config
        self.model = traced.model
        self.quantizes = config.quantizes_activations  # else the graph's edges stay
        self.rounds = config.activation_bits == 8
        if any(isinstance(module, Ticketed) for module in self.model.modules()):
            raise CannotConvert(
                "This is already a ticket model; convert the network that it was made from."
            )
        self.found = dict(weights_of(traced))
        if not self.found:
            raise NothingToConvert(
                "The model has no conv or linear weight, so there is nothing to convert."
            )
        self.others = list(other_parameters(traced, self.found.values()))
        self.obstacles = self._shared_elsewhere() | self._used_otherwise()
        # Layers by name: what the passes over the graphs find out about them.
        self.inputs: dict[str, LayerInput] = {}
        self.reached: set[str] = set()  # by `forward`
        self.pixel_readers: set[str] = set()
        self.last: list[str] = []
        self.quantizes_input: set[str] = set()  # see PlannedLayer for these three
        self.separate_inputs: dict[str, tuple[str, ...]] = {}
        self.escapes: set[str] = set()
        # Activations, and their parameters.
        self.kept_activations: list[str] = []
        self.late_quantizers: set[str] = set()
        self.dropped: dict[str, None] = {}

    def plan(self, needs_layers: bool) -> Plan:
        self._check_patterns()
        self._find_ends()
        reasons = self._reasons_to_leave()
        edits = {}
        for region in self.traced.regions:
            if region.is_layer:
                self._untraced_layer(region, reasons)
            else:
                edits[region.path] = {
                    mode: self._plan_graph(region, graph, reasons)
                    for mode, graph in region.graphs.items()
                }
        self._note_kept_activations()
        layers, left = self._account(reasons)
        if needs_layers and not layers:
            raise NothingToConvert(
                f"Nothing is left to convert: {left[0].name} and {len(left) - 1} more stay dense "
                f"({left[0].reason})."
            )
        unasked = [one for one in left if not one.obstacle.reason.is_asked]
        if self.config.strict and unasked:
            raise LeftDense(
                f"{unasked[0].name} would stay dense ({unasked[0].reason}), and {len(unasked) - 1} "
                "more; strict=False allows it."
            )
        held = tuple(
            name for name, parameter in self.model.named_parameters() if not parameter.requires_grad
        )
        return Plan(
            self.config,
            layers,
            left,
            edits,
            self.traced.untraced,
            self.kept_activations,
            sorted(self.late_quantizers),
            tables=tuple(
                (other.name, tuple(other.tensor.shape))
                for other in self.others
                if not other.obstacle
            ),
            dropped=tuple(self.dropped),
            held=held,
        )

    # -- which layers ------------------------------------------------------------------------------

    def _check_patterns(self) -> None:
        names = [*self.found, *(other.name for other in self.others if other.obstacle)]
        given = {
            "include": self.config.include,
            "exclude": self.config.exclude,
            "prune_overrides": tuple(self.config.prune_overrides),
        }
        for setting, patterns in given.items():
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
                    raise BadConfig(
                        f"{setting}={pattern!r} matches no layer of this model; it has "
                        f"{', '.join(near)}, ..."
                    )

    def _find_ends(self) -> None:
        """Find the layers that read pixels, and those that come last."""
        for region in self.traced.regions:
            for graph in region.graphs.values():
                infos = analyze(graph, region.module, region.path == "", quantized=False)
                reads = list(self._reads(region, graph))
                ends = _downstream_free([read.node for read in reads])
                for read in reads:
                    if (
                        read.value is not None and infos[read.value].pixels
                    ) or self._looks_like_pixels(region, read):
                        self.pixel_readers.add(read.layer)
                    if region.path == "" and read.node in ends:
                        self.last.append(read.layer)
        first = next(iter(self.found))
        if any(region.is_layer and region.path == first for region in self.traced.regions):
            self.pixel_readers.add(first)
        if not self.last:
            self.last = [list(self.found)[-1]]

    def _looks_like_pixels(self, region: Region, read: _Read) -> bool:
        """Whether a region of an untraced model feeds its input to what seems to be a first layer.

        That is the model's first layer, or a conv with equally few input channels.
        """
        if region.path == "" or read.value is None or read.value.op != "placeholder":
            return False
        first = next(iter(self.found))
        return read.layer == first or (
            read.axis == 1 and read.channels <= 4 and read.channels == self.found[first].inputs
        )

    def _reasons_to_leave(self) -> dict[str, Obstacle]:
        config, reasons = self.config, {}
        for name, weight in self.found.items():
            if config.include and not any(fnmatchcase(name, pattern) for pattern in config.include):
                reasons[name] = Obstacle(Reason.NOT_INCLUDED)
            elif any(fnmatchcase(name, pattern) for pattern in config.exclude):
                reasons[name] = Obstacle(Reason.EXCLUDED)
            elif "first" in config.dense and name in self.pixel_readers:
                reasons[name] = Obstacle(Reason.FIRST_LAYER)
            elif "last" in config.dense and name in self.last:
                reasons[name] = Obstacle(Reason.LAST_LAYER)
            elif "depthwise" in config.dense and weight.depthwise:
                reasons[name] = Obstacle(Reason.DEPTHWISE)
            elif weight.obstacle or name in self.obstacles:
                reasons[name] = weight.obstacle or self.obstacles[name]
        for owner in {weight.owner for weight in self.found.values() if weight.arguments}:
            parts = [name for name in self.found if name.rpartition(".")[0] == owner]
            left = [reasons[name] for name in parts if name in reasons]
            if left:
                reasons |= dict.fromkeys(parts, replace(left[0], with_owner=True))
        return reasons

    def _shared_elsewhere(self) -> dict[str, Obstacle]:
        """Weights shared with modules that are not layers, such as embeddings."""
        slots = {
            (weight.owner if weight.functional else name, weight.attribute)
            for name, weight in self.found.items()
        }
        elsewhere: dict[int, str] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for name, parameter in module._parameters.items():
                if (
                    parameter is not None
                    and (path, name) not in slots
                    and (self._names[id(module)], name) not in slots
                ):
                    elsewhere[id(parameter)] = join(path, name)
        found = ((name, elsewhere.get(id(weight.tensor))) for name, weight in self.found.items())
        return {name: Obstacle(Reason.SHARED, other) for name, other in found if other is not None}

    def _used_otherwise(self) -> dict[str, Obstacle]:
        """Layers whose weight or bias a graph uses as a ticket layer does not support."""
        odd: dict[str, Obstacle] = {}
        gone = (
            self.config.activation_bits <= 8 or self.config.bias == "drop"
        )  # whether `layer.bias` will be None
        for region in self.traced.regions:
            nodes = [
                node
                for graph in region.graphs.values()
                for node in graph.nodes
                if node.op == "get_attr"
            ]
            for node in nodes:
                full = join(region.path, str(node.target))
                layer, _, attribute = full.rpartition(".")
                reader = self._owner_of(region, str(node.target))
                for user in node.users:
                    known = user.op == "call_function" and (
                        user.target in CONTRACTIONS or is_opaque(user.target)
                    )
                    if layer in self.found and attribute == "bias" and gone and not known:
                        odd[layer] = Obstacle(Reason.BIAS_READ)
                    elif (
                        reader is not None
                        and self.config.activation_bits <= 8
                        and not known
                        and not _reads_metadata(user)
                        and user.op != "output"
                    ):
                        odd[reader] = Obstacle(
                            Reason.ODD_OPERATION, layer_registry.target_name(user.target)
                        )
        return odd

    def _account(self, reasons: dict[str, Obstacle]) -> tuple[list[PlannedLayer], list[LeftLayer]]:
        layers: list[PlannedLayer] = []
        left: list[LeftLayer] = []
        owners: dict[int, str] = {}
        for name, weight in self.found.items():
            if name not in reasons and name not in self.reached:
                reasons[name] = Obstacle(Reason.NOT_REACHED)
            if name in reasons:
                left.append(LeftLayer(name, weight.count, reasons[name]))
                continue
            tied_to = owners.setdefault(id(weight.tensor), name)
            layers.append(
                PlannedLayer(
                    name=name,
                    kind=weight.kind,
                    shape=tuple(weight.tensor.shape),
                    in_channels=weight.inputs,
                    kept=kept_count(weight.count, self.config.prune_of(tied_to)),
                    input=self.inputs.get(name, LayerInput.REAL),
                    owner=weight.owner,
                    functional=weight.functional,
                    tied_to="" if tied_to == name else tied_to,
                    depthwise=weight.depthwise,
                    quantizes_input=name in self.quantizes_input,
                    separate_inputs=self.separate_inputs.get(name, ()),
                    weight_escapes=name in self.escapes,
                )
            )
        for other in self.others:
            if other.obstacle:
                asked = any(fnmatchcase(other.name, pattern) for pattern in self.config.exclude)
                left.append(
                    LeftLayer(
                        other.name,
                        other.tensor.numel(),
                        Obstacle(Reason.EXCLUDED) if asked else other.obstacle,
                    )
                )
        return layers, left

    # -- layers called from code that can't be traced ----------------------------------------------

    def _untraced_layer(self, region: Region, reasons: dict[str, Obstacle]) -> None:
        inside = [
            name
            for name in self.found
            if name == region.path or name.startswith(f"{region.path}.") or not region.path
        ]
        for name in inside:
            self.reached.add(name)
            if self.config.activation_bits == 32 or name in reasons:
                continue
            if self.quantizes and name in self.pixel_readers:
                self.inputs[name] = LayerInput.PIXELS
            elif self.quantizes and self._is_classifier(region.module):
                self.inputs[name] = LayerInput.POOLED
            else:
                self.quantizes_input.add(name)
                self.escapes.add(name)  # code that can't be traced may read its weight
                self.inputs[name] = LayerInput.ROUNDED if self.rounds else LayerInput.NORM_QUANTIZER
                arguments = self.found[name].arguments
                if len(arguments) > 1 and not self._reads_one_value(region.module, arguments):
                    self.separate_inputs[name] = arguments[1:]

    def _reads_one_value(self, composite: nn.Module, arguments: tuple[str, ...]) -> bool:
        """Whether all callers of a composite pass one and the same value for these arguments."""
        calls = []
        for region in self.traced.regions:
            for graph in region.graphs.values():
                nodes = [node for node in graph.nodes if node.op == "call_module"]
                calls += [n for n in nodes if region.module.get_submodule(n.target) is composite]
        if not calls:  # no caller could be traced; torch's own encoder is known
            parts = self.model.modules()
            encoders = [part for part in parts if isinstance(part, nn.TransformerEncoderLayer)]
            return any(encoder.self_attn is composite for encoder in encoders)
        names = list(inspect.signature(composite.forward).parameters)
        inputs = [[argument(n, names.index(name), name) for name in arguments] for n in calls]
        return all(value is values[0] for values in inputs for value in values)

    def _is_classifier(self, module: nn.Module) -> bool:
        getter = getattr(self.model, "get_classifier", None)
        return callable(getter) and getter() is module

    def _may_come_last(self, layer: str) -> bool:
        """Whether a layer may be the last of a network that is traced in parts."""
        weight = self.found[layer]
        return layer in self.last or self._is_classifier(
            self.model.get_submodule(weight.owner if weight.functional else layer)
        )

    def _note_kept_activations(self) -> None:
        if not self.quantizes and self.config.bn != "insert":
            return
        regions = [region for region in self.traced.regions if region.graphs]
        handled = {
            join(r.path, str(n.target))
            for r in regions
            for g in r.graphs.values()
            for n in g.nodes
            if n.op == "call_module"
        }
        for name, module in self.model.named_modules():
            inside = any(name.startswith(path + ".") or not path for path in self.traced.untraced)
            if inside and layer_registry.is_activation(module) and name not in handled:
                self.kept_activations.append(name)

    # -- one graph ---------------------------------------------------------------------------------

    def _reads(self, region: Region, graph: fx.Graph) -> Iterator[_Read]:
        """Every use of a weight in the graph."""
        for node in graph.nodes:
            if node.op == "call_module":
                name = join(region.path, self._canonical(region, node.target))
                if name in self.found:
                    weight = self.found[name]
                    value = next(
                        (one for one in node.args if isinstance(one, fx.Node)), None
                    ) or next(iter(node.all_input_nodes), None)
                    yield _Read(node, name, value, weight.axis, weight.inputs)
            elif node.op == "get_attr":
                owner = self._owner_of(region, str(node.target))
                if owner is None:
                    continue
                weight = self.found[owner]
                for user in node.users:
                    if (
                        user.op == "call_function"
                        and user.target in CONTRACTIONS
                        and argument(user, 1, "weight") is node
                    ):
                        yield _Read(
                            user,
                            owner,
                            argument(user, 0, "input"),
                            weight.axis,
                            weight.inputs,
                            functional=True,
                        )
                    elif user.op != "output" and not _reads_metadata(user):
                        yield _Read(user, owner, None, weight.axis, weight.inputs, functional=True)

    def _canonical(self, region: Region, target: Any) -> str:
        module = region.module.get_submodule(target)
        if id(module) not in self._names:
            return str(target)
        name = self._names[id(module)]
        return name.removeprefix(region.path + ".") if region.path else name

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(module): name for name, module in self.model.named_modules()}

    def _owner_of(self, region: Region, target: str) -> str | None:
        full = join(region.path, target)
        if full in self.found:
            return full
        owner, _, attribute = full.rpartition(".")
        weight = self.found.get(owner)
        return owner if weight is not None and attribute == weight.attribute else None

    def _plan_graph(
        self, region: Region, graph: fx.Graph, reasons: dict[str, Obstacle]
    ) -> RegionEdits:
        """The edits of one graph; notes on the way what each layer reads."""
        edits = RegionEdits()
        reads = list(self._reads(region, graph))
        self.reached.update(read.layer for read in reads)
        if self.rounds:
            self._round_reads(reads, reasons)
        if not self.quantizes and self.config.bn == "keep":
            return edits
        kinds = {
            node: node_kind(
                node, region.module.get_submodule(node.target) if node.op == "call_module" else None
            )
            for node in graph.nodes
        }
        activations = [node for node in graph.nodes if kinds[node] == "activation"]
        if not self.quantizes:
            infos = analyze(graph, region.module, region.path == "", quantized=False)
            for node in activations:
                if not infos[_input(node)].normalised:
                    edits.norms[node.name] = _norm_for(infos[_input(node)], node, kinds, region)
            self._move_pools(edits, graph, kinds, set(edits.norms), region)
            return edits
        summed = analyze(graph, region.module, region.path == "", quantized=True)
        vanished = {
            node
            for node in activations
            if self.config.residual == "real" and summed[_input(node)].summed
        }
        edits.vanished = [node.name for node in graph.nodes if node in vanished]
        infos = analyze(graph, region.module, region.path == "", quantized=True, passing=vanished)
        for node in activations:
            self.dropped |= dict.fromkeys(_own_parameters(node, region))
            if node not in vanished:
                value = infos[_input(node)]
                edits.quantizers[node.name] = (
                    None if value.normalised else _norm_for(value, node, kinds, region)
                )
        if region.path == "" and self.traced.whole:
            late = _downstream_free(
                [node for node in activations if node not in vanished],
                {read.node for read in reads},
            )
            self.late_quantizers.update(join(region.path, node.meta["site"]) for node in late)
        self._move_pools(edits, graph, kinds, set(edits.quantizers), region)
        self._quantize_reads(edits, region, reads, infos, reasons)
        return edits

    def _quantize_reads(
        self,
        edits: RegionEdits,
        region: Region,
        reads: list[_Read],
        infos: dict[fx.Node, ValueInfo],
        reasons: dict[str, Obstacle],
    ) -> None:
        ends = _downstream_free([read.node for read in reads])
        for read in reads:
            if read.layer in reasons:
                continue
            if read.value is None:
                self.escapes.add(read.layer)
                self.quantizes_input.add(read.layer)
                self.inputs[read.layer] = LayerInput.NORM_QUANTIZER
                continue
            if read.functional:
                edits.calls[read.node.name] = read.layer
            info = infos[read.value]
            if self.found[read.layer].arguments:
                continue
            if read.layer in self.pixel_readers:
                self.inputs[read.layer] = LayerInput.PIXELS
            elif info.quantized:
                self.inputs.setdefault(read.layer, LayerInput.QUANTIZED)
            elif (
                info.pooled
                and read.node in ends
                and (region.path == "" or self._may_come_last(read.layer))
            ):
                self.inputs[read.layer] = LayerInput.POOLED
            else:
                norm = None if info.normalised else NormBefore(read.channels, read.axis)
                edits.edges.setdefault(read.value.name, norm)
                edits.readers.setdefault(read.value.name, []).append(read.node.name)
                self.inputs[read.layer] = (
                    LayerInput.QUANTIZER if info.normalised else LayerInput.NORM_QUANTIZER
                )

    def _round_reads(self, reads: list[_Read], reasons: dict[str, Obstacle]) -> None:
        """Let each layer round its input; code that multiplies by its weight goes through it."""
        for read in reads:
            if read.layer not in reasons:
                self.inputs[read.layer] = LayerInput.ROUNDED
                self.quantizes_input.add(read.layer)
                if read.functional or read.value is None:
                    self.escapes.add(read.layer)

    def _move_pools(
        self,
        edits: RegionEdits,
        graph: fx.Graph,
        kinds: dict[fx.Node, str],
        changed: set[str],
        region: Region,
    ) -> None:
        for node in graph.nodes:
            if kinds[node] not in ("maxpool", "max_pool1d", "max_pool2d", "max_pool3d"):
                continue
            activation = _input(node)
            if node.op == "call_module" and getattr(
                region.module.get_submodule(node.target), "return_indices", False
            ):
                continue
            # Hooks expect values of the original size.
            if any(_has_hooks(one, region) for one in (node, activation)):
                continue
            if activation is None or activation.name not in changed or len(activation.users) > 1:
                continue
            above = _input(activation)
            if kinds[above] == "batchnorm" and len(above.users) == 1:
                above = _input(above)
            if kinds[above] == "layer" and len(above.users) == 1:
                handler = layer_registry.find(region.module.get_submodule(above.target))
                if handler is not None and handler.axis == 1:
                    edits.pools[node.name] = above.name


def _norm_for(
    info: ValueInfo, node: fx.Node, kinds: dict[fx.Node, str], region: Region
) -> NormBefore:
    if info.channels is not None and info.axis in (1, -1):
        return NormBefore(info.channels, info.axis)
    reader: fx.Node | None = (
        node  # else take what the next layer expects, if nothing in between moves the channels
    )
    while reader is not None and len(reader.users) == 1:
        reader = next(iter(reader.users))
        if kinds[reader] == "layer":
            handler = layer_registry.find(region.module.get_submodule(str(reader.target)))
            assert handler is not None
            return NormBefore(handler.inputs, handler.axis)
        if kinds[reader] not in ("identity", "dropout", "dropout0", "maxpool", "avgpool"):
            break
    return NormBefore(None)


def _has_hooks(node: fx.Node | None, region: Region) -> bool:
    return (
        node is not None
        and node.op == "call_module"
        and is_hooked(region.module.get_submodule(str(node.target)))
    )


def _own_parameters(activation: fx.Node, region: Region) -> list[str]:
    """The parameters of an activation, such as the slopes of a PReLU."""
    if activation.op == "call_module":
        names = region.module.get_submodule(str(activation.target)).named_parameters()
        return [join(join(region.path, str(activation.target)), name) for name, _ in names]
    return [
        join(region.path, str(node.target))
        for node in activation.all_input_nodes[1:]
        if node.op == "get_attr"
    ]


def _input(node: fx.Node) -> Any:
    return next((one for one in node.all_input_nodes), None)


def _reads_metadata(node: fx.Node) -> bool:
    """Whether a node reads only the type or shape of a weight."""
    return node.op == "call_function" and layer_registry.target_name(node.target) == "getattr"


def _downstream_free(nodes: list[fx.Node], targets: set[fx.Node] | None = None) -> set[fx.Node]:
    """The nodes that lead to none of `targets`, by default the nodes themselves."""
    if not nodes:
        return set()
    inner = set(nodes) if targets is None else targets
    leads: dict[fx.Node, bool] = {}
    for node in reversed(list(nodes[0].graph.nodes)):
        leads[node] = any(user in inner or leads[user] for user in node.users)
    return {node for node in nodes if not leads[node]}
