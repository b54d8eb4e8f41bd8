"""A pruned convolution of real or few-bit numbers: one addition per survivor and vector of pixels.

Weights are ±1. Inputs of 32 bits are added as float32; those of 2, 4 and 8 bits are levels, which
are added as bytes or 16-bit integers.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernel import Candidate, NativeKernel
from mptify.runtime.lane_cost import dense_cost, lanes_cost
from mptify.runtime.lane_fusion import LanePattern
from mptify.runtime.lane_layout import Arrangement, LaneLayout, Sums, margin_offsets, tap_lists
from mptify.runtime.validation import (
    count_bits,
    same_numbers,
    validate_floats,
    validate_halves,
    validate_levels,
    validate_range,
    validate_step,
)
from mptify.runtime.values import LANE_TYPES, Numbers, Planes, Value, require_image

__all__ = ["LanesConv", "estimated_costs", "level_type"]

_MOST_EXACT = 1 << 24  # float32 holds all integers up to it
_PER_FILTER = ("bias", "alpha", "beta", "last_alpha", "last_beta")


def level_type(lowest: float) -> str:
    """The type of the bytes that hold levels."""
    return "int8" if lowest < 0 else "uint8"


@kernels.register("lanes_conv")
class LanesConv(NativeKernel):
    """Sums of ±inputs, and what follows them.

    ((sum · unit · scale + bias) · alpha + beta) + other, clipped to a range, · last_alpha +
    last_beta, each operation rounded to float32. The result can be rounded to levels.

    Args:
        weight: M ⊙ B: -1, 0 or 1. For tokens, [filters][channels][1][1].
        geometry: The convolution on images of the usual size.
        scale: What multiplies the sums.
        levels: If the input is levels: the lowest, the highest, and the unit that sums of levels
            are multiplied by. None for float32 inputs.
        epilogue: bias, alpha, beta, last_alpha and last_beta, as far as there are any, the `range`
            that the output is clipped to, and the `other_step`, if what is added is levels.
        rounding: How the output becomes levels: the inverse of their step, the lowest and the
            highest. None if the output is numbers.
        tokens: Whether channels are the last dimension.
        fused: Whether multiplying by alpha and adding beta is one operation, rounded once.
    """

    SETTINGS: ClassVar = {
        "filters": int,
        "geometry": Geometry,
        "tokens": bool,
        "fused": bool,
        "weight_count": int,
        "survivor_count": int,
        "weight_bytes": int,
    }
    BUFFERS = ("weights", "scale")
    OPTIONAL_BUFFERS = ("levels", "range", "other_step", "rounding", *_PER_FILTER)
    ON_LANES = True
    geometry: Geometry
    weights: Tensor
    scale: Tensor
    levels: Any
    rounding: Any
    range: Any
    other_step: Any
    bias: Any

    def __init__(
        self,
        weight: Tensor,
        geometry: Geometry,
        scale: Tensor,
        levels: tuple[float, float, float] | None = None,
        epilogue: dict[str, Tensor] | None = None,
        rounding: tuple[float, float, float] | None = None,
        *,
        tokens: bool = False,
        fused: bool = False,
    ):
        super().__init__()
        self.filters, self.geometry = len(weight), geometry
        self.tokens, self.fused = tokens, fused
        signs = weight.numpy().reshape(self.filters, -1)
        bits = [np.packbits(half, axis=1, bitorder="little") for half in (signs != 0, signs > 0)]
        self.register_buffer("weights", torch.from_numpy(np.stack(bits, axis=1)))
        self.register_buffer("scale", scale.detach().reshape(1).float())
        self.register_buffer("levels", None if levels is None else torch.tensor(levels))
        self.register_buffer("rounding", None if rounding is None else torch.tensor(rounding))
        for name in ("range", "other_step", *_PER_FILTER):
            value = (epilogue or {}).get(name)
            self.register_buffer(name, None if value is None else value.detach().float())
        self.weight_count, self.survivor_count = weight.numel(), int((weight != 0).sum())
        self.weight_bytes = self.weights.nbytes

    @classmethod
    def matches(cls, pattern: LanePattern) -> bool:
        return not pattern.is_vector

    @classmethod
    def candidate(cls, pattern: LanePattern) -> Candidate | None:
        levels = pattern.levels and (int(pattern.levels.lowest), int(pattern.levels.highest))
        cost, dense = estimated_costs(pattern.weight(), pattern.geometry(), levels)
        if cost == inf or cost > dense:
            return None
        return Candidate(cost, lambda: cls.of(pattern))

    @classmethod
    def of(cls, pattern: LanePattern) -> LanesConv:
        levels, rounding, other_step = _levels_of(pattern)
        epilogue = dict(pattern.epilogue)
        if other_step is not None:
            epilogue["other_step"] = torch.tensor(other_step)
        return cls(
            pattern.weight(),
            pattern.geometry(),
            pattern.scale(),
            levels,
            epilogue,
            rounding,
            tokens=pattern.tokens,
            fused=pattern.fused,
        )

    def suits(self, pattern: Any) -> bool:
        if not isinstance(pattern, LanePattern) or not self.matches(pattern):
            return False
        numbers = (*_levels_of(pattern), pattern.epilogue.get("range"))
        ours = (self.levels, self.rounding, self.other_step, self.range)
        fused = {name for name in _PER_FILTER if getattr(self, name) is not None}
        return (
            (self.filters, self.weight_count) == (pattern.layer.shape[0], pattern.layer.count)
            and (self.geometry, self.tokens) == (pattern.geometry(), pattern.tokens)
            and all(map(same_numbers, ours, numbers))
            and fused == pattern.epilogue.keys() & set(_PER_FILTER)
        )

    def validate(self) -> None:
        filters, geometry = self.filters, self.geometry
        per_filter, rest = divmod(self.weight_count, max(1, filters))
        taps = prod(geometry.kernel)
        if not filters or not per_filter or rest or per_filter % taps:
            raise ValueError("its sizes do not fit each other")
        channels = per_filter // taps
        groups = geometry.channels // channels
        if geometry.channels % channels or filters % groups:
            raise ValueError("its channels do not divide into groups")
        plain = Geometry(channels, (1, geometry.size[1]), (1, 1))
        if self.tokens and geometry != plain:
            raise ValueError("it is no linear layer on tokens")
        validate_halves(self.weights, filters, 2, -(-per_filter // 8))
        mask, positive = self.weights[:, 0], self.weights[:, 1]
        if count_bits(mask) != self.survivor_count or count_bits(positive & ~mask):
            raise ValueError("it has other survivors than it says")
        if self.weight_bytes != self.weights.nbytes:
            raise ValueError("its weights have another size than it says")
        self._validate_numbers()

    def _validate_numbers(self) -> None:
        validate_floats("scale", self.scale, 1)
        validate_floats("other_step", self.other_step)
        validate_range(self.range)
        for name in _PER_FILTER:
            validate_floats(name, getattr(self, name), self.filters)
        for name in ("", "last_"):
            norm = (getattr(self, f"{name}alpha"), getattr(self, f"{name}beta"))
            if (norm[0] is None) != (norm[1] is None):
                raise ValueError(f"it has one of {name}alpha and {name}beta without the other")
        validate_floats("levels", self.levels, 3)
        if self.levels is not None:
            lowest, highest, unit = self.levels.tolist()
            validate_levels(lowest, highest)
            validate_step("unit", unit)
        validate_floats("rounding", self.rounding, 3)
        if self.rounding is not None:
            inverse, lowest, highest = self.rounding.tolist()
            validate_step("inverse", inverse)
            validate_levels(lowest, highest)

    def ternary(self) -> np.ndarray:
        """M ⊙ B as int8."""
        count = self.weight_count // self.filters
        mask, positive = (
            np.unpackbits(self.weights.numpy()[:, half], axis=1, bitorder="little", count=count)
            for half in (0, 1)
        )
        signs = (2 * positive.astype(np.int8) - 1) * mask.astype(np.int8)
        return signs.reshape(self.filters, -1, *self.geometry.kernel)

    @property
    def groups(self) -> int:
        """The groups of the convolution."""
        rows, columns = self.geometry.kernel
        return self.filters * self.geometry.channels * rows * columns // self.weight_count

    @property
    def dtype(self) -> str:
        """The type of what is added."""
        return "float32" if self.levels is None else level_type(float(self.levels[0]))

    @property
    def keeps_size(self) -> bool:
        """Whether the output has the size of the input, so that it can have the same rows."""
        geometry = self.geometry
        return geometry.stride == (1, 1) and geometry.out_size == geometry.size

    def margin(self, margin: int) -> int:
        """The margin that its inputs should have, if its output should have `margin`."""
        return max(margin if self.keeps_size else 0, *self.geometry.padding)

    def readable(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def emit(self, builder: Any, *inputs: Value) -> Value:
        """The second input is added to the output."""
        source, *other = inputs
        geometry, strides = self._read(source.form)
        fields: dict[str, Any] = {}
        offsets = None
        if isinstance(source.form, Planes):
            offsets = margin_offsets(source.form, geometry)
            row, channel = source.form.row, source.form.plane * source.form.item_bytes
            if row - source.form.width < builder.margin:
                offsets = None
        if offsets is None:
            arrangement = Arrangement.of(geometry, self.dtype)
            excess = max(builder.margin, arrangement.row - geometry.out_size[1])
            arrangement = replace(arrangement, row=geometry.out_size[1] + excess)
            source = self._arrange(builder, source, geometry, strides, arrangement)
            offsets, row = arrangement.tap_offsets(geometry), arrangement.row
            channel = arrangement.plane * arrangement.item_bytes
        weight = self.ternary()
        layout, sums, phase_ends = self._layout(weight, geometry.out_size[0] * row)
        lists = tap_lists(layout, self.groups, weight)
        lanes: dict[str, Any] = {
            "bytes": sums.lane_bytes,
            "tile_bytes": layout.tile_bytes,
            "row": row,
            "taps": len(offsets),
            "group_channels": layout.group_channels,
            "filter_block": min(layout.filter_block, self.filters // self.groups),
            "most": sums.most,
            "lowest": sums.lowest,
            "highest": sums.highest,
            "in_type": LANE_TYPES[self.dtype][0],
            "in_channel": channel,
            "fused": self.fused,
            "clips": self.range is not None,
            "tap_offsets": builder.constant(offsets),
            "counts": builder.constant(lists.counts),
            "factors": builder.constant(self._factors()),
        }
        if phase_ends is not None:
            lanes["phase_ends"] = builder.constant(phase_ends)
        form = self._output_form(builder, source, inputs[0].form, geometry, row)
        lanes |= self._out_fields(form, geometry)
        lanes["flat"] = isinstance(form, Planes) and form.row == row
        if other:
            lanes |= self._other_fields(other[0].form, form)
            fields["second_input"] = other[0].buffer
            is_flat = isinstance(other[0].form, Planes) and other[0].form.row == row
            lanes["flat"] = lanes["flat"] and is_flat
        for name in ("alpha", "beta", "last_alpha", "last_beta"):
            value = getattr(self, name)
            if value is not None:
                lanes[name] = builder.constant(value.contiguous())
        if self.bias is not None:
            fields["bias"] = builder.constant(self.bias.contiguous())
        conv = {
            "shape": geometry.shape(),
            "index": builder.constant(lists.taps),
            "starts": builder.constant(lists.starts),
            "groups": self.groups,
        }
        fields |= {"filters": self.filters, "input": source.buffer, "conv": conv, "lanes": lanes}
        return builder.add("lanes_conv", form, **fields)

    def _read(self, form: Any) -> tuple[Geometry, tuple[int, int, int]]:
        """The convolution on what it reads, and the strides of that, in elements."""
        channels = (
            form.channels if isinstance(form, Planes) else form.shape[-1 if self.tokens else 0]
        )
        expected = self.geometry.channels
        if channels != expected:
            raise MptifyError(f"A packed layer reads {expected} channels, not {channels}.")
        if isinstance(form, Planes):
            if form.dtype != self.dtype:
                raise MptifyError(f"A packed layer reads {self.dtype}, not {form.dtype}.")
            return self.geometry.at((form.height, form.width)), form.strides
        if self.tokens:
            return self.geometry.at((1, prod(form.shape[:-1]))), (1, 0, channels)
        _, height, width = require_image(form)
        return self.geometry.at((height, width)), (height * width, width, 1)

    def _arrange(
        self,
        builder: Any,
        source: Value,
        geometry: Geometry,
        strides: tuple[int, int, int],
        arrangement: Arrangement,
    ) -> Value:
        """The input as this layer reads it; layers that read it alike share it."""
        if self.levels is not None and not isinstance(source.form, Planes):
            raise MptifyError(f"A packed layer reads {self.dtype}, not numbers.")
        pads, steps = geometry.padding, geometry.stride
        key = (source.buffer, arrangement, pads, steps, strides)
        if key not in builder.arranged:
            is_planes = isinstance(source.form, Planes)
            lanes = {
                "row": arrangement.row,
                "rows": arrangement.rows,
                "column_phases": len(arrangement.column_phases),
                "phase": arrangement.phase,
                "tail": arrangement.tail,
                "in_type": LANE_TYPES[arrangement.dtype][0],
                "in_origin": source.form.origin if is_planes else 0,
                "in_margin": source.form.margin if is_planes else 0,
                "out_type": LANE_TYPES[arrangement.dtype][0],
                "out_channel": arrangement.plane,
            }
            phases = np.array([*arrangement.row_phases, *arrangement.column_phases], np.int64)
            shape = geometry.shape() | {"phases": len(arrangement.row_phases)}
            builder.arranged[key] = builder.add_temporary(
                "lanes_arrange",
                arrangement.bytes(geometry.channels),
                input=source.buffer,
                strides=strides,
                conv={"shape": shape, "phases": builder.constant(phases)},
                lanes=lanes,
            )
        return Value(None, builder.arranged[key])

    def _output_form(
        self, builder: Any, source: Value, form: Any, geometry: Geometry, row: int
    ) -> Any:
        height, width = geometry.out_size
        if builder.is_output and self.rounding is not None:
            raise MptifyError("Levels can't leave a chain.")
        dtype = "float32" if self.rounding is None else level_type(float(self.rounding[1]))
        if self.tokens:
            tokens: Any = form.tokens if isinstance(form, Planes) else form.shape[:-1]
            if self.rounding is None:
                return Numbers.contiguous(*tokens, self.filters)
            return Planes(dtype, self.filters, height, width, tokens=tokens)
        if builder.is_output:
            return Numbers.contiguous(self.filters, height, width)
        excess = row - width
        margin = excess if excess >= builder.margin else builder.margin
        return Planes(dtype, self.filters, height, width, margin)

    def _out_fields(self, form: Any, geometry: Geometry) -> dict[str, int]:
        if isinstance(form, Planes):
            return {
                "out_type": form.type_number,
                "out_origin": form.origin,
                "out_channel": form.plane,
                "out_row": form.row,
                "out_column": 1,
                "out_margin": form.margin,
            }
        height, width = geometry.out_size
        if self.tokens:
            return {"out_channel": 1, "out_row": 0, "out_column": self.filters}
        return {"out_channel": height * width, "out_row": width, "out_column": 1}

    def _other_fields(self, other: Any, form: Any) -> dict[str, int]:
        if self._planes_of(other) != self._planes_of(form):
            raise MptifyError(
                f"A packed layer makes {form.shape}, but what it adds is {other.shape}."
            )
        names = ("other_channel", "other_row", "other_column")
        if isinstance(other, Planes):
            fields = dict(zip(names, other.strides))
            return {"other_type": other.type_number, "other_origin": other.origin, **fields}
        if self.tokens:
            return dict(zip(names, (1, 0, self.filters)))
        _, height, width = other.shape
        return dict(zip(names, (height * width, width, 1)))

    def _planes_of(self, form: Any) -> tuple[int, ...]:
        """The channels, rows and columns of what is added, or made."""
        if self.tokens and isinstance(form, Numbers):
            return form.shape[-1], 1, prod(form.shape[:-1])
        return tuple(form.shape)

    def _factors(self) -> Tensor:
        """`LaneFactors` in csrc/lanes_conv.inl."""
        unit = 1.0 if self.levels is None else float(self.levels[2])
        other = 1.0 if self.other_step is None else float(self.other_step)
        low, high = (-inf, inf) if self.range is None else self.range.tolist()
        rounding = (1.0, 0.0, 0.0) if self.rounding is None else self.rounding.tolist()
        return torch.tensor([float(self.scale), unit, other, low, high, *rounding])

    def _layout(self, weight: np.ndarray, lanes: int) -> tuple[LaneLayout, Sums, Any]:
        """The layout, what adds up, and where phases end."""
        taps, channels = prod(self.geometry.kernel), weight.shape[1]
        per_sign = _taps_per_sign(weight)
        levels = None if self.levels is None else (int(self.levels[0]), int(self.levels[1]))
        sums = _sums_of(weight, levels)
        if sums is None:
            raise MptifyError("A packed layer has more survivors than its lanes can add.")
        kept = self.survivor_count // self.groups
        sizes = (taps, channels, self.filters // self.groups, kept)
        layout, _ = LaneLayout.of(sums, lanes, *sizes, self.dtype)
        while True:
            try:
                return layout, sums, sums.phase_ends(per_sign, layout.group_channels)
            except OverflowError:
                layout = replace(layout, group_channels=-(-layout.group_channels // 2))


def _levels_of(pattern: LanePattern) -> tuple[Any, Any, Any]:
    """The levels that a kernel reads and makes, and the step of the levels that it adds."""
    read, made, other = pattern.levels, pattern.rounding, pattern.other_levels
    return (
        None if read is None else (read.lowest, read.highest, pattern.unit),
        None if made is None else made[:3],
        None if other is None else other.step,
    )


def estimated_costs(
    weight: Tensor, geometry: Geometry, levels: tuple[int, int] | None
) -> tuple[float, float]:
    """The nanoseconds that a layer takes on lanes and in torch.

    Args:
        weight: M ⊙ B.
        geometry: The convolution.
        levels: The lowest and highest level of its input; None for float32 inputs.

    Returns:
        The two estimates; the first is infinite if no lanes can hold the sums.
    """
    sums = _sums_of(weight.numpy(), levels)
    dtype = level_type(levels[0]) if levels else "float32"
    cost = inf if sums is None else lanes_cost(weight, geometry, sums, dtype)
    return cost, dense_cost(weight, geometry)


def _sums_of(weight: np.ndarray, levels: tuple[int, int] | None) -> Sums | None:
    """What adds up; None if sums would overflow, or not be exact in float32."""
    if levels is not None:
        most = int((weight != 0).reshape(len(weight), -1).sum(1).max())
        if most * max(map(abs, levels)) >= _MOST_EXACT:
            return None
    return Sums.of(levels, _taps_per_sign(weight))


def _taps_per_sign(weight: np.ndarray) -> np.ndarray:
    """[positive, negative][filters][channels]: how many taps there are."""
    return np.stack([(weight > 0).sum((2, 3)), (weight < 0).sum((2, 3))])
