"""Networks of which only parts have a graph, as detectors are: each part becomes a program, and the code around them stays."""

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

__all__ = ["pack_parts", "propagate"]


def pack_parts(model: nn.Module, arguments: tuple[Any, ...], compiled: Callable[[fx.GraphModule], nn.Module]) -> nn.Module:
    """The model with a program in place of each part that `arguments` lead through; the model itself stays as it is."""
    calls: dict[str, tuple[Any, ...]] = {}
    hooks = []
    for path, part in _graphs_in(model).items():

        def note(graph: nn.Module, given: tuple[Any, ...], named: dict[str, Any], path: str = path) -> None:
            calls.setdefault(path, _by_position(graph, given, named))

        hooks.append(part.register_forward_pre_hook(note, with_kwargs=True))
    try:
        model(*arguments)
    except Exception as error:  # whatever the network's own code makes of what it was given
        raise MptifyError(f"The network can't take this input ({error}); pass one that it can: mptify.pack(model, example).") from None
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        warnings.warn("No part of this network has a graph that could be packed: it runs as a float32 network.", stacklevel=3)
    programs: dict[str, nn.Module] = {}
    for path, given in calls.items():
        graph: Any = model.get_submodule(path)
        propagate(graph, given)
        programs[path] = compiled(graph)
    return _with_parts(model, programs, "")


def propagate(graph: fx.GraphModule, arguments: tuple[Any, ...]) -> None:
    """Let each node know the shape of what it gives."""
    with torch.no_grad():
        _Shapes(graph).run(*arguments)


class _Shapes(fx.Interpreter):
    """Notes the shapes of tensors. fx's own `ShapeProp` prints a traceback where an input does not fit."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            n.meta["tensor_meta"] = SimpleNamespace(shape=result.shape)
        return result


def _by_position(graph: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments as fx's interpreter wants them."""
    assert isinstance(graph, fx.GraphModule)
    values = list(given)
    for node in [node for node in graph.graph.nodes if node.op == "placeholder"][len(given) :]:
        if node.target in named or node.args:
            values.append(named[str(node.target)] if node.target in named else node.args[0])
    return tuple(values)


def _graphs_in(model: nn.Module) -> dict[str, nn.Module]:
    """Parts that have a graph and hold 1/1 layers; of one within another, the outer."""
    found: dict[str, nn.Module] = {}
    for path, part in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if (
            isinstance(part, fx.GraphModule)
            and not inside
            and any(isinstance(one, Ticketed) and one.scales_output for one in part.modules())
        ):
            found[path] = part
    return found


def _with_parts(module: nn.Module, parts: dict[str, nn.Module], path: str) -> nn.Module:
    """The module with some of its parts exchanged: those that hold one of them are copied, all others shared."""
    if path in parts:
        return parts[path]
    children = {
        name: child if child is None else _with_parts(child, parts, f"{path}.{name}" if path else name)
        for name, child in module._modules.items()
    }
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    copied = copy.copy(module)
    copied.__dict__["_modules"] = children
    return copied
