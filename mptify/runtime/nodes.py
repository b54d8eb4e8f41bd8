"""What a node of a traced graph does, as far as fusion and the compiler ask."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

__all__ = [
    "is_concat",
    "is_flatten",
    "is_global_average",
    "is_identity",
    "is_plain_pool",
    "module_name",
    "module_of",
    "shape_of",
]

_IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d)  # in eval()


def module_of(node: fx.Node, modules: dict[str, nn.Module]) -> Any:
    return modules.get(str(node.target)) if node.op == "call_module" else None


def module_name(node: fx.Node) -> str:
    """The name of the kernel that replaces a node's module: one that dictionaries can have."""
    return f"{node.name}_layer" if hasattr(nn.ModuleDict, node.name) else node.name


def shape_of(node: Any) -> torch.Size:
    return node.meta["tensor_meta"].shape


def is_identity(module: Any) -> bool:
    """Whether a module returns its input in `eval()`."""
    return isinstance(module, _IDENTITIES)


def is_plain_pool(module: Any) -> bool:
    """Whether a module is a max-pool that pads as our kernel does."""
    return type(module) is nn.MaxPool2d and not module.ceil_mode and not module.return_indices


def is_flatten(node: fx.Node, module: Any) -> bool:
    """Whether a node turns a whole image into one vector."""
    if not isinstance(module, nn.Flatten) and node.target not in (torch.flatten, "flatten"):
        return False
    before = tuple(shape_of(node.args[0]))
    return len(before) == 4 and tuple(shape_of(node)) == (before[0], prod(before[1:]))


def is_global_average(node: fx.Node, module: Any) -> bool:
    """Whether a node takes the mean of each channel of an image."""
    if isinstance(module, nn.AdaptiveAvgPool2d) or node.target is F.adaptive_avg_pool2d:
        size = _argument(node, "output_size") if module is None else module.output_size
        return size in (1, (1, 1), [1, 1])
    if node.target not in (torch.mean, "mean") or len(shape_of(node.args[0])) != 4:
        return False
    dims = _argument(node, "dim")
    if not isinstance(dims, (list, tuple)) or len(dims) != 2 or "dtype" in node.kwargs:
        return False
    return {dim % 4 for dim in dims} == {2, 3}


def is_concat(node: fx.Node) -> bool:
    """Whether a node concatenates the channels of images."""
    if node.target not in (torch.cat, torch.concat) or not node.args:
        return False
    images = node.args[0]
    if not isinstance(images, (list, tuple)):
        return False
    dim = _argument(node, "dim", node.kwargs.get("axis", 0))
    return dim in (1, -3) and all(
        isinstance(one, fx.Node) and len(shape_of(one)) == 4 for one in images
    )


def _argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """The second argument of a call, by position or by name."""
    return node.args[1] if len(node.args) > 1 else node.kwargs.get(name, default)
