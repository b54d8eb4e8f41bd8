"""Time single packed layers beside torch's float32 convolution."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mptify.config import make_config
from mptify.nn.quantizers import level_range
from mptify.runtime.chain import Call, Chain
from mptify.runtime.geometry import Geometry, Window
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.kernels.bitsliced_conv import BitslicedConv
from mptify.runtime.kernels.lanes_conv import LanesConv, estimated_costs
from mptify.runtime.kernels.number_max_pool import NumberMaxPool
from mptify.runtime.kernels.pack import Pack
from mptify.runtime.kernels.quantize import Dequantize, Quantize
from mptify.runtime.kernels.unpack import Unpack
from mptify.tools.bench_inference import Tick, prepare, times_in_turns

__all__ = ["EVERY", "POINTWISE", "STAGES", "LayerShape", "LayerTime", "layer_time"]


class LayerShape(NamedTuple):
    """A convolution on a square image."""

    channels: int
    filters: int
    size: int
    kernel: int
    stride: int = 1
    groups: int = 1

    def geometry(self) -> Geometry:
        both = [(one, one) for one in (self.size, self.kernel, self.stride, self.kernel // 2)]
        return Geometry(self.channels, *both)

    def weight(self, prune: float) -> Tensor:
        """Random weights: -1, 0 or 1."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.filters, self.channels // self.groups, self.kernel, self.kernel)
        signs = torch.where(torch.randn(shape, generator=generator) < 0, -1, 1)
        return (signs * (torch.rand(shape, generator=generator) >= prune)).to(torch.int8)


_STAGES = ((64, 56), (128, 28), (256, 14), (512, 7))  # channels and pixels
STAGES = tuple(LayerShape(width, width, size, 3) for width, size in _STAGES)  # of ResNet-18
POINTWISE = tuple(  # of ResNet-50
    LayerShape(inputs, filters, size, 1)
    for narrow, size in _STAGES
    for inputs, filters in ((4 * narrow, narrow), (narrow, 4 * narrow))
)
EVERY = (  # of all kinds
    *STAGES,
    *POINTWISE,
    *(LayerShape(width, 2 * width, size, 3, stride=2) for width, size in _STAGES[:3]),
    *(LayerShape(width, 2 * width, size, 1, stride=2) for width, size in _STAGES[:3]),
    LayerShape(3, 64, 224, 7, stride=2),
    LayerShape(3, 32, 224, 3, stride=2),
    LayerShape(3, 384, 224, 16, stride=16),
    LayerShape(384, 1536, 14, 1),
    LayerShape(1536, 384, 14, 1),
    LayerShape(16, 64, 112, 1),
    LayerShape(64, 128, 32, 5),
    LayerShape(128, 256, 28, 3, groups=4),
    *(LayerShape(width, width, size, 3, groups=width) for width, size in ((64, 112), (960, 7))),
    *(LayerShape(width, width, size, 7, groups=width) for width, size in ((96, 56), (768, 7))),
)


@dataclass(frozen=True)
class LayerTime:
    """Times of a packed layer and of torch's float32 convolution.

    `packed` and `dense` are medians in milliseconds, `packed_low` and `dense_low` the lowest
    tenths, `packed_estimate` and `dense_estimate` what packing estimates (0 for bit planes). The
    packed kernels keep a core's arithmetic units busy, so a process on the core's other
    hyper-thread slows them down more than it slows torch. The lowest tenths show the times without
    such a neighbour, if it paused at times.
    """

    shape: LayerShape
    prune: float
    packed: float
    dense: float
    packed_low: float
    dense_low: float
    packed_estimate: float
    dense_estimate: float

    @property
    def ratio(self) -> float:
        """How many times faster the packed layer is."""
        return self.dense / self.packed

    @property
    def undisturbed(self) -> float:
        """The same, from the lowest tenths."""
        return self.dense_low / self.packed_low


def layer_time(shape: LayerShape, bits: str, prune: float, rounds: int, tick: Tick) -> LayerTime:
    """Time a layer on one image.

    The packed layer is a call of the library: with 1-bit activations from bit planes to bit planes,
    with borders and thresholds; with more, from numbers to numbers.

    Args:
        shape: The layer.
        bits: Bits per weight and activation.
        prune: The fraction of weights to remove.
        rounds: Rounds of five calls of each to time.
        tick: Called after each round.

    Returns:
        The times.
    """
    prepare()
    weight, geometry = shape.weight(prune), shape.geometry()
    activation_bits = make_config({"bits": bits}).activation_bits
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(1, shape.channels, shape.size, shape.size, generator=generator)
    image = torch.where(image < 0, -1.0, 1.0) if activation_bits == 1 else image.relu_()
    convolve = partial(
        F.conv2d,
        weight=weight.float(),
        stride=shape.stride,
        padding=geometry.padding,
        groups=shape.groups,
    )
    runs = {"dense": partial(convolve, image)}
    if activation_bits == 1:
        layer = _on_planes(image, weight, geometry, convolve(image))
        estimates = 0.0, 0.0
    else:
        layer = _on_lanes(image, weight, geometry, activation_bits, convolve)
        levels = None if activation_bits == 32 else level_range(activation_bits, signed=False)
        packed, dense = estimated_costs(weight, geometry, levels)
        estimates = packed / 1e6, dense / 1e6
    with torch.no_grad():
        times = times_in_turns({"packed": layer, **runs}, rounds, tick, calls=5)
    both = times["packed"], times["dense"]
    medians = [statistics.median(some) for some in both]
    low = [statistics.quantiles(some, n=10, method="inclusive")[0] for some in both]
    measured = dict(zip(("packed", "dense", "packed_low", "dense_low"), (*medians, *low)))
    return LayerTime(
        shape, prune, **measured, packed_estimate=estimates[0], dense_estimate=estimates[1]
    )


def _on_planes(
    image: Tensor, weight: Tensor, geometry: Geometry, sums: Tensor
) -> Callable[[], Any]:
    """A layer from bit planes to bit planes, with a threshold per filter."""
    shape = (1, len(weight))
    thresholds = torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(1))
    kernels: dict[str, NativeKernel] = {
        "first": Pack("channels"),
        "layer": BitslicedConv(weight, thresholds, geometry),
        "last": Unpack(),
    }
    program, output = _program_of(kernels, image)
    assert torch.equal(output > 0, sums >= thresholds.view(-1, 1, 1))
    return program


def _on_lanes(
    image: Tensor,
    weight: Tensor,
    geometry: Geometry,
    bits: int,
    convolve: Callable[[Tensor], Tensor],
) -> Callable[[], Any]:
    """A layer from planes to planes: of float32, or of levels, which it rounds its sums to."""
    keep = NumberMaxPool(Window((1, 1)))  # puts tensors into planes, and back
    kernels: dict[str, NativeKernel] = {"first": keep, "last": keep}
    levels, rounding, expected, step = None, None, image, 1.0
    if bits < 32:
        lowest, highest = level_range(bits, signed=False)
        expected = (image * (highest / 3)).clamp(lowest, highest).round()
        levels, step = (lowest, highest, 1.0), 0.25
        kernels = {"first": Quantize(highest / 3, lowest, highest), "last": Dequantize(step)}
        rounding = (1 / step, lowest, highest)
    kernels["layer"] = LanesConv(weight, geometry, torch.tensor(0.125), levels, None, rounding)
    program, output = _program_of(kernels, image)
    sums = convolve(expected) * 0.125
    if rounding is not None:
        sums = (sums / step).clamp(lowest, highest).round() * step
    assert bool(((output - sums).abs() <= 1e-5 * sums.abs().max()).all())
    return program


def _program_of(
    kernels: dict[str, NativeKernel], image: Tensor
) -> tuple[Callable[[], Any], Tensor]:
    """What runs the steps of the kernel `layer`, and the output of `first`, `layer` and `last`."""
    calls = [
        Call("first", ("image",), "read"),
        Call("layer", ("read",), "made"),
        Call("last", ("made",), "output"),
    ]
    chain = Chain(kernels, calls, ["image"], ["output"])
    builder, program = chain.program_for([image])
    (output,) = program.bind([image])
    program.run()
    steps = [number for number, name in enumerate(builder.names) if name == "layer"]

    def run() -> None:
        for number in steps:
            program.run_step(number)

    return run, output
