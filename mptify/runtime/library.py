"""The C++ library behind the packed runtime, called through ctypes. Where there was no compiler, `library` is None."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mptify.nn.build import open_library

__all__ = ["EDITION", "KINDS", "Layer", "Shape", "Step", "cpu_names", "library", "word_bytes"]

EDITION = 13

KINDS = (
    "conv",
    "sums",
    "join",
    "pixels",
    "popcount",
    "pack",
    "unpack",
    "pool",
    "flatten",
    "windows",
    "copy",
    "means",
)  # of steps, in the library's order


class Shape(ctypes.Structure):
    """A convolution's sizes; the fields are explained in rows.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "channels", "height", "width", "in_bytes", "out_height", "out_width", "out_bytes", "kernel_h", "kernel_w", "stride_h",
            "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "phases",
        )
    ]  # fmt: skip


class Layer(ctypes.Structure):
    """A convolution's tables, as numbers of arrays; the fields are explained in steps.h."""

    ARRAYS = ("index", "starts", "flipped", "init", "odd", "unions", "present", "masks", "phases", "bias", "scratch")
    _fields_ = [
        ("shape", Shape),
        *[
            (name, ctypes.c_int64)
            for name in (
                *ARRAYS,
                "unit",
                "stride",
                "groups",
                "sets",
                "bits",
                "in_stride",
                "classes",
                "strip",
                "part",
                "blocks",
                "union_stride",
            )
        ],
    ]


class Step(ctypes.Structure):
    """One step of a program; the fields are explained in steps.h."""

    ARRAYS = ("in_", "second", "out", "table", "thresholds", "falling", "gain", "offset")
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("kind", "filters", "in_", "second", "out")],
        ("one", Layer), ("other", Layer),
        *[(name, ctypes.c_int64) for name in ("table", "thresholds", "falling", "gain", "offset", "span", "length")],
        ("steps", ctypes.c_int64 * 3),
    ]  # fmt: skip


def _load() -> ctypes.CDLL | None:
    found = open_library(Path(__file__).with_name("csrc") / "packed.cpp", "mptify_packed_edition", EDITION)
    if found is None:
        return None
    address, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    found.mptify_packed_cpu.restype = ctypes.c_char_p
    found.mptify_packed_run.argtypes = [address, count, address, address, count, number, number]
    found.mptify_packed_run.restype = None
    return found


library = _load()


def cpu_names() -> list[str]:
    """The instruction sets that this machine can run, the best last."""
    return [library.mptify_packed_cpu(i).decode() for i in range(library.mptify_packed_cpus())] if library else []


def word_bytes() -> int:
    """The widest words that kernels have on this machine."""
    return library.mptify_packed_word() if library else 32
