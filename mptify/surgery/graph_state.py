"""Convert fx graphs to plain data that can be pickled, and back.

fx pickles a graph as Python code and traces it again on loading. That patches torch temporarily
and fails for some functions. Here a graph is its list of nodes, and a function is its import path.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import _get_qualified_name, map_aggregate

from mptify.errors import CannotPickle

__all__ = ["from_state", "to_state"]

_META = ("site", "key", "norm_only", "result_of", "input_of", "is_wrapped")


@dataclass(frozen=True)
class _Node:
    """A reference to another node of the same graph."""

    name: str


@dataclass(frozen=True)
class _Function:
    """A reference to a function."""

    module: str
    name: str

    def find(self) -> Any:
        value: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            value = getattr(value, part)
        return value


def to_state(graph: fx.Graph) -> dict[str, Any]:
    """A graph as dictionaries, lists and names.

    Raises:
        CannotPickle: The graph calls a function that cannot be imported by its name.
    """
    nodes = [
        {
            "op": node.op,
            "target": _function(node.target) if node.op == "call_function" else node.target,
            "args": _plain(node.args),
            "kwargs": _plain(node.kwargs),
            "name": node.name,
            "meta": {key: node.meta[key] for key in _META if key in node.meta},
        }
        for node in graph.nodes
    ]
    return {"nodes": nodes, "codegen": graph._codegen}


def from_state(state: dict[str, Any]) -> fx.Graph:
    """The graph from what `to_state` returned."""
    graph = fx.Graph()
    graph.set_codegen(state["codegen"])
    made: dict[str, fx.Node] = {}

    def restored(value: Any) -> Any:
        if isinstance(value, _Node):
            return made[value.name]
        return value.find() if isinstance(value, _Function) else value

    for one in state["nodes"]:
        args, kwargs = map_aggregate(one["args"], restored), map_aggregate(one["kwargs"], restored)
        node = graph.create_node(one["op"], restored(one["target"]), args, kwargs, one["name"])  # type: ignore[arg-type]
        node.meta.update(one["meta"])
        made[one["name"]] = node
    return graph


def _plain(value: Any) -> Any:
    def one(part: Any) -> Any:
        if isinstance(part, fx.Node):
            return _Node(part.name)
        return _function(part) if callable(part) and not isinstance(part, type) else part

    return map_aggregate(value, one)


def _function(function: Any) -> _Function:
    """The module and name that a function can be imported by."""
    qualified = _get_qualified_name(function)
    candidates = [
        tuple(qualified.rpartition(".")[::2]),
        (getattr(function, "__module__", ""), getattr(function, "__qualname__", "")),
    ]
    for module, name in candidates:
        found = _Function(module or "builtins", name)
        try:
            if found.find() is function:
                return found
        except (ImportError, AttributeError, ValueError):
            continue
    raise CannotPickle(
        f"The network calls {qualified}, which can't be imported by that name, so the model can't "
        "be pickled whole; "
        "save its state_dict(), or its ticket with mptify.save."
    )
