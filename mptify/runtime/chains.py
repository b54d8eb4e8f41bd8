"""From a graph that calls kernels one by one to one that calls chains of them, and torch's operations between."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from mptify.runtime.planes import Kernel, Pack, Unpack
from mptify.runtime.program import Chain

__all__ = ["LAYOUT", "in_chains"]

LAYOUT = "layout"  # in a node's meta: how the planes lie that its kernel makes; absent where it makes numbers


def in_chains(program: fx.GraphModule) -> fx.GraphModule:
    """The same program, with all kernels that can run before torch's next operation in one chain.

    Only numbers pass between chains: planes that a later one reads too are unpacked, and packed there again.
    """
    kernels = {node: module for node in program.graph.nodes if isinstance(module := _module_of(program, node), Kernel)}
    waves = _waves(program.graph, kernels)
    _hand_over(program, kernels, waves)
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for wave in range(max(waves.values()) + 1):
        now = [node for node in program.graph.nodes if waves[node] == wave]
        for node in now:
            if node not in kernels:
                copied[node] = graph.node_copy(node, copied.__getitem__)
        for number, some in enumerate(_connected([node for node in now if node in kernels])):
            _add_chain(program, graph, f"chain_{wave}_{number}", some, kernels, copied)
    graph.lint()
    made = fx.GraphModule(program, graph, type(program).__name__)
    return made.eval()


def _connected(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """Those that read each other's planes: others may see other numbers of images, as attention in windows does."""
    groups: list[list[fx.Node]] = []
    for node in nodes:
        mine = [group for group in groups if any(one in group for one in node.all_input_nodes)]
        groups = [group for group in groups if group not in mine]
        groups.append([*[one for group in mine for one in group], node])
    order = {node: place for place, node in enumerate(nodes)}
    return [sorted(group, key=order.__getitem__) for group in groups]


def _waves(graph: fx.Graph, kernels: dict[fx.Node, Any]) -> dict[fx.Node, int]:
    """When each node can run: torch's operations of wave 0, kernels of wave 0, torch's of wave 1, and so on."""
    waves: dict[fx.Node, int] = {}
    after: dict[fx.Node, list[fx.Node]] = {}  # what must have run before, although no value says so
    for node in graph.nodes:
        if _changes_its_input(graph, node):
            changed: Any = node.args[0]
            for user in changed.users:
                if user in waves:
                    after.setdefault(node, []).append(user)
                elif user is not node:
                    after.setdefault(user, []).append(node)
        before = [*node.all_input_nodes, *after.get(node, [])]
        waves[node] = max((waves[one] + (one in kernels and node not in kernels) for one in before), default=0)
    last = max(waves.values())
    for node in graph.nodes:
        if node.op == "output":
            waves[node] = last if not any(waves[one] == last for one in kernels) else last + 1
    return waves


def _changes_its_input(graph: fx.Graph, node: fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.op == "call_module":
        return bool(getattr(_module_of(graph.owning_module, node), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    by_position = getattr(node.target, "__module__", "") == "torch.nn.functional" and any(one is True for one in node.args)
    in_place |= node.target in (operator.iadd, operator.isub, operator.imul, operator.itruediv)
    return in_place or by_position or bool(node.kwargs.get("inplace"))


def _hand_over(program: fx.GraphModule, kernels: dict[fx.Node, Any], waves: dict[fx.Node, int]) -> None:
    """Make numbers of the planes that a later chain reads."""
    for node, kernel in list(kernels.items()):
        later = sorted({waves[user] for user in node.users if user in kernels} - {waves[node]})
        for wave in later if LAYOUT in node.meta else ():
            at = f"{node.name}_to_{wave}"
            numbers: Any = node.args[0]
            users = [user for user in node.users if waves[user] == wave]
            if not isinstance(kernel, Pack) or any(_changes_its_input(program.graph, user) for user in numbers.users):
                numbers = _insert(program, node, f"{at}_unpack", Unpack(), node)
                kernels[numbers], waves[numbers] = program.get_submodule(numbers.name), waves[node]
            again = _insert(program, numbers, f"{at}_pack", Pack(node.meta[LAYOUT]), numbers)
            again.meta[LAYOUT] = node.meta[LAYOUT]
            kernels[again], waves[again] = program.get_submodule(again.name), wave
            for user in users:
                user.replace_input_with(node, again)


def _insert(program: fx.GraphModule, behind: fx.Node, name: str, kernel: nn.Module, source: Any) -> fx.Node:
    program.add_module(name, kernel)
    with program.graph.inserting_after(behind):
        node = program.graph.call_module(name, (source,))
    node.name = name
    return node


def _add_chain(
    program: fx.GraphModule, graph: fx.Graph, name: str, nodes: list[fx.Node], kernels: dict[fx.Node, Any], copied: dict[fx.Node, fx.Node]
) -> None:
    inside = set(nodes)
    inputs = list(dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in inside))
    outputs = [node for node in nodes if LAYOUT not in node.meta]
    wiring = [(node.name, tuple(str(one) for one in node.args), node.name) for node in nodes]  # the same twice, maybe
    chain = Chain({node.name: kernels[node] for node in nodes}, wiring, [one.name for one in inputs], [node.name for node in outputs])
    program.add_module(name, chain)
    call = graph.call_module(name, tuple(copied[one] for one in inputs))
    for place, node in enumerate(outputs):
        copied[node] = graph.call_function(operator.getitem, (call, place))
        copied[node].name = node.name


def _module_of(program: Any, node: fx.Node) -> Any:
    return program.get_submodule(str(node.target)) if node.op == "call_module" else None
