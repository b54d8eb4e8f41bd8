"""Kernels as data and back: settings as JSON, buffers as tensors.

Each kernel class declares what to store: `SETTINGS`, `BUFFERS`, `OPTIONAL_BUFFERS`, `SUB_KERNELS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.kernel import Kernel

__all__ = ["deserialize", "serialize", "stored_kernels"]

_LARGEST = 1 << 30  # integer that a setting can be


def stored_kernels(program: nn.Module) -> dict[str, tuple[str, Kernel]]:
    """By name, the path and the kernel of everything that was made from weights."""
    paths: dict[str, tuple[str, Kernel]] = {}
    for path, module in program.named_modules():
        if isinstance(module, Kernel) and _has_buffers(type(module)):
            parent = program.get_submodule(path.rpartition(".")[0])
            if not isinstance(parent, Kernel):  # a sub-kernel is stored with its kernel
                paths[path.rpartition(".")[2]] = path, module
    return paths


def _has_buffers(kind: type[Kernel]) -> bool:
    return bool(kind.BUFFERS or kind.OPTIONAL_BUFFERS or kind.SUB_KERNELS)


def serialize(kernel: Kernel) -> dict[str, Any]:
    """What JSON can hold of a kernel; its `state_dict` holds the rest.

    Raises:
        MptifyError: Its class is not registered.
    """
    name = kernels.name_of(type(kernel))
    if name is None:
        raise MptifyError(
            f"{type(kernel).__name__} is not a registered kernel, so that no packed file can name "
            "it; register its class with mptify.registry.kernels."
        )
    settings = {setting: getattr(kernel, setting) for setting in kernel.SETTINGS}
    found = {
        setting: value.to_json() if hasattr(value, "to_json") else value
        for setting, value in settings.items()
    }
    children = {child: serialize(getattr(kernel, child)) for child in kernel.SUB_KERNELS}
    return {"kernel": name, **found, **children}


def deserialize(description: Any, tensors: Mapping[str, Tensor], where: str) -> Kernel:
    """The kernel again.

    Args:
        description: What `serialize` returned.
        tensors: Buffers by name: `WHERE.index` and so on.
        where: The name of the kernel in its program.

    Raises:
        BadConfig: No package has registered such a kernel.
        ValueError: The description or the buffers are none that a kernel has.
    """
    name = description.get("kernel") if isinstance(description, dict) else None
    if not isinstance(name, str):
        raise ValueError(f"{where}: it does not name a kernel")
    kind = kernels[name]
    kernel = kind.__new__(kind)
    nn.Module.__init__(kernel)
    for setting, expected in kind.SETTINGS.items():
        try:
            setattr(kernel, setting, _read_setting(expected, description.get(setting)))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    for child, expected in kind.SUB_KERNELS.items():
        found = deserialize(description.get(child), tensors, f"{where}.{child}")
        if not isinstance(found, expected):
            raise ValueError(f"{where}: its {child} is not a {expected.__name__}")
        setattr(kernel, child, found)
    for buffer in (*kind.BUFFERS, *kind.OPTIONAL_BUFFERS):
        if f"{where}.{buffer}" not in tensors and buffer in kind.BUFFERS:
            raise ValueError(f"{where}: it has no {buffer}")
        kernel.register_buffer(buffer, tensors.get(f"{where}.{buffer}"))
    try:
        kernel.validate()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return kernel.eval()


def _read_setting(expected: Any, value: Any) -> Any:
    if hasattr(expected, "from_json"):
        return expected.from_json(value)
    if type(value) is not expected:
        raise ValueError(f"{value!r} is not of type {expected.__name__}")
    if expected is int and not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r} is not a size")
    return value
