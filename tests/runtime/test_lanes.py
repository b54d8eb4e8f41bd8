"""Convolutions on lanes equal torch's: to the bit on levels, and to rounding on float32."""

from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.nn import functional as F

import mptify
from mptify.models import registry
from mptify.nn.layers import TicketConv2d
from mptify.nn.quantizers import UniformQuantizer, level_range
from mptify.runtime.chain import Call, Chain
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernels import lanes_conv
from mptify.runtime.kernels.lanes_conv import LanesConv
from mptify.runtime.kernels.masked_linear import MaskedLinear
from mptify.runtime.kernels.number_average import NumberAverage
from mptify.runtime.kernels.number_max_pool import NumberMaxPool
from mptify.runtime.kernels.quantize import Dequantize, Quantize
from mptify.runtime.lane_fusion import lane_patterns
from mptify.runtime.library import cpu_names, library
from mptify.runtime.subgraphs import propagate_shapes, with_graphs

pytestmark = pytest.mark.skipif(library is None, reason="this machine has no C++ compiler")
PROPERTY = settings(max_examples=120, deadline=None, database=None)


def ternary(generator, shape, kept):
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (signs * (torch.rand(shape, generator=generator) < kept)).to(torch.int8)


def run(kernel, *inputs, cpu=-1, compiles=True, before=None, behind=None):
    """A kernel on numbers; `before` makes its first input from them, and `behind` its numbers."""
    names = [f"x{number}" for number in range(len(inputs))]
    kernels, calls, read = {"k": kernel}, [], list(names)
    if before is not None:
        kernels["before"], read[0] = before, "levels"
        calls.append(Call("before", (names[0],), "levels"))
    calls.append(Call("k", tuple(read), "y"))
    if behind is not None:
        kernels["behind"] = behind
        calls.append(Call("behind", ("y",), "z"))
    chain = Chain(kernels, calls, names, [calls[-1].output])
    chain.instruction_set, chain.compiles = cpu, compiles
    return chain(*inputs)[0]


CPUS = st.sampled_from(range(len(cpu_names()) or 1))


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
    cpu=CPUS,
    compiles=st.booleans(),
)
def test_sums_are_those_of_torch(layer, bits, signed, cpu, compiles):
    geometry, groups, filters, kept, seed = layer
    generator = torch.Generator().manual_seed(seed)
    weight = ternary(generator, (filters, geometry.channels // groups, *geometry.kernel), kept)
    x = torch.randn(2, geometry.channels, *geometry.size, generator=generator)
    scale, how = torch.tensor(0.37), {"cpu": cpu, "compiles": compiles}
    if bits == 32:
        found = run(LanesConv(weight, geometry, scale), x, **how)
        expected = convolved(x, weight, geometry, groups) * 0.37
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        return
    lowest, highest = level_range(bits, signed)
    inverse = highest / 3
    levels = (x * torch.tensor(inverse)).clamp(lowest, highest).round()
    kernel = LanesConv(weight, geometry, scale, (lowest, highest, 0.5))
    found = run(kernel, x, before=Quantize(inverse, lowest, highest), **how)
    assert torch.equal(found, convolved(levels, weight, geometry, groups).float() * 0.5 * scale)


@PROPERTY
@given(
    layer=layers(),
    bits=st.sampled_from([2, 4, 8, 32]),
    signed=st.booleans(),
    adds=st.sampled_from(["nothing", "numbers", "levels"]),
    makes_levels=st.booleans(),
    cpu=CPUS,
    compiles=st.booleans(),
)
def test_what_follows_a_layer_is_rounded_as_torch_rounds_it(
    layer, bits, signed, adds, makes_levels, cpu, compiles
):
    """Bias, two norms, an addition and a range, between two layers that pass planes on."""
    geometry, groups, filters, kept, seed = layer
    generator = torch.Generator().manual_seed(seed)

    def per_filter(low, high):
        return torch.empty(filters).uniform_(low, high, generator=generator)

    weight = ternary(generator, (filters, geometry.channels // groups, *geometry.kernel), kept)
    x = torch.randn(1, geometry.channels, *geometry.size, generator=generator)
    lowest, highest = level_range(min(bits, 8), signed)
    names = ("bias", "alpha", "beta", "last_alpha", "last_beta")
    epilogue = {
        name: per_filter(-1, 1) for name in names if torch.rand((), generator=generator) < 0.6
    }
    for name in ("", "last_"):
        if f"{name}alpha" in epilogue or f"{name}beta" in epilogue:
            epilogue.setdefault(f"{name}alpha", per_filter(-1, 1))
            epilogue.setdefault(f"{name}beta", per_filter(-1, 1))
    epilogue["range"] = torch.tensor([0.0, 6.0])
    out = (1, filters, *geometry.out_size)
    other = torch.randint(0, 4, out, generator=generator) / 2
    if adds == "levels":
        epilogue["other_step"] = torch.tensor(0.5)
    rounding = (4.0, 0.0, 15.0) if makes_levels else None
    levels = None if bits == 32 else (lowest, highest, 0.25)
    layer = LanesConv(weight, geometry, torch.tensor(0.5), levels, epilogue, rounding)
    calls, kernels = [], {"layer": layer}
    read = ["x", *(["other"] if adds != "nothing" else [])]
    inputs = [x, *([other] if adds != "nothing" else [])]
    if bits < 32:
        kernels["first"] = Quantize(2.0, lowest, highest)
        calls.append(Call("first", ("x",), "levels"))
        read[0] = "levels"
        x = (x * 2).clamp(lowest, highest).round()
    if adds == "levels":
        kernels["others"] = Quantize(2.0, 0, 3)
        calls.append(Call("others", ("other",), "other_levels"))
        read[1] = "other_levels"
    # Another layer reads the result: each channel by itself, with a window around each pixel.
    identity = torch.zeros(filters, 1, 3, 3, dtype=torch.int8)
    identity[:, 0, 0, 2] = 1
    last = LanesConv(
        identity,
        Geometry(filters, geometry.out_size, (3, 3), padding=(1, 1)),
        torch.tensor(1.0),
        (0.0, 15.0, 1.0) if makes_levels else None,
    )
    kernels["last"] = last
    calls += [Call("layer", tuple(read), "result"), Call("last", ("result",), "shifted")]
    names = ["x", "other"][: len(inputs)]
    chain = Chain(kernels, calls, names, ["shifted"])
    chain.instruction_set, chain.compiles = cpu, compiles
    found = chain(*inputs)[0]

    y = convolved(x, weight, geometry, groups).float()
    y = (y * 0.25 if bits < 32 else y) * 0.5
    of = {
        name: value.view(-1, 1, 1)
        for name, value in epilogue.items()
        if value.dim()
        and len(value) == filters
        and name in ("bias", "alpha", "beta", "last_alpha", "last_beta")
    }
    if "bias" in of:
        y = y + of["bias"]
    if "alpha" in of:
        y = y * of["alpha"] + of["beta"]
    if adds != "nothing":
        y = y + other
    y = y.clamp(0, 6)
    if "last_alpha" in of:
        y = y * of["last_alpha"] + of["last_beta"]
    if makes_levels:
        y = (y * 4).clamp(0, 15).round()
    y = F.pad(y, (1, 1, 1, 1))[:, :, :-2, 2:]
    if bits == 32 and makes_levels:
        assert (found - y).abs().max() <= 1  # a sum near the middle of two levels
    elif bits == 32:
        torch.testing.assert_close(found, y, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(found, y)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("cpu", range(len(cpu_names())))
@pytest.mark.parametrize(
    ("bits", "signed"), [(2, False), (4, False), (4, True), (8, False), (8, True)]
)
@pytest.mark.parametrize("signs", [[1], [-1], [1, -1]])
def test_extreme_sums_do_not_overflow(bits, signed, signs, cpu, compiles):
    """All inputs at the highest level, all of 4,608 taps kept, of one sign or of both."""
    lowest, highest = level_range(bits, signed)
    weight = torch.tensor(signs, dtype=torch.int8).repeat(512 // len(signs)).view(1, 512, 1, 1)
    weight = weight.repeat(40, 1, 3, 3).contiguous()
    geometry = Geometry(512, (5, 5), (3, 3), padding=(1, 1))
    kernel = LanesConv(weight, geometry, torch.tensor(1.0), (lowest, highest, 1.0))
    for level in (highest, lowest):
        x = torch.full((1, 512, 5, 5), float(level))
        x[:, 1::2] = highest if len(signs) == 1 else lowest
        before = Quantize(1.0, lowest, highest)
        found = run(kernel, x, before=before, cpu=cpu, compiles=compiles)
        assert torch.equal(found, convolved(x, weight, geometry, 1).float())


@PROPERTY
@given(
    size=st.tuples(st.integers(3, 40), st.integers(3, 40)),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    cpu=CPUS,
)
def test_max_pools_are_those_of_torch(size, kernel, stride, dilation, cpu):
    size = tuple(max(one, dilation * (kernel - 1) + 1) for one in size)
    module = torch.nn.MaxPool2d(kernel, stride, kernel // 2, dilation)
    x = torch.randn(2, 3, *size)
    x[0, 0, 1, 1] = torch.nan
    found = run(NumberMaxPool.of(module), x, cpu=cpu)
    torch.testing.assert_close(found, module(x), rtol=0, atol=0, equal_nan=True)
    falling = torch.tensor([True, False, True])
    found = run(NumberMaxPool.of(module, falling), x, cpu=cpu)
    signs = torch.where(falling, -1, 1).view(-1, 1, 1)
    torch.testing.assert_close(found, module(x * signs) * signs, rtol=0, atol=0, equal_nan=True)
    levels = x.nan_to_num().mul(4).clamp(-7, 7).round()
    pool = NumberMaxPool.of(module)
    found = run(pool, levels, cpu=cpu, before=Quantize(1.0, -7, 7), behind=Dequantize(0.5))
    assert torch.equal(found, module(levels) * 0.5)


@PROPERTY
@given(
    inputs=st.integers(1, 300),
    filters=st.integers(1, 40),
    kept=st.sampled_from([0.02, 0.2, 1.0]),
    bits=st.sampled_from([8, 32]),
    seed=st.integers(0, 99),
    cpu=CPUS,
)
def test_linear_layers_on_vectors_are_those_of_torch(inputs, filters, kept, bits, seed, cpu):
    generator = torch.Generator().manual_seed(seed)
    weight, scale = ternary(generator, (filters, inputs), kept), torch.tensor(0.37)
    x = torch.randint(-40, 41, (3, inputs), generator=generator) / 8  # sums of these are exact
    bias = torch.randn(filters, generator=generator)
    levels, added = None, x
    if bits == 8:
        levels, added = (25.0, -127.0, 127.0), (x * 25).clamp(-127, 127).round()
    kernel = MaskedLinear(weight, scale, levels, bias, torch.tensor([0.0, 6.0]))
    expected = (added.double() @ weight.double().T).float() * scale + bias
    assert torch.equal(run(kernel, x, cpu=cpu), expected.clamp(0, 6))


@PROPERTY
@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 20)),
    levels=st.booleans(),
    cpu=CPUS,
)
def test_averages_are_those_of_torch(size, levels, cpu):
    x = torch.randint(-7, 8, (2, *size)).float()
    before = Quantize(1.0, -7, 7) if levels else None
    found = run(NumberAverage(0.5 if levels else 1.0), x, cpu=cpu, before=before)
    expected = (x.double().mean((2, 3)) * (0.5 if levels else 1.0)).float()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


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
            before = behind = None
            if not pattern.reads_numbers:
                before = Quantize(*pattern.levels[:3], tokens=pattern.tokens)
            if pattern.pool is not None:
                behind = NumberMaxPool.of(pattern.pool, pattern.epilogue["alpha"] < 0)
            sources = [one for one in (pattern.source, pattern.other) if one is not None]
            given = [values[one] for one in sources]
            kernel = MaskedLinear.of(pattern) if pattern.is_vector else LanesConv.of(pattern)
            found = run(kernel, *given, before=before, behind=behind)
            fused |= pattern.epilogue.keys() | ({"other"} if pattern.other is not None else set())
            if pattern.levels is not None:
                assert torch.equal(found, values[node]), node
            else:  # sums of real numbers
                size = values[node].abs().max()
                assert (found - values[node]).abs().max() <= 1e-5 * size, node
    layers = len(mptify.ticket_layers(ticketed))
    assert len(patterns) >= layers - 2  # all but the classifier, and one that reads averages
    if name == "mptify:resnet18_cifar":
        convs = [pattern for pattern in patterns.values() if not pattern.is_vector]
        assert all("alpha" in pattern.epilogue for pattern in convs)
        assert "other" in fused
        assert ("range" in fused) == (bits in ("1/8", "1/32"))


class AlongRows(torch.nn.Module):
    """Linear layers that read images, as wide as they have channels, along their rows."""

    def __init__(self, which):
        super().__init__()
        self.which, self.act = which, torch.nn.ReLU()
        self.conv = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.linear = torch.nn.Linear(16, 16)
        self.last = torch.nn.Conv2d(16, 16, 3, padding=1)
        self.pool = torch.nn.MaxPool2d(2)

    def forward(self, x):
        x = self.act(self.conv(x))
        if self.which == "between":
            return self.last(self.act(self.linear(x)))
        if self.which == "added":
            return self.last(x) + self.linear(x)
        if self.which == "pooled":
            return self.last(self.pool(self.act(self.linear(x))))
        return self.linear(self.act(self.last(x)))


@pytest.mark.parametrize("bits", ["1/32", "1/8", "1/4", "1/2"])
@pytest.mark.parametrize("which", ["between", "added", "pooled", "last"])
def test_linear_layers_may_read_images_along_their_rows(which, bits, monkeypatch):
    monkeypatch.setattr(lanes_conv, "dense_cost", lambda *args: 1e18)  # torch is never faster
    ticketed = mptify.transform(AlongRows(which), bits=bits, prune=0.5).train()
    x = torch.randint(-24, 25, (4, 3, 16, 16), generator=torch.Generator().manual_seed(0)) / 8
    with torch.no_grad():
        ticketed(x)
        program = mptify.pack(ticketed.eval(), x[:1])
        assert len(kernels_of(program)) == 3
        torch.testing.assert_close(program(x), ticketed(x), rtol=1e-4, atol=1e-4)


def test_levels_that_a_vector_is_made_of_are_rounded_once():
    """The quantizer in front of a flattened image has nothing left to do."""
    ticketed, image = settled("mptify:conv4", "1/4", 32)
    program = mptify.pack(ticketed, image[:1])
    quantizers = [part for part in program.modules() if isinstance(part, UniformQuantizer)]
    assert len(quantizers) == 2  # those between the linear layers
    with torch.no_grad():
        torch.testing.assert_close(program(image), ticketed(image), rtol=1e-4, atol=1e-4)


def test_layers_that_torch_computes_faster_are_left_to_it(monkeypatch):
    ticketed, image = settled("mptify:resnet18_cifar", "1/32", 32)
    monkeypatch.setattr(lanes_conv, "dense_cost", lambda *args: 0.0)
    left = [
        module
        for module in mptify.pack(ticketed, image[:1]).modules()
        if isinstance(module, TicketConv2d)
    ]
    assert len(left) == 20


def test_a_kernel_whose_sums_could_overflow_is_not_used(monkeypatch):
    """Patches of 16×16 pixels, unpruned: one channel may sum more than 16 bits hold."""
    monkeypatch.setattr(lanes_conv, "dense_cost", lambda *args: inf)  # torch is never faster
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 16, 16), torch.nn.ReLU())
    images = torch.ones(2, 3, 64, 64)
    with torch.no_grad():
        network[0].weight.fill_(1.0)  # all survivors of one sign, all inputs at the highest level
        ticketed = mptify.transform(network, bits="1/8", prune=0, init="keep").train()
        ticketed(images)
        program = mptify.pack(ticketed.eval(), images[:1])
        assert torch.equal(program(images), ticketed(images))
