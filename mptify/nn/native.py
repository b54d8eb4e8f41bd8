"""The C++ passes of a search step, called through ctypes.

The library is built when mptify is installed. Without a compiler, `library` is None, and torch
does the work with the same masks and, up to rounding, the same numbers.
"""

from __future__ import annotations

import ctypes
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mptify.nn.build import open_library

__all__ = [
    "NO_HINT",
    "Hint",
    "can_map",
    "can_select",
    "library",
    "score_gradient",
    "select",
    "sign",
    "sign_gradient",
]

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


def _load() -> ctypes.CDLL | None:
    found = open_library(_SOURCE)
    if found is None:
        return None
    address, count, number, bits = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_uint32
    found.mptify_select.restype = bits
    found.mptify_select.argtypes = [address] * 3 + [
        count,
        count,
        number,
        bits,
        bits,
        number,
        ctypes.POINTER(ctypes.c_float),
    ]
    for function in (found.mptify_score_gradient, found.mptify_sign, found.mptify_sign_gradient):
        function.restype = None
    found.mptify_sign.argtypes = [address] * 2 + [count, number]
    found.mptify_sign_gradient.argtypes = [address] * 3 + [count, ctypes.c_float, number]
    found.mptify_score_gradient.argtypes = [address] * 4 + [count, ctypes.c_float, number, number]
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


def select(
    scores: Tensor, weight: Tensor, out: Tensor, kept: int, kind: Effective, hint: Hint
) -> tuple[float, Hint]:
    """Write the effective weight into `out`; return the gain, and a hint for the next call."""
    assert library is not None
    gain = ctypes.c_float()
    threshold = library.mptify_select(
        scores.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
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


def score_gradient(grad: Tensor, weight: Tensor, scores: Tensor, by: float, signs: bool) -> Tensor:
    """The score gradient: grad ⊙ weight ⊙ sgn(scores) · by, with the weight's signs if `signs`."""
    assert library is not None
    # With equal strides even where a size is 1, which DistributedDataParallel compares.
    out = torch.empty_like(scores)
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
    out = torch.empty_like(x)
    library.mptify_sign(x.data_ptr(), out.data_ptr(), x.numel(), torch.get_num_threads())
    return out


def sign_gradient(grad: Tensor, x: Tensor, width: float) -> Tensor:
    """The gradient of the sign's estimator: grad · max(0, 2/t · (1 - |x|/t))."""
    assert library is not None
    out = torch.empty_like(x)
    library.mptify_sign_gradient(
        grad.data_ptr(), x.data_ptr(), out.data_ptr(), x.numel(), width, torch.get_num_threads()
    )
    return out
