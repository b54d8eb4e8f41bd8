"""Forward hooks of modules that surgery replaces."""

from __future__ import annotations

from torch import nn

__all__ = ["copy_hooks_", "is_hooked"]

_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_BEHIND = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def is_hooked(module: nn.Module) -> bool:
    """Whether the module has forward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def copy_hooks_(
    source: nn.Module, target: nn.Module, *, before: bool = True, behind: bool = True
) -> None:
    """Register the hooks of `source` on `target`."""
    for name in (*(_BEFORE if before else ()), *(_BEHIND if behind else ())):
        getattr(target, name).update(getattr(source, name))
