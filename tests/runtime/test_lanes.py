"""Convolutions on lanes equal torch's: to the bit on levels, and to rounding on float32."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mptify.nn.quantizers import level_range
from mptify.runtime.chain import Call, Chain
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernels.lanes_conv import LanesConv
from mptify.runtime.library import cpu_names, library

pytestmark = pytest.mark.skipif(library is None, reason="this machine has no C++ compiler")
PROPERTY = settings(max_examples=120, deadline=None, database=None)


def ternary(generator, shape, kept):
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (signs * (torch.rand(shape, generator=generator) < kept)).to(torch.int8)


def run(kernel, *inputs, cpu=-1):
    names = [f"x{number}" for number in range(len(inputs))]
    chain = Chain({"k": kernel}, [Call("k", tuple(names), "y")], names, ["y"])
    chain.instruction_set = cpu
    return chain(*inputs)[0]


def convolved(x, weight, geometry, groups):
    return F.conv2d(
        x.double(),
        weight.double(),
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        groups,
    )


@st.composite
def layers(draw):
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    dilation = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    padding = (draw(st.integers(0, 3)), draw(st.integers(0, 3)))
    least = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding)]
    size = tuple(max(1, low) + draw(st.integers(0, 40)) for low in least)
    stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    channels, filters = (groups * draw(st.integers(1, 20)) for _ in range(2))
    geometry = Geometry(channels, size, kernel, stride, padding, dilation)
    return (
        geometry,
        groups,
        filters,
        draw(st.sampled_from([0.02, 0.2, 0.6, 1.0])),
        draw(st.integers(0, 99)),
    )


@PROPERTY
@given(
    layer=layers(),
    bits=st.sampled_from([2, 4, 8, 32]),
    signed=st.booleans(),
    cpu=st.sampled_from(range(len(cpu_names()) or 1)),
)
def test_sums_are_those_of_torch(layer, bits, signed, cpu):
    geometry, groups, filters, kept, seed = layer
    generator = torch.Generator().manual_seed(seed)
    weight = ternary(generator, (filters, geometry.channels // groups, *geometry.kernel), kept)
    x = torch.randn(2, geometry.channels, *geometry.size, generator=generator)
    scale = torch.tensor(0.37)
    if bits == 32:
        found = run(LanesConv(weight, geometry, scale), x, cpu=cpu)
        expected = convolved(x, weight, geometry, groups) * 0.37
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        return
    lowest, highest = level_range(bits, signed)
    inverse = highest / 3
    levels = (x * torch.tensor(inverse)).clamp(lowest, highest).round()
    found = run(LanesConv(weight, geometry, scale, (inverse, lowest, highest)), x, cpu=cpu)
    assert torch.equal(found, convolved(levels, weight, geometry, groups).float() * scale)
