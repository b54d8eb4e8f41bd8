"""Networks of which only parts have a graph, as detectors: each part becomes a program."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from mptify.errors import MptifyError
from mptify.nn.layers import Ticketed
from mptify.surgery.edges import split_fused_norms_
from mptify.surgery.graphs import TicketGraph
from mptify.surgery.trace import trace

__all__ = ["pack_subgraphs", "propagate_shapes", "with_graphs"]


def with_graphs(model: nn.Module) -> nn.Module:
    """The model, with a graph in place of each module that can be traced.

    Surgery makes graphs where it changes edges. With 8- and 32-bit activations it changes none.
    """
    if any(isinstance(module, fx.GraphModule) for module in model.modules()):
        return model
    traced = trace(model)
    graphs: dict[str, nn.Module] = {}
    for region in traced.regions:  # outer ones first
        if region.graphs and not any(_is_inside(region.path, outer) for outer in graphs):
            split_fused_norms_(list(region.graphs.values()), region.module)
            graph = region.graphs.get(False, next(iter(region.graphs.values())))
            graphs[region.path] = TicketGraph.of(region.module, {False: graph}).eval()
    return _replace(traced.model, graphs, "").eval()


def pack_subgraphs(
    model: nn.Module,
    arguments: tuple[Any, ...],
    compile_graph: Callable[[fx.GraphModule], nn.Module],
) -> nn.Module:
    """The model with a program in place of each graph that `arguments` lead through.

    The model itself stays as it is.
    """
    calls: dict[str, tuple[Any, ...]] = {}
    hooks = []
    for path, subgraph in _subgraphs(model).items():

        def record(
            graph: nn.Module, given: tuple[Any, ...], named: dict[str, Any], path: str = path
        ) -> None:
            calls.setdefault(path, _positional(graph, given, named))

        hooks.append(subgraph.register_forward_pre_hook(record, with_kwargs=True))
    try:
        model(*arguments)
    except Exception as error:  # whatever the network's own code makes of them
        raise MptifyError(
            f"The network can't take this input ({error}); pass one that it can: "
            "mptify.pack(model, example)."
        ) from None
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        warnings.warn(
            "No part of this network has a graph to pack: it runs as a float32 network.",
            stacklevel=3,
        )
    programs: dict[str, nn.Module] = {}
    for path, given in calls.items():
        graph: Any = model.get_submodule(path)
        propagate_shapes(graph, given)
        programs[path] = compile_graph(graph)
    return _replace(model, programs, "")


def propagate_shapes(graph: fx.GraphModule, arguments: tuple[Any, ...]) -> None:
    """Let each node know the shape of its value."""
    with torch.no_grad():
        _Shapes(graph).run(*arguments)


class _Shapes(fx.Interpreter):
    """Like fx's `ShapeProp`, which prints a traceback if an input does not fit."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            n.meta["tensor_meta"] = SimpleNamespace(shape=result.shape)
        return result


def _positional(graph: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments by position, as fx's interpreter takes them."""
    assert isinstance(graph, fx.GraphModule)
    values = list(given)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in placeholders[len(given) :]:
        if node.target in named or node.args:
            values.append(named[str(node.target)] if node.target in named else node.args[0])
    return tuple(values)


def _subgraphs(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules that have a graph and hold ticket layers."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not isinstance(module, fx.GraphModule):
            continue
        if any(_is_inside(path, outer) for outer in found):
            continue
        layers = [one for one in module.modules() if isinstance(one, Ticketed)]
        if layers:
            found[path] = module
    return found


def _is_inside(path: str, outer: str) -> bool:
    """Whether a module's path lies below another's."""
    return not outer or path.startswith(f"{outer}.")


def _replace(module: nn.Module, programs: dict[str, nn.Module], path: str) -> nn.Module:
    """The module with programs in place of some submodules.

    Modules that hold one of them are copied, and all others are shared.
    """
    if path in programs:
        return programs[path]
    children = {
        name: child
        if child is None
        else _replace(child, programs, f"{path}.{name}" if path else name)
        for name, child in module._modules.items()
    }
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    copied = copy.copy(module)
    copied.__dict__["_modules"] = children
    return copied
