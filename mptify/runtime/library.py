"""The C++ library behind the packed runtime, called through ctypes. Where there was no compiler, `library` is None."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mptify.native.build import open_library

__all__ = ["Conv", "Job", "Join", "Pixels", "Popcount", "Shape", "cpu_names", "library"]

_EDITION = 3


class Job(ctypes.Structure):
    """A layer on one image; the fields are explained in packed.cpp."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("planes", "index", "starts", "init", "unions", "present", "shortcut", "out", "counters")],
        *[(name, ctypes.c_int64) for name in ("unit", "stride", "groups", "sets", "bits")],
    ]


class Shape(ctypes.Structure):
    """A convolution's sizes; the fields are explained in packed.cpp."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "channels", "height", "width", "in_bytes", "out_height", "out_width", "out_bytes", "kernel_h", "kernel_w", "stride_h",
            "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "phases", "rows",
        )
    ]  # fmt: skip


class Pixels(ctypes.Structure):
    """A convolution of ordinary numbers on one image; the fields are explained in packed.cpp."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("numbers", "index", "starts", "thresholds", "falling", "out")],
        *[(name, ctypes.c_int64) for name in ("filters", "width", "row_bytes", "stride", "step")],
    ]


class Popcount(ctypes.Structure):
    """A layer that sees one pixel; the fields are explained in packed.cpp."""

    _fields_ = [*[(name, ctypes.c_void_p) for name in ("input", "weights", "kept", "out")], ("bytes", ctypes.c_int64)]


class Conv(ctypes.Structure):
    """A convolution of one image; the fields are explained in packed.cpp."""

    _fields_ = [
        ("image", ctypes.c_void_p), ("shape", ctypes.POINTER(Shape)), ("phases", ctypes.c_void_p), ("job", ctypes.POINTER(Job)),
        ("scratch", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("masks", ctypes.c_void_p),
        ("in_stride", ctypes.c_int64), ("classes", ctypes.c_int64),
    ]  # fmt: skip


class Join(ctypes.Structure):
    """Two layers whose outputs are added; the fields are explained in packed.cpp."""

    _fields_ = [
        ("one", ctypes.POINTER(Conv)), ("other", ctypes.POINTER(Conv)),
        *[(name, ctypes.c_void_p) for name in ("table", "runs", "out")],
        *[(name, ctypes.c_int64) for name in ("span", "run_count", "filters", "stride")],
    ]  # fmt: skip


def _load() -> ctypes.CDLL | None:
    found = open_library(Path(__file__).with_name("packed.cpp"), "mptify_packed_edition", _EDITION)
    if found is None:
        return None
    address, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    shape, conv = ctypes.POINTER(Shape), ctypes.POINTER(Conv)
    found.mptify_packed_cpu.restype = ctypes.c_char_p
    found.mptify_packed_conv.argtypes = [conv, count, address, address, count, number, number]
    found.mptify_packed_join.argtypes = [ctypes.POINTER(Join), number, number]
    found.mptify_packed_pixels.argtypes = [address, shape, ctypes.POINTER(Pixels), address, count, number, number]
    found.mptify_packed_popcount.argtypes = [ctypes.POINTER(Popcount), count, number, number]
    found.mptify_packed_pack.argtypes = [address, address, count, count, count, address, count, count, number]
    found.mptify_packed_unpack.argtypes = [address, count, count, count, count, count, address, number]
    found.mptify_packed_pool.argtypes = [address, count, shape, address, address, count, number]
    for name in ("conv", "join", "pixels", "popcount", "pack", "unpack", "pool"):
        getattr(found, f"mptify_packed_{name}").restype = None
    return found


library = _load()


def cpu_names() -> list[str]:
    """The instruction sets that this machine can run, the best last."""
    return [library.mptify_packed_cpu(i).decode() for i in range(library.mptify_packed_cpus())] if library else []
