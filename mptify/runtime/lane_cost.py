"""What layers on lanes and torch's own operations are estimated to take.

The constants are fitted to `mptify bench layers --which every` on one core with AVX-512. Torch's
are rather too small: packing should never make a network slower.
"""

from __future__ import annotations

from math import ceil, prod

from torch import Tensor

from mptify.runtime.geometry import Geometry
from mptify.runtime.lane_layout import Arrangement, LaneLayout, Sums
from mptify.runtime.library import compiles, word_bytes

__all__ = ["dense_cost", "lanes_cost"]

# Nanoseconds.
_INSTRUCTION = {4: 0.1, 2: 0.05, 1: 0.085}  # by the bytes of a lane
_CODE = 0.2  # to read the code of a kept weight
_WRITE = 1.2  # of one vector of float32, from sums to output
_ARRANGE = 0.08  # of one number of the input
_FLUSH = 7  # instructions


def dense_cost(weight: Tensor, geometry: Geometry) -> float:
    """The nanoseconds that torch's convolution takes.

    Args:
        weight: [filters][channels of a group][rows][columns].
        geometry: The convolution.
    """
    multiplication = 0.0085 * 64 / max(16, word_bytes())
    pixels = prod(geometry.out_size)
    numbers = len(weight) * pixels + geometry.channels * prod(geometry.size)
    return weight.numel() * (pixels * multiplication + 0.2) + 0.15 * numbers


def lanes_cost(weight: Tensor, geometry: Geometry, sums: Sums, dtype: str) -> float:
    """The nanoseconds that a layer on lanes takes.

    Args:
        weight: M ⊙ B.
        geometry: The convolution.
        sums: What adds up.
        dtype: That of its input.
    """
    filters, channels, kept = len(weight), weight.shape[1], int((weight != 0).sum())
    taps, groups = prod(geometry.kernel), geometry.channels // channels
    arrangement = Arrangement.of(geometry, dtype)
    lanes = geometry.out_size[0] * arrangement.row
    if not compiles():
        sizes = (taps, channels, filters // groups, kept // groups)
        return groups * LaneLayout.of(sums, lanes, *sizes, dtype)[1]
    word, lane = word_bytes(), sums.lane_bytes
    registers = 28 if word == 64 else 13
    passes = ceil(lanes * lane / word)
    at_once = min(registers, filters // groups)
    seen = 1 - (1 - kept / weight.numel()) ** at_once  # of the taps, by the filters in registers
    loads = groups * ceil(filters // groups / at_once) * channels * taps * seen
    if groups > 1:
        loads = min(loads, kept)
    flushes = _FLUSH * kept / sums.most if sums.most else 0
    instructions = kept + loads + flushes + 3 * filters
    code = passes * instructions * _INSTRUCTION[lane] + kept * _CODE
    write = filters * ceil(lanes * 4 / word) * _WRITE
    is_strided = geometry.stride != (1, 1)
    arrange = _ARRANGE * geometry.channels * prod(geometry.size) if is_strided else 0
    return code + write + arrange
