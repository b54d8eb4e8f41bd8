"""The C++ passes of a search step, called through ctypes.

The library is built when mptify is installed. Without a compiler, `library` is None, and torch
does the work with the same masks and, up to rounding, the same numbers.
"""

from __future__ import annotations

import ctypes
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mptify.nn.build import open_library

__all__ = [
    "NO_HINT", "Effective", "Hint", "Levels", "bits_for", "can_map", "can_select", "empty_strided",
    "expand", "library", "pack_levels", "round_gradient", "round_levels", "score_gradient",
    "select", "sign", "sign_gradient", "unpack_levels",
]  # fmt: skip

_SOURCE = Path(__file__).with_name("csrc") / "ticket.cpp"
# In units in the last place: a change by 0.1 %, which about 0.1 % of the scores are within.
_LEAST_REACH = 1 << 13


class Effective(Enum):
    """Which effective weight `select` writes, as the library numbers them."""

    SCALED_SIGNS = 0  # gain · M ⊙ B
    SIGNS = 1  # M ⊙ B
    WEIGHTS = 2  # M ⊙ W


class Hint(NamedTuple):
    """The last threshold, and how far from it to search for the next, both as float32 bits."""

    threshold: int
    reach: int


NO_HINT = Hint(0, 0)


class Levels(NamedTuple):
    """Numbers that are `step` times whole numbers from `lowest` on, in `bits` bits; 1 bit is ±1."""

    bits: int
    lowest: int
    step: float


def _load() -> ctypes.CDLL | None:
    found = open_library(_SOURCE)
    if found is None:
        return None
    address, count, number, bits = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_uint32
    real, out = ctypes.c_float, ctypes.POINTER(ctypes.c_float)
    signatures: dict[str, list[Any]] = {
        "select": [*[address] * 4, count, count, number, bits, bits, number, out],
        "expand": [*[address] * 3, count, number, real, number],
        "score_gradient": [*[address] * 4, count, real, number, number],
        "sign": [*[address] * 2, count, number],
        "sign_gradient": [*[address] * 3, count, real, number],
        "pack_levels": [*[address] * 2, count, number, number, real, number],
        "unpack_levels": [*[address] * 2, count, number, number, real, number],
        "round": [*[address] * 3, count, real, real, real, real, number],
        "round_gradient": [*[address] * 3, count, real, real, number],
    }
    for name, arguments in signatures.items():
        function = getattr(found, f"mptify_{name}")
        function.argtypes, function.restype = arguments, None
    found.mptify_select.restype = bits
    found.mptify_pack_levels.restype = number
    return found


library = _load()


def can_select(values: Tensor, weight: Tensor) -> bool:
    """Whether the library can process these tensors: contiguous float32 on a CPU."""
    return (
        library is not None
        and not torch.compiler.is_compiling()
        and type(values) in (Tensor, torch.nn.Parameter)
        and all(
            one.device.type == "cpu" and one.dtype == torch.float32 and one.is_contiguous()
            for one in (values, weight)
        )
        and values.shape == weight.shape
        and 0 < values.numel() < 2**31
    )


def can_map(*values: Tensor) -> bool:
    """Whether the library can map these tensors elementwise: dense float32, of equal strides."""
    return (
        library is not None
        and not torch.compiler.is_compiling()
        and all(
            type(one) is Tensor and one.device.type == "cpu" and one.dtype == torch.float32
            for one in values
        )
        and all(
            one.stride() == values[0].stride() and one.shape == values[0].shape for one in values
        )
        and torch.ops.aten.is_non_overlapping_and_dense(values[0])
    )


def empty_strided(size: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """A new float32 tensor on the CPU, dense in memory.

    NumPy allocates it, since before version 2.38, glibc can't put a tensor that torch allocates in
    the gap that another one of the same size has left: torch wants it aligned. In a search, such
    gaps would add a tenth to the memory of a step.
    """
    storage = torch.from_numpy(np.empty(size.numel(), np.float32)).untyped_storage()
    # Not a view, which autograd would not let code modify in place.
    return torch.empty(0, dtype=torch.float32, device="cpu").set_(storage, 0, size, stride)


def _empty_like(x: Tensor) -> Tensor:
    return empty_strided(x.shape, x.stride())


def bits_for(count: int, bits: int = 1) -> Tensor:
    """A new buffer for `count` codes of so many bits; the library packs them in blocks of 256."""
    return torch.from_numpy(np.empty(-(-count // 256) * 32 * bits, np.uint8))


def select(
    scores: Tensor,
    weight: Tensor,
    out: Tensor,
    survivors: Tensor,
    kept: int,
    kind: Effective,
    hint: Hint,
) -> tuple[float, Hint]:
    """Select the survivors.

    Args:
        scores: The scores.
        weight: The frozen weights.
        out: Receives the effective weight.
        survivors: Receives a bit per weight (see `bits_for`).
        kept: How many survive.
        kind: Which effective weight to write.
        hint: The hint of the last call.

    Returns:
        The gain, and a hint for the next call.
    """
    assert library is not None
    gain = ctypes.c_float()
    threshold = library.mptify_select(
        scores.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        survivors.data_ptr(),
        scores.numel(),
        kept,
        kind.value,
        *hint,
        torch.get_num_threads(),
        gain,
    )
    torch.autograd.graph.increment_version(out)
    moved = abs(threshold - hint.threshold) if hint.threshold else 0
    return gain.value, Hint(threshold, min(max(4 * moved, hint.reach // 2, _LEAST_REACH), 1 << 18))


def expand(survivors: Tensor, weight: Tensor, gain: float, kind: Effective) -> Tensor:
    """The effective weight that `select` wrote, from the bits that it wrote."""
    assert library is not None
    out = _empty_like(weight)
    library.mptify_expand(
        survivors.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        out.numel(),
        kind.value,
        gain,
        torch.get_num_threads(),
    )
    return out


def score_gradient(grad: Tensor, weight: Tensor, scores: Tensor, by: float, signs: bool) -> Tensor:
    """The score gradient: grad ⊙ weight ⊙ sgn(scores) · by, with the weight's signs if `signs`."""
    assert library is not None
    # With equal strides even where a size is 1, which DistributedDataParallel compares.
    out = _empty_like(scores)
    library.mptify_score_gradient(
        grad.data_ptr(),
        weight.data_ptr(),
        scores.data_ptr(),
        out.data_ptr(),
        grad.numel(),
        by,
        signs,
        torch.get_num_threads(),
    )
    return out


def sign(x: Tensor) -> Tensor:
    """-1 where `x < 0`, and +1 elsewhere."""
    assert library is not None
    out = _empty_like(x)
    library.mptify_sign(x.data_ptr(), out.data_ptr(), x.numel(), torch.get_num_threads())
    return out


def sign_gradient(grad: Tensor, x: Tensor, width: float) -> Tensor:
    """The gradient of the sign's estimator: grad · max(0, 2/t · (1 - |x|/t))."""
    assert library is not None
    out = _empty_like(x)
    library.mptify_sign_gradient(
        grad.data_ptr(), x.data_ptr(), out.data_ptr(), x.numel(), width, torch.get_num_threads()
    )
    return out


def pack_levels(x: Tensor, levels: Levels) -> Tensor | None:
    """Pack numbers in few bits each, in the order of memory; None if one is not a level."""
    assert library is not None
    packed = bits_for(x.numel(), levels.bits)
    fits = library.mptify_pack_levels(
        x.data_ptr(), packed.data_ptr(), x.numel(), *levels, torch.get_num_threads()
    )
    return packed if fits else None


def unpack_levels(packed: Tensor, levels: Levels, out: Tensor) -> None:
    """Write the numbers that `pack_levels` packed into `out`."""
    assert library is not None
    library.mptify_unpack_levels(
        packed.data_ptr(), out.data_ptr(), out.numel(), *levels, torch.get_num_threads()
    )


def round_levels(
    x: Tensor, inverse: float, lowest: float, highest: float, step: float
) -> tuple[Tensor, Tensor]:
    """step · round(clip(x · inverse)), and a bit for each number that was not clipped."""
    assert library is not None
    out, inside = _empty_like(x), bits_for(x.numel())
    library.mptify_round(
        x.data_ptr(),
        out.data_ptr(),
        inside.data_ptr(),
        x.numel(),
        inverse,
        lowest,
        highest,
        step,
        torch.get_num_threads(),
    )
    return out, inside


def round_gradient(grad: Tensor, inside: Tensor, inverse: float, step: float) -> Tensor:
    """Its estimator: grad · step ⊙ inside · inverse. `grad` has the strides that `x` had."""
    assert library is not None
    out = _empty_like(grad)
    library.mptify_round_gradient(
        grad.data_ptr(),
        inside.data_ptr(),
        out.data_ptr(),
        grad.numel(),
        inverse,
        step,
        torch.get_num_threads(),
    )
    return out
