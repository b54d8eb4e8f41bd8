"""Registries of variants that are found by name, from mptify and from other packages.

A variant is one decorated function or class, and nothing else in the package knows it:

    from mptify.registry import init_schemes

    @init_schemes.register("uniform")
    def uniform(draw): ...

A package makes its variants known by an entry point of the group `mptify.plugins`, which names the
module that registers them. On the command line, `mptify --plugin MODULE` imports a module.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from threading import Lock
from typing import Any, Generic, TypeVar

from mptify.errors import BadConfig, first_line

__all__ = [
    "PLUGIN_GROUP", "Registry", "data_sources", "export_targets", "import_plugin", "init_schemes",
    "kernels", "methods", "quantizers", "scopes",
]  # fmt: skip

PLUGIN_GROUP = "mptify.plugins"
Variant = TypeVar("Variant")


class Registry(Generic[Variant]):
    """Variants of one kind, by name.

    Args:
        kind: What a variant is, for error messages: "init scheme".
        home: The module that registers the built-in variants. It is imported on first use.
    """

    def __init__(self, kind: str, home: str):
        self.kind, self.home = kind, home
        self._variants: dict[str, Variant] = {}

    def register(self, name: str) -> Callable[[Variant], Variant]:
        """A decorator that registers a function or class as `name`.

        Raises:
            BadConfig: Another variant has this name.
        """

        def add(variant: Variant) -> Variant:
            known = self._variants.get(name)
            if known is not None and _origin(known) != _origin(variant):
                raise BadConfig(
                    f"The {self.kind} {name!r} is registered already, by {_origin(known)}; choose "
                    "another name."
                )
            self._variants[name] = variant
            return variant

        return add

    def __getitem__(self, name: str) -> Variant:
        """The variant of a name.

        Raises:
            BadConfig: No package has registered it; the error lists the known names.
        """
        if name not in self._variants:
            self._import_home()
        if name not in self._variants:
            _import_plugins()
        if name not in self._variants:
            near = difflib.get_close_matches(name, self._variants, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise BadConfig(
                f"There is no {self.kind} {name!r}; there are {', '.join(self.names())}.{hint}"
            )
        return self._variants[name]

    def names(self) -> list[str]:
        """All names that are known so far, the built-in ones included."""
        self._import_home()
        return sorted(self._variants)

    def all(self) -> dict[str, Variant]:
        """All variants by name: the built-in ones and those of every installed plugin."""
        self._import_home()
        _import_plugins()
        return dict(sorted(self._variants.items()))

    def name_of(self, variant: Variant) -> str | None:
        """The name that a variant is registered by, or None."""
        return next((name for name, known in self._variants.items() if known is variant), None)

    def _import_home(self) -> None:
        importlib.import_module(self.home)


def import_plugin(module: str) -> None:
    """Import a module that registers variants.

    Raises:
        BadConfig: It can't be imported.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise BadConfig(
            f"The plugin {module!r} can't be imported ({first_line(error)})."
        ) from error


_lock = Lock()
_plugins_imported = False


def _import_plugins() -> None:
    """Import every installed plugin, once."""
    global _plugins_imported
    with _lock:
        if not _plugins_imported:
            for plugin in entry_points(group=PLUGIN_GROUP):
                import_plugin(plugin.value)
            _plugins_imported = True


def _origin(variant: Any) -> str:
    return f"{variant.__module__}.{variant.__qualname__}"


init_schemes: Registry[Callable[..., Any]] = Registry("init scheme", "mptify.nn.init")
data_sources: Registry[Callable[..., Any]] = Registry("data source", "mptify.training.sources")
export_targets: Registry[Callable[..., Any]] = Registry("export target", "mptify.export")
scopes: Registry[Callable[..., Any]] = Registry("pruning scope", "mptify.nn.scopes")
quantizers: Registry[Callable[..., Any]] = Registry("quantizer", "mptify.nn.quantizers")
methods: Registry[Any] = Registry("search method", "mptify.training.methods")
kernels: Registry[Any] = Registry("runtime kernel", "mptify.runtime.kernels")
