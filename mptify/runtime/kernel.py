"""What a runtime kernel is: base classes, which state everything that the runtime asks of one.

A kernel computes one step of a packed program. It is one class in one file, registered by name in
`mptify.registry.kernels`; a native kernel also has a C++ file of the same name in `csrc/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mptify.runtime.values import Buffer, Value

if TYPE_CHECKING:
    from typing_extensions import Self

    from mptify.runtime.fusion import Pattern
    from mptify.runtime.lane_fusion import LanePattern
    from mptify.runtime.program import ProgramBuilder

__all__ = ["Candidate", "Kernel", "LayerKernel", "NativeKernel", "TorchKernel"]


class Candidate(NamedTuple):
    """A kernel that can compute a pattern.

    Attributes:
        cost: The estimated nanoseconds for one image on one core (AVX2). The cheapest candidate
            of all registered kernels is used.
        make: Makes the kernel from the layer's weights.
    """

    cost: float
    make: Callable[[], Kernel]


class Kernel(nn.Module):
    """One step of a program: base class of `TorchKernel` (yours) and of the native kernels.

    A packed file stores a kernel as its registered name, its settings and its buffers. Loading
    sets these on a new object without calling `__init__`, and then calls `validate`.

    Attributes:
        SETTINGS: The attributes that a packed file stores as JSON, with their types: int, float,
            str, bool, or a class with `to_json` and `from_json`.
        BUFFERS: The buffers that a packed file stores.
        OPTIONAL_BUFFERS: The buffers that may be None.
        SUB_KERNELS: The attributes that are kernels themselves, with their types.
        ON_LANES: Whether it computes a [`LanePattern`][mptify.runtime.lane_fusion.LanePattern],
            of real or few-bit inputs, rather than a pattern of signs.
    """

    SETTINGS: ClassVar[Mapping[str, Any]] = {}
    BUFFERS: ClassVar[tuple[str, ...]] = ()
    OPTIONAL_BUFFERS: ClassVar[tuple[str, ...]] = ()
    SUB_KERNELS: ClassVar[Mapping[str, type[Kernel]]] = {}
    ON_LANES: ClassVar[bool] = False

    @classmethod
    def matches(cls, pattern: Any) -> bool:
        """Whether this class computes such patterns, judged without reading any weights."""
        return False

    @classmethod
    def candidate(cls, pattern: Any) -> Candidate | None:
        """A kernel for a pattern that `matches`, or None if it can't compute this one."""
        return None

    def suits(self, pattern: Pattern | LanePattern) -> bool:
        """Whether this kernel, which was loaded from a file, computes the pattern."""
        return type(self).matches(pattern)

    def validate(self) -> None:
        """Check settings and buffers, which may come from a damaged or hostile file.

        Raises:
            ValueError: They are not what `__init__` makes.
        """


class TorchKernel(Kernel):
    """A kernel written in Python: its `forward` takes and returns float32 tensors.

    It reads what the pattern reads: `pattern.source`, then the source of `pattern.other` and
    `pattern.shortcut`, as far as there are any. Signs are ±1. It returns the signs of the pattern
    before its max-pool, or the layer's output if the pattern makes numbers.
    """


class NativeKernel(Kernel):
    """A kernel that emits steps for the C++ library, which believes everything it is told."""

    def readable(self, x: Tensor) -> Tensor:
        """Numbers in a memory order that the kernel can read."""
        return x

    def margin(self, margin: int) -> int:
        """The margin that its inputs should have, if its output should have `margin`."""
        return 0

    def emit(self, builder: ProgramBuilder, *inputs: Value) -> Value:
        """Add this kernel's steps to a program for images of one size; returns its result."""
        raise NotImplementedError


class LayerKernel(NativeKernel):
    """A binary layer: makes signs if it has `thresholds`, and otherwise numbers.

    The numbers are the layer's sums, times `gain`, plus the `bias` of each filter.
    """

    OPTIONAL_BUFFERS: ClassVar[tuple[str, ...]] = ("thresholds", "gain", "bias")

    thresholds: Tensor | None
    gain: Tensor | None
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.scale_(None, None)

    def scale_(self, gain: Tensor | None, bias: Tensor | None) -> None:
        self.register_buffer("gain", None if gain is None else gain.detach())
        self.register_buffer("bias", None if bias is None else bias.detach())

    def scaled_for(self, pattern: Pattern) -> Self:
        """This kernel, with the layer's gain and bias if the pattern makes numbers."""
        if not pattern.makes_signs:
            layer = pattern.branch.layer
            self.scale_(layer.gain, layer.output_bias)
        return self

    def suits(self, pattern: Any) -> bool:
        is_thresholded, is_scaled = self.thresholds is not None, self.gain is not None
        makes_signs = is_thresholded and not is_scaled
        makes_numbers = is_scaled and not is_thresholded
        return super().suits(pattern) and (makes_signs if pattern.makes_signs else makes_numbers)

    def scales(self, builder: ProgramBuilder) -> dict[str, Buffer]:
        """Gain and bias as constants of a program, for a step that makes numbers."""
        found = {"gain": self.gain, "bias": self.bias}
        return {
            name: builder.constant(scale.contiguous())
            for name, scale in found.items()
            if scale is not None
        }

    def validate_scales(self, filters: int) -> None:
        gain, bias = self.gain, self.bias
        if gain is not None and (gain.dtype != torch.float32 or gain.numel() != 1):
            raise ValueError("its gain is not one float32 number")
        if bias is not None and (bias.dtype != torch.float32 or bias.shape != (filters,)):
            raise ValueError("its biases are not one float32 number per filter")
