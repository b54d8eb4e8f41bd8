"""Partitions a graph of kernels into chains, with torch's operations between them."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from mptify.runtime.chain import Call, Chain
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.kernels.pack import Pack
from mptify.runtime.kernels.quantize import Dequantize, Quantize
from mptify.runtime.kernels.unpack import Unpack

__all__ = ["LAYOUT", "partition"]

LAYOUT = "layout"  # in a node's meta: the layout of the bit planes that its kernel makes, or levels


def partition(program: fx.GraphModule) -> fx.GraphModule:
    """The same program, with one chain for all native kernels up to torch's next operation.

    Only numbers pass between chains. Planes that a later chain reads too are unpacked, and packed
    there again.
    """
    kernels = {
        node: module
        for node in program.graph.nodes
        if isinstance(module := _module_of(program, node), NativeKernel)
    }
    waves = _waves(program.graph, kernels)
    _convert_between_waves(program, kernels, waves)
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for wave in range(max(waves.values()) + 1):
        now = [node for node in program.graph.nodes if waves[node] == wave]
        for node in now:
            if node not in kernels:
                copied[node] = graph.node_copy(node, copied.__getitem__)
        for number, nodes in enumerate(_connected([node for node in now if node in kernels])):
            _add_chain(program, graph, f"chain_{wave}_{number}", nodes, kernels, copied)
    graph.lint()
    return fx.GraphModule(program, graph, type(program).__name__).eval()


def _connected(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """Groups of nodes that read each other's planes.

    Other nodes may see other numbers of images, as attention in windows does.
    """
    groups: list[list[fx.Node]] = []
    for node in nodes:
        mine = [group for group in groups if any(one in group for one in node.all_input_nodes)]
        groups = [group for group in groups if group not in mine]
        groups.append([*[one for group in mine for one in group], node])
    order = {node: number for number, node in enumerate(nodes)}
    return [sorted(group, key=order.__getitem__) for group in groups]


def _waves(graph: fx.Graph, kernels: dict[fx.Node, Any]) -> dict[fx.Node, int]:
    """When each node can run: torch's operations of wave 0, kernels of wave 0, torch's of 1, …"""
    waves: dict[fx.Node, int] = {}
    after: dict[fx.Node, list[fx.Node]] = {}  # dependencies through operations in place
    for node in graph.nodes:
        if _is_in_place(graph, node):
            changed: Any = node.args[0]
            for user in changed.users:
                if user in waves:
                    after.setdefault(node, []).append(user)
                elif user is not node:
                    after.setdefault(user, []).append(node)
        before = [*node.all_input_nodes, *after.get(node, [])]
        steps = (waves[one] + (one in kernels and node not in kernels) for one in before)
        waves[node] = max(steps, default=0)
    last = max(waves.values())
    for node in graph.nodes:
        if node.op == "output":
            waves[node] = last if not any(waves[one] == last for one in kernels) else last + 1
    return waves


def _is_in_place(graph: fx.Graph, node: fx.Node) -> bool:
    """Whether a node changes its first input."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.op == "call_module":
        return bool(getattr(_module_of(graph.owning_module, node), "inplace", False))
    if node.target in (operator.iadd, operator.isub, operator.imul, operator.itruediv):
        return True
    if node.kwargs.get("inplace"):
        return True
    is_functional = getattr(node.target, "__module__", "") == "torch.nn.functional"
    if is_functional and any(one is True for one in node.args):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _convert_between_waves(
    program: fx.GraphModule, kernels: dict[fx.Node, Any], waves: dict[fx.Node, int]
) -> None:
    """Unpack the planes that a later chain reads, and pack them there again."""
    for node, kernel in list(kernels.items()):
        if LAYOUT not in node.meta:
            continue
        later = sorted({waves[user] for user in node.users if user in kernels} - {waves[node]})
        for wave in later:
            name = f"{node.name}_to_{wave}"
            numbers: Any = node.args[0]
            users = [user for user in node.users if waves[user] == wave]
            layout = node.meta[LAYOUT]
            unpack, pack = _converters(layout, kernel)
            is_packed = isinstance(kernel, type(pack))  # its numbers can be read again if they last
            if not is_packed or any(_is_in_place(program.graph, user) for user in numbers.users):
                numbers = _insert(program, node, f"{name}_unpack", unpack, node)
                kernels[numbers] = program.get_submodule(numbers.name)
                waves[numbers] = waves[node]
            again = _insert(program, numbers, f"{name}_pack", pack, numbers)
            again.meta[LAYOUT] = node.meta[LAYOUT]
            kernels[again], waves[again] = program.get_submodule(again.name), wave
            for user in users:
                user.replace_input_with(node, again)


def _converters(layout: Any, kernel: Any) -> tuple[NativeKernel, NativeKernel]:
    """Kernels from planes or levels to numbers, and back."""
    if isinstance(layout, str):
        return Unpack(), Pack(layout)
    tokens = getattr(kernel, "tokens", False)
    return Dequantize(layout.step), Quantize(*layout[:3], tokens=tokens)


def _insert(
    program: fx.GraphModule, behind: fx.Node, name: str, kernel: nn.Module, source: Any
) -> fx.Node:
    program.add_module(name, kernel)
    with program.graph.inserting_after(behind):
        node = program.graph.call_module(name, (source,))
    node.name = name
    return node


def _add_chain(
    program: fx.GraphModule,
    graph: fx.Graph,
    name: str,
    nodes: list[fx.Node],
    kernels: dict[fx.Node, Any],
    copied: dict[fx.Node, fx.Node],
) -> None:
    inside = set(nodes)
    read = [one for node in nodes for one in node.all_input_nodes if one not in inside]
    inputs = list(dict.fromkeys(read))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    calls = [Call(node.name, tuple(str(one) for one in node.args), node.name) for node in nodes]
    chain = Chain(
        {node.name: kernels[node] for node in nodes},
        calls,
        [node.name for node in inputs],
        [node.name for node in outputs],
    )
    program.add_module(name, chain)
    call = graph.call_module(name, tuple(copied[one] for one in inputs))
    for number, node in enumerate(outputs):
        copied[node] = graph.call_function(operator.getitem, (call, number))
        copied[node].name = node.name


def _module_of(program: Any, node: fx.Node) -> Any:
    return program.get_submodule(str(node.target)) if node.op == "call_module" else None
