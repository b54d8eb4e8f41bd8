"""Programs as torch's operator `mptify::packed`, for graphs that are exported."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.runtime.library import require_library
from mptify.runtime.program import Program, ProgramBuilder
from mptify.runtime.values import Numbers

__all__ = ["call_as_operator"]


def call_as_operator(
    builder: ProgramBuilder, forms: list[Numbers], inputs: list[Tensor]
) -> list[Tensor]:
    """Call a program so that torch records one operator with everything that it reads.

    Args:
        builder: The program.
        forms: The forms of the inputs that it was built for.
        inputs: The images.
    """
    steps = torch.frombuffer(bytearray(builder.steps()), dtype=torch.uint8)
    constants = [
        one if isinstance(one, Tensor) else torch.from_numpy(one) for one in builder.constants
    ]
    shapes = _flatten([form.shape for form in builder.outputs])
    built_for = _flatten([sizes for form in forms for sizes in (form.shape, form.strides)])
    signature = require_library().signature
    return _packed(inputs, steps, constants, builder.workspace_sizes, shapes, built_for, signature)


@torch.library.custom_op("mptify::packed", mutates_args=(), device_types="cpu")
def _packed(
    inputs: list[Tensor],
    steps: Tensor,
    constants: list[Tensor],
    workspace_sizes: list[int],
    shapes: list[int],
    built_for: list[int],
    signature: int,
) -> list[Tensor]:
    """Run a program.

    Args:
        inputs: The images.
        steps: The steps, as bytes.
        constants: The constants.
        workspace_sizes: The bytes of each workspace buffer.
        shapes: The shapes of the outputs, for one image.
        built_for: The shape and the strides of each input that the steps were built for.
        signature: The signature of the library that the steps are for.
    """
    library = require_library()
    if signature != library.signature:
        raise MptifyError(
            "This graph was exported with another version of mptify's library; export it again."
        )
    expected = _unflatten(built_for)
    inputs = [
        _with_strides(x, shape, strides)
        for x, shape, strides in zip(inputs, expected[::2], expected[1::2], strict=True)
    ]
    data: Any = steps.numpy()
    array = library.Step * (steps.numel() // ctypes.sizeof(library.Step))
    program = Program(
        array.from_buffer_copy(data),
        len(inputs),
        _unflatten(shapes),
        workspace_sizes,
        constants,
        compiles=False,  # for one run
    )
    outputs = program.bind(inputs)
    program.run()
    return outputs


@_packed.register_fake
def _(
    inputs: list[Tensor],
    steps: Tensor,
    constants: list[Tensor],
    workspace_sizes: list[int],
    shapes: list[int],
    built_for: list[int],
    signature: int,
) -> list[Tensor]:
    return [inputs[0].new_empty((inputs[0].shape[0], *shape)) for shape in _unflatten(shapes)]


def _with_strides(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Images in the memory order that the steps were built for."""
    if tuple(x.shape[1:]) != shape or x.dtype != torch.float32:
        raise MptifyError(
            f"This graph was exported for float32 images of {shape}; it can't run on "
            f"{tuple(x.shape[1:])}, {x.dtype}."
        )
    if x.stride()[1:] == strides:
        return x
    size = max(1, *(length * stride for length, stride in zip(shape, strides, strict=True)))
    return torch.empty_strided(x.shape, (size, *strides), dtype=x.dtype).copy_(x)


def _flatten(shapes: list[tuple[int, ...]]) -> list[int]:
    """Each shape behind its length: operators take lists of numbers only."""
    return [number for shape in shapes for number in (len(shape), *shape)]


def _unflatten(numbers: list[int]) -> list[tuple[int, ...]]:
    """The inverse of `_flatten`."""
    shapes, left = [], list(numbers)
    while left:
        count, *left = left
        shapes.append(tuple(left[:count]))
        left = left[count:]
    return shapes
