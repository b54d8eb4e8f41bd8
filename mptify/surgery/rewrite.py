"""From a plan to a ticket model: swap the layers, then edit the graphs of the regions whose edges change."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from mptify.errors import MptifyError
from mptify.layers import SharedThreshold, Ticketed, TicketParameter, apply_weight
from mptify.norms import ChannelBatchNorm, ScalarBatchNorm, Sign, TokenBatchNorm
from mptify.spec import TicketSpec
from mptify.surgery import handlers
from mptify.surgery.attention import TicketMultiheadAttention
from mptify.surgery.plan import NormBefore, Plan, PlannedLayer, RegionEdits
from mptify.surgery.trace import Region, Traced, join

__all__ = ["TicketGraph", "rewrite"]


def rewrite(traced: Traced, plan: Plan) -> nn.Module:
    """Carry out `plan` on the copy that `traced` holds, and return it. The traced copy is used up.

    Afterwards nothing is shared with the original model, and only what the spec names requires grad.
    """
    model: Any = traced.model
    spec = plan.spec
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    answers = _answers_of(model)
    _own_tensors_(model, plan)
    layers = _swap_layers_(model, plan)
    model = layers.get("", model)  # the model was a single layer
    for region in traced.regions:
        edits = plan.edits.get(region.path)
        if edits and any(edits.values()):
            graph = _edited_region(region, edits, layers, spec, device)
            if region.path:
                _replace_everywhere_(model, {id(model.get_submodule(region.path)): graph})
            else:
                model = graph
    for layer in layers.values():
        if layer.before is not None:
            layer.before.train(layer.training)
    if spec.init != "keep":
        _reset_norms_(model)
    if spec.scope == "global":
        SharedThreshold(list(layers.values()), spec.prune, spec.floor)
    _let_train_(model, spec)
    model.ticket_plan = plan
    if isinstance(model, TicketGraph):
        model.remember("ticket_plan")
        model.keep_answers_(answers)
    return model


# -- layers --------------------------------------------------------------------------------------------------------------


def _own_tensors_(model: nn.Module, plan: Plan) -> None:
    """Give the copy tensors of its own, except where a weight is about to be replaced."""
    replaced = set() if plan.spec.init == "keep" else {_place_of(model, layer) for layer in plan.layers}
    copies: dict[int, Any] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None or (id(module), name) in replaced:
                    continue
                if id(tensor) not in copies:
                    fresh = tensor.detach().clone()
                    copies[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
                store[name] = copies[id(tensor)]


def _place_of(model: nn.Module, layer: PlannedLayer) -> tuple[int, str]:
    """Where the weight of a planned layer hangs: which module, and under which name."""
    if layer.owner or layer.kind.startswith("F."):
        return id(model.get_submodule(layer.owner)), layer.name.rpartition(".")[2]
    module = model.get_submodule(layer.name)
    handler = handlers.find(module)
    assert handler is not None
    return id(module), handler.weight


def _tensor_of(model: nn.Module, layer: PlannedLayer) -> Any:
    if layer.owner or layer.kind.startswith("F."):
        return model.get_submodule(layer.owner)._parameters.get(layer.name.rpartition(".")[2])
    module = model.get_submodule(layer.name)
    handler = handlers.find(module)
    assert handler is not None
    return module._parameters.get(handler.weight)


def _swap_layers_(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Put ticket layers in place of the planned ones, wherever they are used; returns them by name."""
    tickets: dict[str, Any] = {}
    swaps: dict[int, nn.Module] = {}
    bare: dict[str, dict[str, Any]] = {}
    for planned in plan.layers:
        if planned.owner or planned.kind.startswith("F."):
            parameter = _tensor_of(model, planned)
            axis = 1 if planned.kind.startswith("F.conv") else -1
            fan_in = parameter[0].numel()
            ticket: Any = TicketParameter(parameter, plan.spec, name=planned.name, fan_in=fan_in, axis=axis)
            bare.setdefault(planned.owner, {})[planned.name.rpartition(".")[2]] = ticket
        else:
            original = model.get_submodule(planned.name)
            handler = handlers.find(original)
            assert handler is not None
            ticket = handler.convert(original, plan.spec, planned.name)
            swaps[id(original)] = ticket
        if planned.tied_to:
            ticket.tie_to_(tickets[planned.tied_to])
        ticket._escapes = planned.escapes
        if planned.binarizes:
            channels = _inputs_of(ticket)
            norm = NormBefore(channels, ticket.channel_axis)
            ticket.before = nn.Sequential(_make_norm(norm, plan.spec, ticket.scores.device), Sign(plan.spec.sign_width))
        tickets[planned.name] = ticket
    _replace_everywhere_(model, swaps)
    for owner_name, parameters in bare.items():
        owner = model.get_submodule(owner_name)
        for ticket in parameters.values():
            ticket.train(owner.training)
        if isinstance(owner, nn.MultiheadAttention):
            TicketMultiheadAttention.take_over_(owner, parameters)
        else:
            _give_properties_(owner, parameters)
        if plan.spec.bias == "drop" and isinstance(owner, nn.MultiheadAttention):
            owner.register_parameter("in_proj_bias", None)
    return tickets


def _inputs_of(ticket: Any) -> int:
    if isinstance(ticket, TicketParameter):
        return ticket.frozen.shape[1]
    handler = handlers.find(ticket)
    assert handler is not None
    return handler.inputs


def _replace_everywhere_(model: nn.Module, swaps: dict[int, nn.Module]) -> None:
    """Put each replacement wherever the original hangs, under all of its names."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and id(child) in swaps:
                parent._modules[name] = swaps[id(child)]


def _give_properties_(owner: nn.Module, parameters: dict[str, Any]) -> None:
    """Let `owner.<name>` compute the ticket's weight, for a `forward` that uses the bare parameter itself."""
    for attribute, ticket in parameters.items():
        del owner._parameters[attribute]
        owner.add_module(f"{attribute}_ticket", ticket)
    owner.__class__ = _owner_class(type(owner), tuple(sorted(parameters)))


_OWNER_CLASSES: dict[tuple, type] = {}


def _owner_class(base: type, attributes: tuple[str, ...]) -> type:
    key = (base, attributes)
    if key not in _OWNER_CLASSES:
        body: dict[str, Any] = {name: _computed_weight(name) for name in attributes}
        body["__reduce__"] = lambda self: (_empty_owner, (base, attributes), self.__dict__)
        body["__module__"] = base.__module__
        body["original_type"] = base
        _OWNER_CLASSES[key] = type(base.__name__, (base,), body)
    return _OWNER_CLASSES[key]


def _computed_weight(name: str) -> property:
    return property(lambda self: self._modules[f"{name}_ticket"].weight)


def _empty_owner(base: type, attributes: tuple[str, ...]) -> Any:
    cls: Any = _owner_class(base, attributes)
    return cls.__new__(cls)


def _make_norm(norm: NormBefore, spec: TicketSpec, device: torch.device) -> nn.Module:
    if norm.channels is None:
        return ScalarBatchNorm(affine=spec.learn_bn, device=device)
    if norm.axis == -1:
        return TokenBatchNorm(norm.channels, affine=spec.learn_bn, device=device)
    return ChannelBatchNorm(norm.channels, affine=spec.learn_bn, device=device)


# -- graphs --------------------------------------------------------------------------------------------------------------


def _edited_region(
    region: Region, edits: dict[bool, RegionEdits], layers: dict[str, Any], spec: TicketSpec, device: torch.device
) -> TicketGraph:
    root = region.module
    graphs: dict[bool, fx.Graph] = {}
    inserted: dict[Any, str] = {}
    _split_fused_norms_(list(region.graphs.values()), root)
    for training, graph in region.graphs.items():
        editor = _GraphEditor(region, graph, edits[training], layers, spec, device, inserted)
        graphs[training] = editor.edit()
    return TicketGraph.of(root, graphs)


class _GraphEditor:
    def __init__(
        self,
        region: Region,
        graph: fx.Graph,
        edits: RegionEdits,
        layers: dict[str, Any],
        spec: TicketSpec,
        device: Any,
        inserted: dict[Any, str],
    ):
        self.region, self.graph, self.edits, self.layers = region, graph, edits, layers
        self.root, self.spec, self.device = region.module, spec, device
        self.nodes = {node.name: node for node in graph.nodes}
        self.inserted = inserted  # by site and role, over both modes: where the module hangs

    def edit(self) -> fx.Graph:
        for pool, conv in self.edits.pools.items():
            self._move_pool(self.nodes[pool], self.nodes[conv])
        for name in self.edits.vanished:
            node = self.nodes[name]
            self.nodes[name] = node.all_input_nodes[0]
            node.replace_all_uses_with(self.nodes[name])
            self.graph.erase_node(node)
        for name, inserted in self.edits.norms.items():
            node = self.nodes[name]
            value = node.all_input_nodes[0]
            node.replace_input_with(value, self._normalised(value, inserted, node, _site(node)))
        for name, norm in self.edits.signs.items():
            self._sign_for_activation(self.nodes[name], norm)
        for name, norm in self.edits.edges.items():
            self._sign_on_edge(self.nodes[name], norm, [self.nodes[reader] for reader in self.edits.readers[name]])
        for name, layer in self.edits.calls.items():
            self._call_layer(self.nodes[name], layer)
        self._read_through_tickets()
        self._make_out_of_place()
        for node in reversed(list(self.graph.nodes)):  # weights that a layer now reads itself
            if node.op == "get_attr" and not node.users:
                self.graph.erase_node(node)
        self.graph.lint()
        return self.graph

    def _read_through_tickets(self) -> None:
        """`layer.weight` is computed now: fetch the layer and ask it, since fx would keep today's value as a buffer."""
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
        """In-place operations on what Sign saved for backward would be an error; `x += y` becomes `x + y`."""
        swaps = {operator.iadd: operator.add, operator.imul: operator.mul, operator.isub: operator.sub}
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target in swaps:
                node.target = swaps[node.target]

    def _move_pool(self, pool: fx.Node, conv: fx.Node) -> None:
        """... conv -> (norm) -> activation -> pool -> ... becomes conv -> pool -> (norm) -> activation -> ..."""
        activation = pool.all_input_nodes[0]
        pool.replace_all_uses_with(activation)
        below = next(iter(conv.users))
        conv.append(pool)
        pool.replace_input_with(activation, conv)
        below.replace_input_with(conv, pool)

    def _sign_for_activation(self, node: fx.Node, norm: NormBefore | None) -> None:
        value = node.all_input_nodes[0]
        with self.graph.inserting_before(node):
            if norm is not None:
                value = self._normalised(value, norm, node, _site(node))
            sign = self._call(f"{_site(node)}_sign", (node.meta["key"], "sign"), Sign(self.spec.sign_width), value)
        node.replace_all_uses_with(sign)
        self.graph.erase_node(node)

    def _sign_on_edge(self, value: fx.Node, norm: NormBefore | None, readers: list[fx.Node]) -> None:
        site = f"{_site(readers[0])}_input"
        with self.graph.inserting_before(readers[0]):
            signed = value if norm is None else self._normalised(value, norm, readers[0], site)
            signed = self._call(f"{site}_sign", (readers[0].meta["key"], "input", "sign"), Sign(self.spec.sign_width), signed)
        for reader in readers:
            _replace_first_input(reader, value, signed)

    def _normalised(self, value: fx.Node, norm: NormBefore, before: fx.Node, site: str) -> fx.Node:
        with self.graph.inserting_before(before):
            return self._call(
                f"{site}_norm", (before.meta["key"], site.endswith("_input"), "norm"), _make_norm(norm, self.spec, self.device), value
            )

    def _call(self, path: str, key: Any, module: nn.Module, value: fx.Node) -> fx.Node:
        """A call of an inserted module: the one that the other mode's graph put at the same site, or this new one."""
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
        """`F.linear(x, layer.weight, bias)` becomes `layer(x) + bias`: binarized input, gain on the output."""
        relative = layer.removeprefix(self.region.path + ".") if self.region.path else layer
        names = ("input", "weight", "bias")
        given = dict(zip(names, node.args[:3], strict=False)) | {k: v for k, v in node.kwargs.items() if k in names}
        rest = tuple(node.args[3:])
        options = {k: v for k, v in node.kwargs.items() if k not in names}
        ticket = self.layers[layer]
        function: Any = node.target
        with self.graph.inserting_before(node):
            if isinstance(ticket, TicketParameter):
                call = self.graph.call_module(f"{relative}_ticket", (given["input"], function.__name__, *rest), options)
            elif rest or options or (ticket.offset is not None and not self._is_own_bias(given.get("bias"), relative)):
                bias = given.get("bias")
                fetched = self.graph.get_attr(relative)
                if self._is_own_bias(bias, relative):
                    bias = self.graph.call_function(getattr, (fetched, "offset"))
                name = getattr(node.target, "__name__", "")  # fx can write names into its code, not functions
                call = self.graph.call_function(apply_weight, (fetched, name, given["input"], bias, *rest), options)
                given["bias"] = None
            else:
                call = self.graph.call_module(relative, (given["input"],))
            bias = given.get("bias")
            if isinstance(bias, fx.Node) and not self._is_own_bias(bias, relative):
                shape = (-1,) + (1,) * _spatial_dims(function)
                call = self.graph.call_function(torch.add, (call, self.graph.call_method("view", (bias, *shape))))
        node.replace_all_uses_with(call)
        self.graph.erase_node(node)

    def _is_own_bias(self, bias: Any, layer: str) -> bool:
        return isinstance(bias, fx.Node) and bias.op == "get_attr" and bias.target == f"{layer}.bias"


def _spatial_dims(function: Any) -> int:
    return {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}.get(function, 0)


def _site(node: fx.Node) -> str:
    return node.meta["site"]


def _replace_first_input(reader: fx.Node, value: fx.Node, signed: fx.Node) -> None:
    """Only the layer's input: a value may enter the same call in another role as well."""
    if reader.args and reader.args[0] is value:
        reader.update_arg(0, signed)
    else:
        key = next(key for key, one in reader.kwargs.items() if one is value)
        reader.update_kwarg(key, signed)


def _split_fused_norms_(graphs: list[fx.Graph], root: nn.Module) -> None:
    """Where a norm was traced apart from the activation inside it, the module keeps only the norm."""
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_module"]
    for norm in sorted({str(node.target) for node in nodes if node.meta.get("norm_only")}):
        module = root.get_submodule(norm)
        parent_path, _, name = norm.rpartition(".")
        for part in ("act", "drop"):
            original = module._modules.get(part)
            if original is not None:
                root.get_submodule(parent_path).add_module(f"{name}_{part}", original)
                for node in nodes:
                    if node.target == f"{norm}.{part}":
                        node.target = f"{norm}_{part}"
                        node.meta["site"] = node.meta["site"].replace(f"{norm}.{part}", f"{norm}_{part}", 1)
        handlers.without_activation(module)


class TicketGraph(fx.GraphModule):
    """A region whose edges were changed: an fx GraphModule, with one graph per mode where `train()` and `eval()` differ.

    It keeps what other code reads from the module it came from: plain attributes, and the methods of timm's that look at
    nothing else (`no_weight_decay`, `group_matcher`, `get_classifier`).
    """

    _graphs: dict[bool, fx.Graph]  # by mode; False also serves for a mode that has none
    original_type: type
    classifier_paths: tuple[str, ...]

    @classmethod
    def of(cls, root: nn.Module, graphs: dict[bool, fx.Graph]) -> TicketGraph:
        mode = root.training if root.training in graphs else False
        module = cls(root, graphs[mode], type(root).__name__)
        module._graphs = graphs
        for graph in graphs.values():  # whatever only the other mode calls
            for node in graph.nodes:
                if node.op in ("call_module", "get_attr"):
                    _copy_into_(module, root, str(node.target))
        for name, value in root.__dict__.items():
            if not name.startswith("_") and name != "training" and not hasattr(module, name):
                setattr(module, name, value)
                module.remember(name)
        module._bind_methods(getattr(type(root), "original_type", type(root)))
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"):
            module.__dict__[hooks] = root.__dict__[hooks].copy()
        module.train(root.training)
        for part, source in _pairs(module, root):
            part.training = source.training
        return module

    def remember(self, attribute: str) -> None:
        """Have `deepcopy` and pickle carry this attribute along: fx copies none but those it is told of."""
        self.meta.setdefault("_user_preserved_attributes", {})[attribute] = getattr(self, attribute)

    def _bind_methods(self, original: type) -> None:
        self.original_type = original
        self.remember("original_type")
        if self.__dict__.get("classifier_paths"):
            object.__setattr__(self, "get_classifier", types.MethodType(_get_classifier, self))

    def keep_answers_(self, answers: dict[str, Any]) -> None:
        """Answer as the original model did when asked for its classifier or for parameter groups: the names are the same."""
        self.classifier_paths = answers.pop("get_classifier", ())
        self.remember("classifier_paths")
        self._bind_methods(self.original_type)
        for name, answer in answers.items():
            object.__setattr__(self, name, functools.partial(_answer, answer))
            self.remember(name)

    def train(self, mode: bool = True) -> TicketGraph:
        graphs = self.__dict__.get("_graphs", {})
        wanted = graphs.get(mode, graphs.get(False))
        if wanted is not None and wanted is not self._graph:
            self.graph = wanted
        return super().train(mode)

    def __deepcopy__(self, memo: Any) -> TicketGraph:
        graphs, self._graphs = self._graphs, {}
        modules = self.__dict__["_modules"]
        try:
            copied: Any = super().__deepcopy__(memo)
        finally:
            self._graphs = graphs
        for name, module in modules.items():  # fx copies only what the active graph calls
            copied._modules[name] = copy.deepcopy(module, memo)
        copied._graphs = {mode: copied._graph if graph is self._graph else copy.deepcopy(graph) for mode, graph in graphs.items()}
        copied._bind_methods(self.original_type)
        copied.__dict__["training"] = self.training
        return copied

    def __reduce__(self) -> Any:
        if len(self._graphs) > 1:
            raise MptifyError("A model that runs differently in train() and eval() can't be pickled whole; save its state_dict() instead.")
        return super().__reduce__()


def _answers_of(model: nn.Module) -> dict[str, Any]:
    """What timm's optimizer factory asks a model, by method name and, for `group_matcher`, by its argument."""
    answers: dict[str, Any] = {}
    for name in ("no_weight_decay", "no_weight_decay_keywords"):
        if callable(getattr(model, name, None)):
            answers[name] = {None: getattr(model, name)()}
    matcher = getattr(model, "group_matcher", None)
    if callable(matcher):
        answers["group_matcher"] = {None: matcher(), False: matcher(False)}
        with contextlib.suppress(AssertionError):  # some models have no coarse groups
            answers["group_matcher"][True] = matcher(True)
    classifier = getattr(model, "get_classifier", None)
    if callable(classifier):
        heads = classifier() if isinstance(classifier(), tuple) else (classifier(),)
        names = {id(module): name for name, module in model.named_modules()}
        answers["get_classifier"] = tuple(names[id(head)] for head in heads if id(head) in names)
    return answers


def _get_classifier(self: TicketGraph) -> Any:
    heads = tuple(self.get_submodule(path) for path in self.classifier_paths)
    return heads if len(heads) > 1 else heads[0]


def _answer(answers: dict[Any, Any], coarse: Any = None) -> Any:
    if coarse not in answers:
        raise MptifyError("This model has no coarse parameter groups.")
    return answers[coarse]


def _copy_into_(module: nn.Module, root: nn.Module, target: str) -> None:
    *prefix, name = target.split(".")
    here, there = module, root
    for part in prefix:
        there = there._modules[part]  # type: ignore[assignment]
        if part not in here._modules:
            if here is not module and isinstance(here, type(there)):
                return
            here.add_module(part, nn.Module())
        here = here._modules[part]  # type: ignore[assignment]
    for store in ("_modules", "_parameters", "_buffers"):
        if name in getattr(there, store) and name not in getattr(here, store):
            getattr(here, store)[name] = getattr(there, store)[name]
    if not hasattr(here, name):  # a constant that `forward` made
        here.register_buffer(name, getattr(there, name), persistent=False)


def _pairs(module: nn.Module, root: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    ours = dict(module.named_modules())
    for name, source in root.named_modules():
        if name and name in ours:
            yield ours[name], source


# -- what trains ---------------------------------------------------------------------------------------------------------


def _reset_norms_(model: nn.Module) -> None:
    """Fresh frozen weights make old statistics and old scales meaningless: norms start at weight 1, bias 0."""
    for module in model.modules():
        if is_norm(module):
            for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
                tensor = getattr(module, name, None)
                if isinstance(tensor, torch.Tensor):
                    with torch.no_grad():
                        tensor.fill_(value)


def is_norm(module: nn.Module) -> bool:
    """BatchNorm, LayerNorm, GroupNorm and their like, from torch or anyone: a name is not enough, the weight must be a vector."""
    if isinstance(module, (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)):
        return True
    if isinstance(module, Ticketed) or "norm" not in type(module).__name__.lower() or any(True for _ in module.children()):
        return False
    return all(parameter is None or parameter.dim() <= 1 for parameter in module._parameters.values())


def _let_train_(model: nn.Module, spec: TicketSpec) -> None:
    """Exactly what the spec names requires grad."""
    kinds = parameter_kinds(model)
    allowed = {"scores": True, "norm": spec.learn_bn, "bias": spec.bias == "learn", "other": spec.other == "learn", "dense": True}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(allowed.get(kinds[name], False))


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """For each parameter: `scores`, `frozen`, `bias`, `norm`, `dense` (a conv or linear left out) or `other`."""
    kinds = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            if isinstance(module, Ticketed):
                kinds[full] = name if name in ("scores", "frozen") else "bias"
            elif isinstance(module, nn.MultiheadAttention) and name == "in_proj_bias":
                kinds[full] = "bias"
            elif handlers.find(module) is not None:
                kinds[full] = "dense"
            else:
                kinds[full] = "norm" if is_norm(module) else "other"
    return kinds
