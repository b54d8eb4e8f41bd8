"""Trace a model into regions: the largest parts of it that torch.fx can trace.

A region is a module whose `forward` was traced, or a single layer that is called from untraced
code. What fx cannot trace (control flow on values) keeps its Python `forward`, and its children
become regions. So tracing as a whole never fails.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from mptify.errors import CannotConvert, shown
from mptify.surgery import isolated, layer_registry
from mptify.surgery.callers import reason_to_keep_code
from mptify.surgery.graphs import FEATURES, HEAD, expect_default
from mptify.surgery.hooks import is_hooked
from mptify.surgery.isolated import IsolatedTracer, original_type

__all__ = ["Region", "Traced", "is_opaque", "join", "trace"]

_MAX_TRIES = 25

_PRIMITIVES = (
    nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd, nn.modules.dropout._DropoutNd, nn.Embedding,
    torch.jit.ScriptModule, isolated.ScriptStandIn,
)  # fmt: skip
# Random in train(), the identity in eval()
_REGULARIZERS = ("DropPath", "StochasticDepth", "DropBlock2d", "PatchDropout")


@dataclass
class Region:
    """A traced module, or a single layer that untraced code calls.

    `graphs` are its graphs by training mode; one entry if both modes run the same code.
    """

    path: str
    module: nn.Module
    graphs: dict[bool, fx.Graph] = field(default_factory=dict)

    @property
    def is_layer(self) -> bool:
        return not self.graphs


@dataclass
class Traced:
    """A copy of a model that shares its tensors, with its regions.

    `untraced` are the modules that keep their Python `forward`, with fx's reason.
    """

    model: nn.Module
    regions: list[Region]
    untraced: dict[str, str]

    @property
    def whole(self) -> bool:
        return not self.untraced


def trace(model: nn.Module) -> Traced:
    """Find the regions of `model`, on a copy that shares its tensors; the model does not change."""
    if not isinstance(model, nn.Module):
        raise CannotConvert(f"A network is needed, an nn.Module, not {shown(model)}.")
    copied = share_copy(model)
    traced = Traced(copied, [], {})
    seen: set[int] = set()
    _open(traced, "", copied, seen)
    return traced


def share_copy(model: nn.Module) -> nn.Module:
    """A copy of the module tree that shares all parameters and buffers."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        memo[id(tensor)] = tensor
        if tensor.is_leaf and tensor.grad is not None:
            memo[id(tensor.grad)] = tensor.grad
    for module in model.modules():  # results that hooks have stored, which deepcopy refuses
        memo.update(
            (id(tensor), tensor)
            for name, value in vars(module).items()
            if not name.startswith("_")
            for tensor in _tensors_in(value)
        )
    return copy.deepcopy(model, memo)


def _tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, set, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one, depth - 1)


def _open(
    traced: Traced, path: str, module: nn.Module, seen: set[int], caller: nn.Module | None = None
) -> None:
    """Make `module` a region, or look for regions among its children if fx cannot trace it.

    `caller` is the module whose Python code calls it, if there is one.
    """
    if id(module) in seen:
        return
    seen.add(id(module))
    if layer_registry.is_known(module):
        traced.regions.append(Region(path, module))
        return
    if (
        layer_registry.is_activation(module)
        or not _is_interesting(module)
        or isinstance(module, torch.jit.ScriptModule)
    ):
        return
    if not _has_own_forward(module):
        _open_children(traced, path, module, seen, caller)
        return
    try:
        _require_traceable(module, caller)
        graphs = _trace_both_modes(module, is_model=path == "")
    except Exception as error:  # any error of the model's code on proxies
        traced.untraced[path] = _first_line(error)
        _open_children(traced, path, module, seen, caller=module)
        return
    traced.regions.append(Region(path, module, graphs))
    reached = set()
    for graph in graphs.values():
        for node in graph.nodes:
            if node.op == "call_module":
                reached.add(node.target)
    for name in sorted(reached):
        leaf = module.get_submodule(name)
        if id(leaf) not in seen and layer_registry.find(leaf) is None:
            _open(traced, join(path, name), leaf, seen)
        seen.add(id(leaf))


def _open_children(
    traced: Traced, path: str, module: nn.Module, seen: set[int], caller: nn.Module | None
) -> None:
    for name, child in module.named_children():
        _open(traced, join(path, name), child, seen, caller)


def join(path: str, name: str) -> str:
    """The dotted name of `name` below `path`; the model itself has the empty path."""
    return f"{path}.{name}" if path and name else path or name


def _is_interesting(module: nn.Module) -> bool:
    """Whether it contains a layer, or a parameter that may be used as a weight."""
    return any(
        layer_registry.is_known(part) or (part._parameters and not isinstance(part, _PRIMITIVES))
        for part in module.modules()
    )


def _has_own_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _first_line(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text[:200]


# -- one region ------------------------------------------------------------------------------------


def _require_traceable(module: nn.Module, caller: nn.Module | None) -> None:
    if "forward" in vars(module):
        raise RuntimeError("its forward was replaced on the instance")
    more = reason_to_keep_code(caller, module) if caller is not None else ""
    if more:
        raise RuntimeError(more)
    hooks = [
        (name, hook)
        for name, part in module.named_modules()
        if name and is_hooked(part)
        for hook in _hooks_of(part)
    ]
    mine = (
        {id(value) for part in module.modules() for value in (part, *vars(part).values())}
        if hooks
        else set()
    )
    for name, hook in hooks:
        if any(id(owner) in mine for owner in _owners_of(hook)):
            raise RuntimeError(f"a hook on {name} may pass values to it")


def _hooks_of(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _owners_of(hook: Any) -> Iterator[Any]:
    """The objects in which a hook can store values."""
    found: list[Any] = []
    if isinstance(hook, functools.partial):
        found += hook.args
        hook = hook.func
    found.append(getattr(hook, "__self__", None))
    for cell in getattr(hook, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return (one for one in found if one is not None and not isinstance(one, (int, float, str)))


def _trace_both_modes(module: nn.Module, is_model: bool) -> dict[bool, fx.Graph]:
    opaque: set[type] = set()
    for _ in range(_MAX_TRIES):
        scratch = _scratch_copy(module)
        try:
            graph, mode_matters = _trace_once(scratch, opaque, training=False, is_model=is_model)
            graphs = {False: graph}
            if mode_matters:
                graphs[True], _ = _trace_once(scratch, opaque, training=True, is_model=is_model)
        except Exception as error:
            failed = getattr(error, "failed_module", None)
            if failed is None or failed is scratch or original_type(failed) in opaque:
                raise
            opaque.add(original_type(failed))
        else:
            _bring_constants_(module, scratch, graphs)
            return graphs
    raise RuntimeError(f"gave up after {_MAX_TRIES} attempts")


def _scratch_copy(module: nn.Module) -> nn.Module:
    """A copy to run on proxies, whose side effects are thrown away with it."""
    scratch = share_copy(module)
    for part in scratch.modules():
        part._buffers = {
            name: None if buffer is None else buffer.clone()
            for name, buffer in part._buffers.items()
        }
        if part is scratch:
            part._forward_hooks, part._forward_pre_hooks = OrderedDict(), OrderedDict()
    return scratch


def _trace_once(
    module: nn.Module, opaque: set[type], *, training: bool, is_model: bool
) -> tuple[fx.Graph, bool]:
    """The graph of one mode, and whether the code has read the mode."""
    versions = [buffer._version for buffer in module.buffers()]
    tracer = RegionTracer(opaque)
    tracer.mode = training
    tracer.inputs_are_tensors = is_model  # untraced code may pass anything to a child
    graph = tracer.trace(module, _defaults_of(module))
    mode_matters = bool(tracer.mode_reads)
    _restore_names_(graph, module)
    _make_lists_afresh_(graph)
    if not _depends_on_input(graph):
        raise RuntimeError("its outputs do not come from its input")
    if versions != [buffer._version for buffer in module.buffers()]:
        raise RuntimeError("its forward() changes a buffer while it is traced")
    if any(not node.users and _works_in_place(node, module) for node in graph.nodes):
        raise RuntimeError("its forward() uses the result of an in-place operation by its old name")
    return graph, mode_matters


def _depends_on_input(graph: fx.Graph) -> bool:
    """Whether the output depends on the input; hooks may pass values that a trace misses."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    waiting, seen = [output], set()
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder":
            return True
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return False


def _works_in_place(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node is an activation that overwrites its input."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return layer_registry.is_activation(module) and getattr(module, "inplace", False)
    in_place = (
        layer_registry.target_name(node.target).endswith("_") or node.kwargs.get("inplace") is True
    )
    return (
        node.op in ("call_function", "call_method")
        and in_place
        and layer_registry.is_activation_function(node.target)
    )


def _restore_names_(graph: fx.Graph, module: nn.Module) -> None:
    """Restore the names of arguments, which fx changes where it was given their values."""
    inputs = [
        node
        for node in graph.nodes
        if node.op == "placeholder" and not str(node.target).startswith("*")
    ]
    for node, name in zip(inputs, inspect.signature(module.forward).parameters, strict=False):
        node.target = name
    if inputs:
        inputs[0].args = ()  # required, whatever its default
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (
            torch._assert,
            fx._symbolic_trace._assert_is_none,
        ):
            value, message = node.args
            if "has been specialized" not in str(message):
                continue
            given, default = (value, None) if node.target is not torch._assert else value.args
            with graph.inserting_before(node):
                graph.call_function(expect_default, (given, default, given.target))
            graph.erase_node(node)
            if value is not given:
                graph.erase_node(value)


def _make_lists_afresh_(graph: fx.Graph) -> None:
    """Copy lists passed to opaque functions, which may change them, unlike fx's own lists."""
    for node in list(graph.nodes):
        if node.op == "call_function" and is_opaque(node.target):
            for position, value in enumerate(node.args):
                if isinstance(value, list) and not any(isinstance(one, list) for one in value):
                    with graph.inserting_before(node):
                        fresh = graph.call_function(list, (value,))
                    fresh.meta.update(node.meta)
                    node.update_arg(position, fresh)


def is_opaque(function: Any) -> bool:
    """Whether a function is opaque to fx."""
    return isinstance(function, FunctionType) and not (function.__module__ or "").startswith(
        "torch."
    )


def _bring_constants_(module: nn.Module, scratch: nn.Module, graphs: dict[bool, fx.Graph]) -> None:
    """The tensors that `forward` creates, which fx stores on the traced module."""
    for graph in graphs.values():
        for node in graph.nodes:
            if (
                node.op == "get_attr"
                and not hasattr(module, str(node.target))
                and "." not in str(node.target)
            ):
                setattr(module, str(node.target), getattr(scratch, str(node.target)))


def _defaults_of(module: nn.Module) -> dict[str, Any]:
    """Fix optional arguments to their defaults; the graph checks this at run time.

    Where all are optional, as in `forward(self, pixel_values=None, labels=None)`, the first is the
    input.
    """
    parameters = [
        p
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    first_is_input = bool(parameters) and all(p.default is not p.empty for p in parameters)
    return {
        p.name: p.default
        for p in parameters[1 if first_is_input else 0 :]
        if p.default is not p.empty
    }


class RegionTracer(IsolatedTracer):
    """fx's tracer with all layers, norms and regularizers as leaves."""

    def __init__(self, opaque: Collection[type] = ()):
        modules, functions = _timm_notrace()
        super().__init__(functions)
        self.opaque = (*modules, *opaque)
        self.observed_methods = (FEATURES, HEAD)
        self.head_result: fx.Node | None = None
        self.calls: dict[Any, int] = {}

    def trace(self, root: nn.Module, concrete_args: dict[str, Any] | None = None) -> fx.Graph:  # type: ignore[override]
        graph = super().trace(root, concrete_args)
        output = next(node for node in reversed(graph.nodes) if node.op == "output")
        if output.args[0] is not self.head_result:  # `forward` uses the result of `forward_head`
            for node in graph.nodes:
                node.meta.pop("input_of", None)
        return graph

    def on_method_end(self, name: str, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Mark the values between the parts of timm's models, so that a graph can run them."""
        _, value, *others = inspect.signature(getattr(type(self.root), name)).parameters.values()
        passed = dict(zip((one.name for one in others), args[1:], strict=False)) | kwargs
        if (
            any(passed.get(one.name, one.default) is not one.default for one in others)
            or value.name in kwargs
        ):
            return
        if not isinstance(args[0], fx.Proxy) or not isinstance(result, fx.Proxy):
            return
        given, made = args[0].node, result.node
        if name == FEATURES and given.op == "placeholder":
            made.meta["result_of"] = name
        elif name == HEAD:
            given.meta["input_of"] = name
            self.head_result = made

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if layer_registry.fused_activation(m) is not None:
            return False
        return (
            isinstance(m, (*self.opaque, *_PRIMITIVES))
            or is_hooked(m)
            or type(m).__name__ in _REGULARIZERS
            or layer_registry.is_known(m)
            or layer_registry.is_activation(m)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(self, m: nn.Module, forward: Any, args: tuple, kwargs: dict) -> Any:
        fused = layer_registry.fused_activation(m)
        try:
            if fused is not None:
                return self._norm_then_activation(m, fused, args, kwargs)
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            if not hasattr(error, "failed_module"):
                error.failed_module = m  # type: ignore[attr-defined]
            raise

    def _norm_then_activation(
        self, m: nn.Module, parts: list[nn.Module], args: tuple, kwargs: dict
    ) -> Any:
        """Trace a norm that contains an activation (timm's BatchNormAct2d) as two calls."""
        value = self.create_proxy("call_module", self.path_of_module(m), args, kwargs)
        value.node.meta["norm_only"] = True
        for part in parts:
            value = super().call_module(part, part.forward, (value,), {})
        return value

    def create_node(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        name: Any = None,
        type_expr: Any = None,
    ) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        scope = self.scope.module_path
        label = (
            target
            if kind == "call_module"
            else join(scope, getattr(target, "__name__", str(target)))
        )
        nth = self.calls.get(label, 0)
        self.calls[label] = nth + 1
        node.meta["site"] = label if nth == 0 else f"{label}#{nth}"
        place = (label, *_caller())  # the same in both modes
        again = self.calls.get(place, 0)
        self.calls[place] = again + 1
        node.meta["key"] = (*place, again)
        return node


def _caller() -> tuple[str, int]:
    """File and line of the model's code that is running."""
    frame = sys._getframe(2)
    ours = (__file__, isolated.__file__)
    while frame.f_back is not None and (
        "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename in ours
    ):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _timm_notrace() -> tuple[list[type], list[Any]]:
    """timm's lists of what fx must not trace; empty if timm is not imported."""
    if "timm" not in sys.modules:
        return [], []
    from timm.layers import get_notrace_functions, get_notrace_modules

    modules = [
        m for m in get_notrace_modules() if not issubclass(m, nn.modules.batchnorm._NormBase)
    ]
    return modules, list(get_notrace_functions())
