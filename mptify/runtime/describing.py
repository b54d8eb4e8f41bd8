"""Kernels as data and back: their settings for JSON, their buffers as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from torch import Tensor, nn

from mptify.runtime.bitsliced import BitslicedConv
from mptify.runtime.geometry import Geometry, Layout
from mptify.runtime.joined import JoinedConv
from mptify.runtime.linear import PopcountLinear
from mptify.runtime.means import MeanLinear
from mptify.runtime.pixels import PixelConv
from mptify.runtime.planes import Kernel
from mptify.runtime.pooling import Pool
from mptify.runtime.windows import WindowConv

__all__ = ["describe", "restore", "stored_kernels"]

_KINDS: dict[str, type[Kernel]] = {
    kind.__name__: kind for kind in (BitslicedConv, JoinedConv, MeanLinear, PixelConv, PopcountLinear, Pool, WindowConv)
}
_PARTS = {"JoinedConv": ("one", "other")}
_BUFFERS = {
    "BitslicedConv": ("index", "starts", "flipped", "thresholds", "gain", "offset"), "JoinedConv": ("least",),
    "MeanLinear": ("index", "starts", "gain", "offset"), "PixelConv": ("taps", "starts", "thresholds", "falling"),
    "PopcountLinear": ("weights", "kept", "thresholds", "gain", "offset"),
    "WindowConv": ("weights", "thresholds", "gain", "offset"), "Pool": ("falling",),
}  # fmt: skip


def stored_kernels(program: nn.Module) -> dict[str, Kernel]:
    """By name, the kernels of a program that were made from weights."""
    return {
        path.rpartition(".")[2]: module
        for path, module in program.named_modules()
        if type(module).__name__ in _KINDS and ".kernels." in path and path.count(".") == 2
    }  # type: ignore[misc]


def describe(kernel: Kernel) -> dict[str, Any]:
    """What JSON can say of a kernel; its buffers say the rest."""
    kind = type(kernel).__name__
    settings = {name: getattr(kernel, name) for name in kernel.SETTINGS}
    found = {name: astuple(value) if isinstance(value, (Geometry, Layout)) else value for name, value in settings.items()}
    return {"kind": kind, **found, **{part: describe(getattr(kernel, part)) for part in _PARTS.get(kind, ())}}


def restore(description: Any, tensors: Mapping[str, Tensor], name: str) -> Kernel:
    """The kernel again, from what `describe` said and its buffers, `name.index` and so on. Raises ValueError for what can't be one."""
    kind = description.get("kind") if isinstance(description, dict) else None
    if kind not in _KINDS:
        raise ValueError(f"{name}: there is no kernel {kind!r}")
    kernel = _KINDS[kind].__new__(_KINDS[kind])
    nn.Module.__init__(kernel)
    for setting in kernel.SETTINGS:
        setattr(kernel, setting, _setting(setting, description.get(setting), name))
    for part in _PARTS.get(kind, ()):
        child = restore(description.get(part), tensors, f"{name}.{part}")
        if not isinstance(child, BitslicedConv):
            raise ValueError(f"{name}: its parts are no layers")
        setattr(kernel, part, child)
    for buffer in _BUFFERS[kind]:
        optional = kind != "PixelConv" and buffer in ("thresholds", "falling", "gain", "offset")
        if f"{name}.{buffer}" not in tensors and not optional:
            raise ValueError(f"{name}: has no {buffer}")
        kernel.register_buffer(buffer, tensors.get(f"{name}.{buffer}"))
    fault = kernel.fault()
    if fault:
        raise ValueError(f"{name}: {fault}")
    return kernel


def _setting(setting: str, value: Any, name: str) -> Any:
    if setting == "geometry":
        if not isinstance(value, list) or len(value) != 6:
            raise ValueError(f"{name}: geometry is no convolution")
        pairs = [_pair(value[1], name, 1 << 15), *(_pair(one, name) for one in value[2:])]
        if min(*pairs[0], *pairs[1], *pairs[2], *pairs[4]) < 1:
            raise ValueError(f"{name}: geometry is no convolution")
        return Geometry(_number(value[0], name), *pairs)
    if setting == "layout":
        if not isinstance(value, list) or len(value) != 3 or min(_number(one, name) for one in value) < 1:
            raise ValueError(f"{name}: {value!r} is no layout")
        return Layout(*value)
    if setting == "sizes":
        return tuple(_pair(one, name) for one in value) if isinstance(value, list) else ()
    return _number(value, name)


def _pair(value: Any, name: str, most: int = 1 << 10) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{name}: {value!r} is no height and width")
    return _number(value[0], name, most), _number(value[1], name, most)


def _number(value: Any, name: str, most: int = 1 << 30) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name}: {value!r} is no size")
    return value
