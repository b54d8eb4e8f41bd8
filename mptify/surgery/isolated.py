"""Run a module's Python code on fx proxies, invisible to all other threads.

torch.fx's own `trace` replaces `nn.Module.__call__`, `nn.Module.__getattr__` and globals of the
traced files for the whole process. Here, the traced copy gets classes of its own instead:

- calls and attributes of its modules go to the tracer, and `training` reads as the traced mode;
- its methods run with a view of their globals in which leaf functions (`math.sqrt`, those that
  `torch.fx.wrap` or timm name) record a call, and random number generators refuse to be used.

Nothing outside the copy changes, so other threads can trace, build and train at the same time.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import math
import random
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.fx import _symbolic_trace as fx_internals
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DrawsRandomNumbers", "IsolatedTracer", "ScriptStandIn", "is_torchs", "original_type"]

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)


class DrawsRandomNumbers(RuntimeError):
    """The `forward` drew random numbers, which a trace would freeze."""

    def __init__(self) -> None:
        super().__init__("its forward() draws random numbers that a trace would freeze")


class IsolatedTracer(fx.Tracer):
    """An `fx.Tracer` whose `trace` changes nothing but the module that it is given.

    The module belongs to the tracer from then on.

    Args:
        leaf_functions: Functions that become one node of the graph instead of being traced.
    """

    def __init__(self, leaf_functions: Collection[Callable[..., Any]] = ()):
        super().__init__(param_shapes_constant=True)
        self.mode_reads: list[str] = []  # the classes whose code has read `training`
        self.mode = False
        self.inputs_are_tensors = (
            True  # so that code which checks whether an input is a list can be traced
        )
        self._leaf_functions = {id(function) for function in leaf_functions}
        self._globals: dict[int, _TracedGlobals] = {}
        self._parameter_proxies: dict[str, fx.Proxy] = {}
        # Methods of the root after which `on_method_end` is called.
        self.observed_methods: tuple[str, ...] = ()

    def trace(self, root: nn.Module, concrete_args: dict[str, Any] | None = None) -> fx.Graph:  # type: ignore[override]
        """The graph of `root.forward` in the mode `self.mode`."""
        self.root = root
        _isolate_(root, self)
        for name in self.observed_methods:
            if callable(getattr(type(root), name, None)):
                root.__dict__[name] = functools.partial(
                    self._observed, name, types.MethodType(getattr(type(root), name), root)
                )
        forward: Any = type(root).forward
        if not isinstance(forward, types.FunctionType):
            raise TypeError(f"its forward is a {type(forward).__name__}, not a function")
        self.root_module_name = root._get_name()
        self.submodule_paths = {module: name for name, module in root.named_modules()}
        self.graph = fx.Graph()
        self.tensor_attrs = {
            value: f"{path}.{name}" if path else name
            for path, module in root.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, (torch.Tensor, torch.ScriptObject))
        }
        function, args = self.create_args_for_root(forward, True, concrete_args)
        with _NoDraws():
            output = self.create_arg(function(*args))
        self.create_node(
            "output", "output", (output,), {}, type_expr=forward.__annotations__.get("return")
        )
        self.submodule_paths = None
        return self.graph

    # -- called by the isolated modules ------------------------------------------------------------

    def attribute(self, name: str, value: Any) -> Any:
        """What code reads as a parameter, buffer or child of a module."""
        return self.getattr(name, value, self._parameter_proxies)

    def _observed(self, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self.on_method_end(name, args, kwargs, result)
        return result

    def on_method_end(self, name: str, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Called when one of the root's `observed_methods` has returned."""

    def isolated_function(self, function: types.FunctionType) -> types.FunctionType:
        """The function with a traced view of its globals."""
        if is_torchs(function.__module__):
            return function
        cells = function.__closure__
        if cells is not None:
            cells = tuple(_isolated_cell(cell, self) for cell in cells)
        view = self.globals_view(function.__globals__)
        copied = types.FunctionType(
            function.__code__, view, function.__name__, function.__defaults__, cells
        )
        functools.update_wrapper(copied, function, updated=("__dict__",))
        copied.__dict__.pop("__wrapped__", None)
        if hasattr(function, "__wrapped__"):
            copied.__wrapped__ = function.__wrapped__  # type: ignore[attr-defined]
        copied.__kwdefaults__ = function.__kwdefaults__
        return copied

    def create_arg(self, a: Any) -> Any:
        """As fx does, but keep the class of dataclass dictionaries (Hugging Face outputs)."""
        if isinstance(a, dict) and dataclasses.is_dataclass(a):
            values = {
                field.name: self.create_arg(getattr(a, field.name))
                for field in dataclasses.fields(a)
            }
            return self.create_node("call_function", type(a), (), values)
        return super().create_arg(a)

    def path_of_module(self, mod: nn.Module) -> str:
        """As fx does; for a slice of a Sequential, which has no path, those of its parts."""
        try:
            return super().path_of_module(mod)
        except NameError:
            if isinstance(mod, nn.Sequential):
                return ""
            raise

    def globals_view(self, original: dict[str, Any]) -> _TracedGlobals:
        if id(original) not in self._globals:
            self._globals[id(original)] = _TracedGlobals(original, self)
        return self._globals[id(original)]

    def is_leaf_function(self, value: Any) -> bool:
        return callable(value) and id(value) in self._leaf_functions


def original_type(module: nn.Module) -> type:
    """The class of a module before it was traced."""
    return getattr(type(module), "isolated_from", type(module))


# -- modules ---------------------------------------------------------------------------------------


class _Isolated:
    """The base class of modules that are being traced."""

    def __init_subclass__(cls) -> None:
        """Skip what the original class does with its subclasses."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        original: Any = type(self).isolated_from  # type: ignore[attr-defined]
        return type(self).isolated_by.call_module(
            self, functools.partial(original.__call__, self), args, kwargs
        )

    def __getattr__(self: Any, name: str) -> Any:
        return type(self).isolated_by.attribute(name, super().__getattr__(name))  # type: ignore[misc]

    @property
    def training(self: Any) -> bool:
        tracer = type(self).isolated_by
        tracer.mode_reads.append(type(self).__name__)
        return tracer.mode

    @training.setter
    def training(self: Any, mode: bool) -> None:
        self.__dict__["training"] = mode


class ScriptStandIn(nn.Module):
    """A leaf in place of a TorchScript module, whose class can't be changed."""

    def __init__(self, script: Any):
        super().__init__()
        self.__dict__["script"] = script

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["script"], name)


def _isolate_(root: nn.Module, tracer: IsolatedTracer) -> None:
    """Give each module below `root` a class of its own."""
    stand_ins: dict[int, nn.Module] = {}
    for module in list(root.modules()):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, child in module._modules.items():
            if isinstance(child, torch.jit.ScriptModule):
                module._modules[name] = stand_ins.setdefault(id(child), ScriptStandIn(child))
    classes: dict[type, type] = {}
    for module in root.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            original = original_type(module)
            if original not in classes:
                classes[original] = _isolated_class(original, tracer)
            module.__class__ = classes[original]
            for name, value in vars(module).items():
                module.__dict__[name] = _isolated_attribute(value, tracer)


def _isolated_class(original: type, tracer: IsolatedTracer) -> type:
    body: dict[str, Any] = {}
    for parent in reversed(original.__mro__):
        if not is_torchs(parent.__module__) and parent is not object:
            body |= {
                name: _isolated_member(value, tracer)
                for name, value in vars(parent).items()
                if not name.startswith("__")
            }
        else:
            body = {name: value for name, value in body.items() if name not in vars(parent)}
    body |= {
        "isolated_from": original,
        "isolated_by": tracer,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
    }
    body.pop("training", None)
    return type(original)(original.__name__, (_Isolated, original), body)


def _isolated_attribute(value: Any, tracer: IsolatedTracer) -> Any:
    """Attributes of a module: functions run with traced globals, generators refuse to be used."""
    if isinstance(value, _GENERATORS):
        return _Refusing(value)
    if isinstance(value, types.FunctionType):
        return tracer.isolated_function(value)
    if isinstance(value, types.MethodType) and isinstance(value.__func__, types.FunctionType):
        return types.MethodType(tracer.isolated_function(value.__func__), value.__self__)
    if type(value) is functools.partial:
        return functools.partial(
            _isolated_attribute(value.func, tracer), *value.args, **value.keywords
        )
    return value


def _isolated_member(value: Any, tracer: IsolatedTracer) -> Any:
    if isinstance(value, types.FunctionType):
        return tracer.isolated_function(value)
    if isinstance(value, (staticmethod, classmethod)) and isinstance(
        value.__func__, types.FunctionType
    ):
        return type(value)(tracer.isolated_function(value.__func__))
    if type(value) is property:
        return property(
            *(_isolated_member(part, tracer) for part in (value.fget, value.fset, value.fdel))
        )
    return value


def _isolated_cell(cell: Any, tracer: IsolatedTracer) -> Any:
    """The closure of a decorated function, which holds the function itself."""
    try:
        value = cell.cell_contents
    except ValueError:  # empty
        return cell
    return (
        types.CellType(tracer.isolated_function(value))
        if isinstance(value, types.FunctionType)
        else cell
    )


def is_torchs(module: str | None) -> bool:
    """Whether a Python module of this name is part of torch."""
    return (module or "").partition(".")[0] == "torch"


# -- globals ---------------------------------------------------------------------------------------


class _TracedGlobals(dict):
    """The globals of a file as traced code sees them, replaced where needed when first read."""

    def __init__(self, original: dict[str, Any], tracer: IsolatedTracer):
        super().__init__(
            {key: original[key] for key in ("__builtins__", "__name__") if key in original}
        )
        self.original, self.tracer = original, tracer

    def __missing__(self, name: str) -> Any:
        if name == "super" and name not in self.original:
            value: Any = functools.partial(_traced_super, self.tracer)
        elif (
            name == "isinstance"
            and name not in self.original
            and not self.tracer.inputs_are_tensors
        ):
            value = _traced_isinstance
        elif (id(self.original), name) in fx_internals._wrapped_fns_to_patch:  # by `torch.fx.wrap`
            value = _leaf_function(
                self.original[name] if name in self.original else getattr(builtins, name)
            )
        else:
            value = self.view(name, self.original[name])
        self[name] = value
        return value

    def view(self, name: str, value: Any) -> Any:
        if value is math:
            return _MathView()
        if (
            value in (random, np.random)
            if isinstance(value, types.ModuleType)
            else isinstance(value, _GENERATORS)
        ):
            return _Refusing(value)
        if value is np:
            return _NumpyView()
        if self.tracer.is_leaf_function(value) or getattr(math, name, None) is value:
            return value if name.startswith("_") else _leaf_function(value)
        if isinstance(getattr(value, "__self__", None), _GENERATORS):  # from random import random
            return _refuse
        return (
            self.tracer.isolated_function(value) if isinstance(value, types.FunctionType) else value
        )


def _traced_super(tracer: IsolatedTracer, *given: Any) -> Any:
    """`super()`, whose methods run with traced globals too."""
    if not given:
        frame = sys._getframe(1)
        given = frame.f_locals["__class__"], frame.f_locals[frame.f_code.co_varnames[0]]
    return _SuperView(tracer, super(*given))


def _traced_isinstance(value: Any, kinds: Any) -> bool:
    """`isinstance`, which fails for graph inputs that may be a list, a tuple or a dictionary."""
    asked = kinds if isinstance(kinds, tuple) else (kinds,)
    containers = any(
        isinstance(kind, type) and issubclass(kind, (list, tuple, dict)) for kind in asked
    )
    if isinstance(value, fx.Proxy) and value.node.op == "placeholder" and containers:
        raise TypeError("its forward() asks whether its input is a list")
    return isinstance(value, kinds)


class _SuperView:
    def __init__(self, tracer: IsolatedTracer, parent: Any):
        self._view_tracer, self._view_parent = tracer, parent

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._view_parent, name)
        if isinstance(value, types.MethodType) and isinstance(value.__func__, types.FunctionType):
            return types.MethodType(
                self._view_tracer.isolated_function(value.__func__), value.__self__
            )
        return value


class _MathView:
    def __getattr__(self, name: str) -> Any:
        value = getattr(math, name)
        return _leaf_function(value) if callable(value) and not name.startswith("_") else value


class _NumpyView:
    random = property(lambda self: _Refusing(np.random))

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class _Refusing:
    """A random number generator, or its module, which traced code may read but not call."""

    def __init__(self, generator: Any):
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._generator, name)
        return _refuse if callable(value) and not isinstance(value, type) else value


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise DrawsRandomNumbers


def _leaf_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Record one call of `function` on proxies, and call it on other values."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found: list[fx.Proxy] = []
        fx.node.map_aggregate(
            (args, kwargs),
            lambda value: found.append(value) if isinstance(value, fx.Proxy) else None,
        )
        if not found:
            return function(*args, **kwargs)
        proxy = found[-1].tracer.create_proxy("call_function", function, args, kwargs)
        proxy.node.meta["is_wrapped"] = True
        return proxy

    return call


class _NoDraws(TorchDispatchMode):
    """Refuse torch operations that draw random numbers, in this thread only."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise DrawsRandomNumbers
        return function(*args, **(kwargs or {}))
