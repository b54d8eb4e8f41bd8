"""Check whether untraced code uses its children in ways that their graphs would not support."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from mptify.surgery.isolated import is_torchs

__all__ = ["reason_to_keep_code"]


def reason_to_keep_code(parent: nn.Module, child: nn.Module) -> str:
    """Why `child` can't become a graph while `parent` keeps its Python code; empty if it can.

    The parent may call other methods of the child than `forward`, iterate over the children of a
    Sequential, or pass arguments that a trace would fix to their defaults.
    """
    code = _reachable(type(parent))
    words = {name for one in code for name in _names_in(one.__code__)}
    called = sorted(
        words & _own_methods(type(child)).keys() - _own_methods(type(parent)).keys() - {"forward"}
    )
    if called:
        return f"{type(parent).__name__} calls its {called[0]}()"
    if isinstance(child, nn.Sequential) and any(_takes_apart(one, parent, child) for one in code):
        return f"{type(parent).__name__} may go through its parts"
    given = _optional_argument_given(code, child)
    return f"{type(parent).__name__} may pass {given!r} to it" if given else ""


def _reachable(cls: type) -> list[FunctionType]:
    """`forward`, and the methods of the class that it calls, directly or indirectly."""
    methods = _own_methods(cls)
    found: dict[str, FunctionType] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        if name in methods and name not in found:
            found[name] = methods[name]
            waiting += _names_in(methods[name].__code__)
    return list(found.values())


def _names_in(code: CodeType) -> set[str]:
    nested = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*(_names_in(one) for one in nested))


def _own_methods(cls: type) -> dict[str, FunctionType]:
    """The methods that a module's class adds to those of `nn.Module`."""
    found: dict[str, FunctionType] = {}
    for parent in reversed(cls.__mro__):
        if not is_torchs(parent.__module__):
            found |= {
                name: member
                for name, member in vars(parent).items()
                if isinstance(member, FunctionType)
            }
    return {name: member for name, member in found.items() if not name.startswith("__")}


def _takes_apart(function: FunctionType, parent: nn.Module, child: nn.Sequential) -> bool:
    """Whether `self.child` is used in another way than by calling it, or iterated over."""
    names = [name for name, one in parent.named_children() if one is child]
    for node in ast.walk(_tree_of(function)):
        for part in ast.iter_child_nodes(node):
            if (
                isinstance(part, ast.Attribute)
                and part.attr in names
                and not (isinstance(node, ast.Call) and node.func is part)
            ):
                return True
        if (
            not names
            and isinstance(node, (ast.For, ast.comprehension))
            and isinstance(node.iter, ast.Name)
        ):
            return True
    return False


def _tree_of(function: FunctionType) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # code without a source file
        return ast.Module([], [])


# -- arguments -------------------------------------------------------------------------------------


def _optional_argument_given(code: list[FunctionType], child: nn.Module) -> str:
    """The first optional argument of `child.forward` that a call in `code` may pass."""
    parameters = [
        p
        for p in inspect.signature(child.forward).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    # Where all are optional, the first is the input.
    required = max(1, sum(p.default is p.empty for p in parameters))
    optional = {p.name: p.default for p in parameters[required:]}
    if not optional:
        return ""
    for call in (call for function in code for call in _calls_of_parts(function)):
        if any(isinstance(one, ast.Starred) for one in call.args):
            return next(iter(optional))
        if len(call.args) > required and not _is_constant(
            call.args[required], parameters[required].default
        ):
            return parameters[required].name
        for keyword in call.keywords:
            if keyword.arg in optional and not _is_constant(keyword.value, optional[keyword.arg]):
                return keyword.arg
    return ""


def _calls_of_parts(function: FunctionType) -> Iterator[ast.Call]:
    """Calls of attributes of `self` and of local names: `self.part(x)`, `part(x)`."""
    tree = _tree_of(function)
    stored = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            root: Any = node.func
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            local = (
                isinstance(node.func, (ast.Name, ast.Subscript))
                and isinstance(root, ast.Name)
                and root.id in stored
            )
            if local or (
                isinstance(root, ast.Name) and root.id == "self" and node.func is not root
            ):
                yield node


def _is_constant(value: ast.expr, default: Any) -> bool:
    return isinstance(value, ast.Constant) and value.value is default
