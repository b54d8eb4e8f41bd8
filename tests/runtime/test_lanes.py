"""Convolutions on lanes equal torch's: to the bit on levels, and to rounding on float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.nn import functional as F

import mptify
from mptify.models import registry
from mptify.nn.layers import TicketConv2d
from mptify.nn.quantizers import level_range
from mptify.runtime.chain import Call, Chain
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernels import lanes_conv
from mptify.runtime.kernels.lanes_conv import LanesConv
from mptify.runtime.kernels.number_max_pool import NumberMaxPool
from mptify.runtime.lane_fusion import lane_patterns
from mptify.runtime.library import cpu_names, library
from mptify.runtime.subgraphs import propagate_shapes, with_graphs

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
    found = run(LanesConv(weight, geometry, scale, (inverse, lowest, highest, 0.5)), x, cpu=cpu)
    assert torch.equal(found, convolved(levels, weight, geometry, groups).float() * 0.5 * scale)


@PROPERTY
@given(
    size=st.tuples(st.integers(3, 40), st.integers(3, 40)),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    cpu=st.sampled_from(range(len(cpu_names()) or 1)),
)
def test_max_pools_are_those_of_torch(size, kernel, stride, dilation, cpu):
    size = tuple(max(one, dilation * (kernel - 1) + 1) for one in size)
    module = torch.nn.MaxPool2d(kernel, stride, kernel // 2, dilation)
    x = torch.randn(2, 3, *size)
    x[0, 0, 1, 1] = torch.nan
    found = run(NumberMaxPool.of(module), x, cpu=cpu)
    torch.testing.assert_close(found, module(x), rtol=0, atol=0, equal_nan=True)


# -- networks ------------------------------------------------------------------------------------


def settled(name, bits, size, **settings):
    """A ticket model whose norms and ranges have seen images, and an image."""
    network = registry.build(registry.resolve(name), num_classes=10)
    ticketed = mptify.transform(network, bits=bits, prune=0.8, **settings).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(2):
            ticketed(torch.randn(4, 3, size, size, generator=generator))
    return ticketed.eval(), torch.randn(2, 3, size, size, generator=generator)


def kernels_of(program):
    return [part for part in program.modules() if isinstance(part, LanesConv)]


@pytest.mark.parametrize("bits", ["1/32", "1/8", "1/4", "1/2"])
@pytest.mark.parametrize(
    ("name", "size"),
    [("mptify:resnet18_cifar", 32), ("timm:test_vit", 160), ("mptify:vgg_small", 32)],
)
def test_packed_networks_compute_what_the_float_path_does(name, size, bits):
    ticketed, image = settled(name, bits, size)
    program = mptify.pack(ticketed, image[:1])
    assert len(kernels_of(program)) > len(mptify.ticket_layers(ticketed)) // 3
    with torch.no_grad():
        expected = ticketed(image)
        torch.testing.assert_close(program(image), expected, rtol=1e-4, atol=1e-4)


class Values(fx.Interpreter):
    """The value of each node, in the float path."""

    def __init__(self, model):
        super().__init__(model, garbage_collect_values=False)

    def of(self, *inputs):
        with torch.no_grad():
            self.run(*inputs)
        return self.env


@pytest.mark.parametrize("bits", ["1/8", "1/4", "1/2", "1/32"])
@pytest.mark.parametrize("settings", [{}, {"bias": "learn", "learn_bn": True}])
@pytest.mark.parametrize(
    ("name", "size"), [("mptify:resnet18_cifar", 32), ("timm:test_vit", 160), ("mobilenet_v2", 64)]
)
def test_each_kernel_gives_what_the_float_path_gives(name, size, bits, settings):
    """To the bit where inputs have few bits, with everything that is fused with the layer."""
    ticketed, image = settled(name, bits, size, **settings)
    with torch.no_grad():
        model = with_graphs(ticketed)
        propagate_shapes(model, (image,))
        patterns = lane_patterns(model)
        values = Values(model).of(image)
        fused = set()
        for node, pattern in patterns.items():
            given = (pattern.weight(), pattern.geometry(), pattern.scale(), pattern.levels)
            options = {"tokens": pattern.tokens, "fused": pattern.fused}
            kernel = LanesConv(*given, pattern.epilogue, **options)
            sources = [one for one in (pattern.source, pattern.other) if one is not None]
            found = run(kernel, *(values[one] for one in sources))
            fused |= pattern.epilogue.keys() | ({"other"} if pattern.other is not None else set())
            if pattern.levels is not None:
                assert torch.equal(found, values[node]), node
            else:
                size = values[node].abs().max()
                assert (found - values[node]).abs().max() <= 1e-5 * size, node
    layers = len(mptify.ticket_layers(ticketed))
    assert len(patterns) >= layers - 2  # all but the classifier, and one that reads averages
    if name == "mptify:resnet18_cifar":
        assert all("alpha" in pattern.epilogue for pattern in patterns.values())
        assert "other" in fused
        assert ("range" in fused) == (bits in ("1/8", "1/32"))


def test_layers_that_torch_computes_faster_are_left_to_it():
    ticketed, image = settled("mobilenet_v2", "1/32", 64)
    program = mptify.pack(ticketed, image[:1])
    depthwise = [
        module
        for module in program.modules()
        if isinstance(module, TicketConv2d) and module.groups > 1
    ]
    assert len(depthwise) == 17


def test_a_kernel_whose_sums_could_overflow_is_not_used(monkeypatch):
    """Patches of 16×16 pixels, unpruned: one channel may sum more than 16 bits hold."""
    monkeypatch.setattr(lanes_conv, "dense_rate", lambda: 1e-9)  # torch is never faster
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 16, 16), torch.nn.ReLU())
    images = torch.ones(2, 3, 64, 64)
    with torch.no_grad():
        network[0].weight.fill_(1.0)  # all survivors of one sign, all inputs at the highest level
        ticketed = mptify.transform(network, bits="1/8", prune=0, init="keep").train()
        ticketed(images)
        program = mptify.pack(ticketed.eval(), images[:1])
        assert torch.equal(program(images), ticketed(images))
