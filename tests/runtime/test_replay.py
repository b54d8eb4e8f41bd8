"""The kernels under sanitizers and on other processors: a C++ program runs what Python built."""

import random
import shutil

import pytest
import torch
from torch import nn

import mptify
from mptify.models import resnet18_cifar
from mptify.nn.quantizers import level_range
from mptify.runtime.chain import Call, Chain
from mptify.runtime.geometry import Geometry, fits
from mptify.runtime.kernels.bitsliced_conv import BitslicedConv
from mptify.runtime.kernels.flatten import Flatten
from mptify.runtime.kernels.input_conv import InputConv
from mptify.runtime.kernels.lanes_conv import LanesConv
from mptify.runtime.kernels.masked_linear import MaskedLinear
from mptify.runtime.kernels.max_pool import MaxPool
from mptify.runtime.kernels.number_average import NumberAverage
from mptify.runtime.kernels.number_max_pool import NumberMaxPool
from mptify.runtime.kernels.pooled_linear import PooledLinear
from mptify.runtime.kernels.popcount_conv import PopcountConv
from mptify.runtime.kernels.popcount_linear import PopcountLinear
from mptify.runtime.kernels.quantize import Dequantize, Quantize
from mptify.runtime.kernels.residual_add import ResidualAdd
from mptify.runtime.library import cpu_names, library
from mptify.runtime.thresholds import Thresholds
from tests.helpers.packed import chain_of, random_layer, randomize_tiles, signs, ternary
from tests.runtime.tapes import build, replay, tape

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(library is None, reason="this machine has no C++ compiler"),
]


def scaled(layer):
    """With a gain, and with or without biases."""
    filters = len(layer.starts) // 2 if hasattr(layer, "starts") else len(layer.weights)
    layer.scale_(torch.rand(()), random.choice([None, torch.randn(filters)]))
    return layer


def random_chains():
    """One of each kind of kernel, with what they are to read."""
    while True:
        images, weight, sums, geometry = random_layer()
        kept = int((weight != 0).flatten(1).sum(1).max())
        if fits(geometry, kept):
            break
    whole = weight.to(torch.int8)
    thresholds = torch.randint(-9, 10, (2, len(weight)))
    yield chain_of(BitslicedConv(whole, thresholds[:1], geometry), 1), (images,)
    yield chain_of(BitslicedConv(whole, thresholds, geometry), 2), (images, signs(*sums.shape))
    yield chain_of(scaled(BitslicedConv(whole, None, geometry)), 1), (images,)
    if weight.shape[1] == geometry.channels:
        yield chain_of(PopcountConv(whole, thresholds, geometry), 2), (images, signs(*sums.shape))
        yield chain_of(scaled(PopcountConv(whole, None, geometry)), 1), (images,)
    theirs, others = (
        ternary(len(weight), 5, 1, 1, kept=0.5).to(torch.int8),
        signs(len(images), 5, *sums.shape[2:]),
    )
    other = BitslicedConv(theirs, None, Geometry(5, tuple(others.shape[2:]), (1, 1)))
    least = torch.randint(
        -kept, kept + 2, (len(weight), 2 * int((theirs != 0).flatten(1).sum(1).max()) + 1)
    )
    yield (
        chain_of(ResidualAdd(BitslicedConv(whole, None, geometry), other, least), 2),
        (images, others),
    )
    found = Thresholds(torch.randint(-16, 17, (len(weight),)) / 8, torch.rand(len(weight)) < 0.5)
    yield (
        chain_of(InputConv(whole, found, geometry), 1, layout=None),
        (torch.randint(-16, 17, images.shape) / 8,),
    )
    inputs = random.choice([1, 7, 31, 256, 300, 9000])
    for least in (None, torch.randint(-9, 10, (70,))):
        linear = PopcountLinear(ternary(70, inputs, kept=0.4).to(torch.int8), least)
        yield (
            chain_of(linear if least is not None else scaled(linear), 1, layout="vectors"),
            (signs(2, inputs),),
        )
    yield (
        chain_of(Flatten(), 1),
        (signs(2, random.randint(1, 5), random.randint(1, 9), random.randint(1, 70)),),
    )
    yield (
        chain_of(scaled(PooledLinear(ternary(70, 13, kept=0.4).to(torch.int8))), 1),
        (signs(2, 13, random.randint(1, 9), random.randint(1, 70)),),
    )
    pool = nn.MaxPool2d(random.randint(1, 3), random.randint(1, 3))
    yield (
        chain_of(MaxPool.of(pool, (torch.rand(4) < 0.5).to(torch.uint8)), 1),
        (signs(2, 4, random.randint(3, 20), random.choice([9, 64, 65, 130])),),
    )
    yield (
        chain_of(
            BitslicedConv(
                ternary(6, 11, 1, 1, kept=0.5).to(torch.int8), None, Geometry(11, (1, 5), (1, 1))
            ),
            1,
            layout="tokens",
        ),
        (signs(2, 5, 11),),
    )


def padded_chains():
    """Layers whose padding is longer than a word, or than a tile."""
    for kernel, padding, size in (
        ((1, 1), (3, 3), (5, 60)),
        ((3, 3), (6, 6), (5, 55)),
        ((1, 1), (3, 1), (5, 130)),
    ):
        weight = ternary(4, 3, *kernel, kept=0.8).to(torch.int8)
        yield (
            chain_of(BitslicedConv(weight, None, Geometry(3, size, kernel, padding=padding)), 1),
            (signs(1, 3, *size),),
        )


def lane_chains():
    """Layers on lanes of each kind, on numbers whose sums are the same in any order."""
    while True:
        _, weight, _, geometry = random_layer()
        kept = int((weight != 0).flatten(1).sum(1).max())
        if kept and weight.shape[2:] == geometry.kernel:
            break
    weight, filters = weight.to(torch.int8), len(weight)
    for bits in (2, 4, 8, 32):
        x = torch.randint(-24, 25, (2, geometry.channels, *geometry.size)) / 8
        other = torch.randint(0, 4, (2, filters, *geometry.out_size)) / 2
        lowest, highest = level_range(min(bits, 8), signed=random.random() < 0.5)
        levels = None if bits == 32 else (lowest, highest, 0.25)
        epilogue = {name: torch.randn(filters) for name in ("bias", "alpha", "beta")}
        if random.random() < 0.5:
            epilogue |= {name: torch.randn(filters) for name in ("last_alpha", "last_beta")}
        epilogue["range"] = torch.tensor([-2.0, 6.0])
        rounding = random.choice([None, (4.0, 0.0, 15.0), (4.0, -7.0, 7.0)])
        fused = random.random() < 0.5
        layer = LanesConv(
            weight, geometry, torch.tensor(0.37), levels, epilogue, rounding, fused=fused
        )
        kernels, calls = {"layer": layer}, []
        if levels is not None:
            kernels["before"] = Quantize(2.0, lowest, highest)
            calls.append(Call("before", ("x",), "levels"))
        read = ("levels" if calls else "x", "other")
        calls.append(Call("layer", read, "y"))
        if rounding is not None:
            kernels["behind"] = NumberAverage(0.5) if filters % 2 else Dequantize(0.25)
            calls.append(Call("behind", ("y",), "z"))
        elif geometry.out_size[0] > 1:
            kernels["behind"] = NumberMaxPool.of(nn.MaxPool2d(2, 2, 1))
            calls.append(Call("behind", ("y",), "z"))
        yield Chain(kernels, calls, ["x", "other"], [calls[-1].output]), (x, other)
    inputs, levels = (
        random.choice([1, 63, 64, 65, 300]),
        random.choice([None, (8.0, -127.0, 127.0)]),
    )
    flat = ternary(70, inputs, kept=0.4).to(torch.int8)
    linear = MaskedLinear(flat, torch.tensor(0.37), levels, torch.randn(70))
    yield (
        Chain({"k": linear}, [Call("k", ("x",), "y")], ["x"], ["y"]),
        (torch.randint(-24, 25, (2, inputs)) / 8,),
    )
    tokens = LanesConv(
        ternary(9, 11, 1, 1, kept=0.5).to(torch.int8),
        Geometry(11, (1, 37), (1, 1)),
        torch.tensor(0.5),
        (0.0, 15.0, 0.25),
        tokens=True,
    )
    calls = [Call("before", ("x",), "levels"), Call("k", ("levels",), "y")]
    kernels = {"before": Quantize(2.0, 0.0, 15.0, tokens=True), "k": tokens}
    yield Chain(kernels, calls, ["x"], ["y"]), (torch.randint(0, 60, (2, 37, 11)) / 8,)


def whole_network(bits="1/1"):
    torch.manual_seed(0)
    ticketed = mptify.transform(resnet18_cifar(), bits=bits, prune=0.9).eval()
    x = torch.randint(-24, 25, (2, 3, 32, 32)) / 8
    (chain,) = (
        module for module in mptify.pack(ticketed, x).modules() if isinstance(module, Chain)
    )
    return chain, (x,)


def require_agreement(command, cpus, rounds, monkeypatch):
    random.seed(1)
    torch.manual_seed(1)
    chains = [whole_network(), whole_network("1/4")]
    for _ in range(rounds):
        randomize_tiles(monkeypatch)
        some = (random_chains(), padded_chains(), lane_chains())
        chains += [built(*pair) for each in some for pair in each]
    require_outputs(command, chains, cpus, compiles=False)


def require_outputs(command, chains, cpus, *, compiles):
    """Replaying chains gives what they give here."""
    expected = torch.cat([out.flatten() for chain, inputs in chains for out in raw(chain, inputs)])
    for which in cpus:
        threads = [random.choice([1, 2, 3]) for _ in chains]
        tapes = [
            tape(chain, inputs, which, some, compiles=compiles)
            for (chain, inputs), some in zip(chains, threads)
        ]
        assert torch.equal(replay(command, tapes), expected), which


def built(chain, inputs):
    """With its program built, in the tile layout of now."""
    chain.program_for(chain.readable(inputs))
    return chain, inputs


def raw(chain, inputs):
    """What leaves a chain, as the library wrote it."""
    given = chain.readable(inputs)
    _, program = chain.program_for(given)
    outputs = program.bind(given)
    program.run()
    return outputs


def test_nothing_is_read_or_written_outside(tmp_path, monkeypatch):
    """AddressSanitizer and UndefinedBehaviorSanitizer, on all instruction sets of this machine."""
    # Checks are calls, not inlined: the compiler would take minutes.
    flags = [
        "-O0",
        "-g1",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "--param",
        "asan-instrumentation-with-call-threshold=0",
    ]
    require_agreement(
        [build("g++", tmp_path, *flags)],
        range(len(cpu_names())),
        rounds=40,
        monkeypatch=monkeypatch,
    )


def test_machine_code_reads_and_writes_nothing_behind_its_buffers(tmp_path):
    """Behind each buffer is a page that nobody may touch."""
    random.seed(2)
    torch.manual_seed(2)
    chains = [whole_network(bits) for bits in ("1/2", "1/4")]
    chains += [built(*pair) for _ in range(40) for pair in lane_chains()]
    command = [build("g++", tmp_path, "-O1", "-DMPTIFY_GUARD")]
    cpus = [number for number, name in enumerate(cpu_names()) if name != "portable"]
    require_outputs(command, chains, cpus, compiles=True)


def test_threads_do_not_get_in_each_others_way(tmp_path, monkeypatch):
    """ThreadSanitizer."""
    flags = ["-O1", "-g1", "-fsanitize=thread", "-DMPTIFY_ONE_CPU"]
    require_agreement([build("g++", tmp_path, *flags)], [0], rounds=10, monkeypatch=monkeypatch)


@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
    reason="no cross compiler or no emulator for ARM",
)
def test_arm_gives_the_same_bits(tmp_path, monkeypatch):
    """NEON, emulated."""
    require_agreement(
        ["qemu-aarch64", build("aarch64-linux-gnu-g++", tmp_path, "-O2", "-static")],
        [0],
        rounds=20,
        monkeypatch=monkeypatch,
    )
