"""The C++ kernels against torch's convolutions, bit for bit, on every instruction set here."""

import os
import random
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mptify.errors import MptifyError
from mptify.runtime import geometry as geometry_module
from mptify.runtime.chain import Call, Chain
from mptify.runtime.geometry import Geometry, TileLayout, fits
from mptify.runtime.kernels.bitsliced_conv import BitslicedConv
from mptify.runtime.kernels.flatten import Flatten
from mptify.runtime.kernels.input_conv import InputConv
from mptify.runtime.kernels.max_pool import MaxPool
from mptify.runtime.kernels.pack import Pack
from mptify.runtime.kernels.pooled_linear import PooledLinear
from mptify.runtime.kernels.popcount_conv import PopcountConv
from mptify.runtime.kernels.popcount_linear import PopcountLinear
from mptify.runtime.kernels.residual_add import ResidualAdd
from mptify.runtime.kernels.unpack import Unpack
from mptify.runtime.library import cpu_names, library
from mptify.runtime.thresholds import Thresholds
from tests.helpers.packed import random_layer, randomize_tiles, signs, ternary, through

pytestmark = pytest.mark.skipif(library is None, reason="this machine has no C++ compiler")
CPUS = range(len(cpu_names()))


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("seed", range(12))
def test_random_layers_agree_bit_for_bit(seed, cpu, monkeypatch):
    random.seed(seed)
    torch.manual_seed(seed)
    done = 0
    while done < 25:
        images, weight, sums, geometry = random_layer()
        if not fits(geometry, int((weight != 0).flatten(1).sum(1).max())):
            continue
        done += 1
        torch.set_num_threads(random.choice([1, 2, 3]))
        randomize_tiles(monkeypatch)
        first = geometry.at(
            (geometry.size[0] + random.choice([0, 3]), geometry.size[1])
        )  # made for another size
        sets = random.choice([1, 2])
        thresholds = torch.randint(-12, 13, (sets, len(weight)))
        kinds = (
            [BitslicedConv, PopcountConv]
            if weight.shape[1] == geometry.channels
            else [BitslicedConv]
        )
        kind = random.choice(kinds)
        layer, plain = (
            kind(weight.to(torch.int8), thresholds, first),
            kind(weight.to(torch.int8), None, first),
        )
        if random.random() < 0.3:  # made for another machine
            randomize_tiles(monkeypatch)
        shortcut = signs(*sums.shape)
        least = torch.where(
            shortcut > 0, thresholds[-1].view(-1, 1, 1), thresholds[0].view(-1, 1, 1)
        )
        found = through(layer, *([images, shortcut] if sets == 2 else [images]), cpu=cpu)
        assert torch.equal(found, torch.where(sums >= least, 1.0, -1.0)), geometry
        assert torch.equal(through(plain, images, cpu=cpu), sums), geometry


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("cpu", CPUS)
def test_gains_and_biases_are_rounded_as_torch_does_it(cpu, has_bias):
    """Of each kernel that makes numbers: a product is rounded before the bias is added."""
    torch.manual_seed(3)
    gain, biases = torch.rand(()) / 3, torch.randn(21) if has_bias else None
    images, weight = signs(2, 16, 9, 11), ternary(21, 16, 3, 3, kept=0.4)
    sums, geometry = (
        F.conv2d(images, weight, padding=1),
        Geometry(16, (9, 11), (3, 3), padding=(1, 1)),
    )
    vectors, flat = signs(2, 300), ternary(21, 300, kept=0.4)
    means, head = images.mean((2, 3), dtype=torch.float64), ternary(21, 16, kept=0.4)
    for kernel, given, expected, layout in (
        (BitslicedConv(weight.to(torch.int8), None, geometry), images, sums, "channels"),
        (PopcountConv(weight.to(torch.int8), None, geometry), images, sums, "channels"),
        (PopcountLinear(flat.to(torch.int8)), vectors, vectors @ flat.T, "vectors"),
        (PooledLinear(head.to(torch.int8)), images, (means @ head.T.double()).float(), "channels"),
    ):
        kernel.scale_(gain, biases)
        expected = expected * gain
        if biases is not None:
            expected = expected + (biases.view(-1, 1, 1) if expected.dim() == 4 else biases)
        assert torch.equal(through(kernel, given, layout=layout, cpu=cpu), expected), type(
            kernel
        ).__name__


@pytest.mark.parametrize("cpu", CPUS)
def test_tiles_need_not_be_a_multiple_of_the_widest_word(cpu, monkeypatch):
    """As in graphs that were exported where words are narrower."""
    monkeypatch.setattr(
        TileLayout, "of", classmethod(lambda cls, geometry, _: cls(48, 48 + geometry.reach, 1))
    )
    torch.manual_seed(0)
    images, weight = signs(1, 20, 30, 50), ternary(9, 20, 3, 3, kept=0.4)
    layer = BitslicedConv(
        weight.to(torch.int8), None, Geometry(20, (30, 50), (3, 3), padding=(1, 1))
    )
    assert torch.equal(through(layer, images, cpu=cpu), F.conv2d(images, weight, padding=1))


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("seed", range(6))
def test_two_layers_added_agree_bit_for_bit(seed, cpu, monkeypatch):
    """Any layer, and one of 1×1 that sees as many pixels."""
    random.seed(seed)
    torch.manual_seed(seed)
    done = 0
    while done < 20:
        images, weight, sums, geometry = random_layer()
        others = signs(len(images), 5, *sums.shape[2:])
        theirs = ternary(len(weight), 5, 1, 1, kept=random.choice([0.2, 0.7, 1.0]))
        padding = random.choice([0, 1])  # with borders of its own
        small = Geometry(5, tuple(others.shape[2:]), (1 + 2 * padding, 1), padding=(padding, 0))
        theirs = theirs.repeat(1, 1, 1 + 2 * padding, 1)
        kept = [int((one != 0).flatten(1).sum(1).max()) for one in (weight, theirs)]
        if not fits(geometry, kept[0]):
            continue
        done += 1
        torch.set_num_threads(random.choice([1, 2, 3]))
        randomize_tiles(monkeypatch)
        least = torch.randint(-kept[0], kept[0] + 2, (len(weight), 2 * kept[1] + 1))
        layer = ResidualAdd(
            BitslicedConv(weight.to(torch.int8), None, geometry),
            BitslicedConv(theirs.to(torch.int8), None, small),
            least,
        )
        their_sums = F.conv2d(others, theirs, padding=(padding, 0)).long() + kept[1]
        bound = torch.stack([least[f][their_sums[:, f]] for f in range(len(weight))], dim=1)
        assert torch.equal(through(layer, images, others, cpu=cpu) > 0, sums >= bound), geometry


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize(
    ("channels", "size", "filters", "expected"),
    [
        (64, 56, 70, TileLayout(tile=64, plane=78, unit=1)),  # as in ResNet-18
        (128, 28, 40, TileLayout(tile=32, plane=40, unit=1)),
        (
            70,
            56,
            3,
            TileLayout(tile=448, plane=406, unit=7),
        ),  # too few filters for tiles, too many rows for bytes
    ],
)
def test_large_layers_agree_bit_for_bit(channels, size, filters, expected, cpu, monkeypatch):
    monkeypatch.setattr(geometry_module, "word_bytes", lambda: 32)
    torch.set_num_threads(3)
    weight, images = ternary(filters, channels, 3, 3, kept=0.25), signs(1, channels, size, size)
    geometry = Geometry(channels, (size, size), (3, 3), padding=(1, 1))
    layer = BitslicedConv(weight.to(torch.int8), torch.randint(-9, 10, (1, filters)), geometry)
    assert layer.layout == expected
    sums = F.conv2d(images, weight, padding=1)
    assert torch.equal(through(layer, images, cpu=cpu) > 0, sums >= layer.thresholds.view(-1, 1, 1))
    assert torch.equal(
        through(BitslicedConv(weight.to(torch.int8), None, geometry), images, cpu=cpu), sums
    )


@pytest.mark.parametrize("negative", [0.0, 0.02, 0.5, 0.98, 1.0])
@pytest.mark.parametrize(
    "kept", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 95, 96, 97, 130]
)
def test_lists_of_every_length_and_any_share_of_signs(kept, negative):
    """Survivors are added in pairs of two signs, then of one sign, in blocks of several sizes."""
    torch.manual_seed(kept)
    weight = torch.zeros(9, 150)
    weight[:, :kept] = torch.where(torch.rand(9, kept) < negative, -1.0, 1.0)
    weight, images = weight[:, torch.randperm(150)].view(9, 150, 1, 1), signs(1, 150, 5, 9)
    sums, geometry = F.conv2d(images, weight), Geometry(150, (5, 9), (1, 1))
    assert torch.equal(through(BitslicedConv(weight.to(torch.int8), None, geometry), images), sums)
    for least in range(-4, 5):
        layer = BitslicedConv(weight.to(torch.int8), torch.full((1, 9), least), geometry)
        assert torch.equal(through(layer, images) > 0, sums >= least)
    assert torch.equal(
        layer.to_popcount().weights, PopcountConv(weight.to(torch.int8), None, geometry).weights
    )  # and back


def test_two_layers_may_have_tiles_of_different_lengths(monkeypatch):
    """As on a machine with wider words than the one that planned them."""
    tiles = {6: 32, 5: 48}
    monkeypatch.setattr(
        TileLayout,
        "of",
        classmethod(
            lambda cls, geometry, _: cls(tiles[geometry.channels], tiles[geometry.channels], 1)
        ),
    )
    images, others, weight, theirs = (
        signs(1, 6, 24, 40),
        signs(1, 5, 24, 40),
        ternary(7, 6, 1, 1, kept=0.8),
        ternary(7, 5, 1, 1, kept=0.8),
    )
    first, second = (
        BitslicedConv(one.to(torch.int8), None, Geometry(one.shape[1], (24, 40), (1, 1)))
        for one in (weight, theirs)
    )
    layer = ResidualAdd(
        first, second, torch.arange(5, -6, -1).expand(7, 11)
    )  # +1 where both add up to 0 or more
    assert torch.equal(
        through(layer, images, others) > 0, F.conv2d(images, weight) + F.conv2d(others, theirs) >= 0
    )


@pytest.mark.parametrize(("kernel", "padding", "width"), [(1, 3, 60), (1, 2, 61), (3, 6, 55)])
def test_padding_may_make_rows_longer_than_a_word(kernel, padding, width):
    images, weight = signs(1, 3, 5, width), ternary(4, 3, kernel, kernel, kept=0.8)
    geometry = Geometry(3, (5, width), (kernel, kernel), padding=(padding, padding))
    layer = BitslicedConv(weight.to(torch.int8), None, geometry)
    assert torch.equal(through(layer, images), F.conv2d(images, weight, padding=padding))


ALONE = """
import torch
from mptify.runtime.kernels.bitsliced_conv import BitslicedConv
from mptify.runtime.geometry import Geometry
from torch.nn import functional as F
from tests.helpers.packed import signs, ternary, through

torch.set_num_threads(4)
images, weight = signs(1, 64, 56, 56), ternary(64, 64, 3, 3, kept=0.3)
layer = BitslicedConv(weight.to(torch.int8), None, Geometry(64, (56, 56), (3, 3), padding=(1, 1)))
assert torch.equal(through(layer, images), F.conv2d(images, weight, padding=1))
"""


def test_a_program_ends_although_fewer_threads_start_than_requested():
    """OpenMP may start fewer threads than it was asked for."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        env=os.environ | {"OMP_THREAD_LIMIT": "1"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0


def test_images_too_large_for_offsets_of_16_bits_are_counted():
    weight = ternary(5, 700, 3, 3, kept=0.3)
    layer = BitslicedConv(
        weight.to(torch.int8),
        torch.tensor([[0, 1, -2, 3, 5]]),
        Geometry(700, (4, 4), (3, 3), padding=(1, 1)),
    )
    images = signs(1, 700, 40, 3)
    assert not fits(Geometry(700, (40, 3), (3, 3), padding=(1, 1)), layer.max_kept)
    sums = F.conv2d(images, weight, padding=1)
    assert torch.equal(
        through(layer, images) > 0, sums >= torch.tensor([0, 1, -2, 3, 5]).view(-1, 1, 1)
    )


def test_images_too_small_are_told():
    layer = BitslicedConv(
        ternary(2, 3, 3, 3, kept=1.0).to(torch.int8), None, Geometry(3, (5, 5), (3, 3))
    )
    with pytest.raises(MptifyError, match="kernel: An image of 2×2 is too small"):
        through(layer, signs(1, 3, 2, 2))


def test_layers_of_many_survivors():
    """Sums as large as a network's widest layers have them, in counters of every length."""
    for kept in (1, 5, 30, 31, 40, 100, 127, 128, 200, 400, 900, 1500, 3000, 6000, 12000, 16383):
        channels = max(kept, 12_100)
        weight = torch.zeros(2, channels)
        weight[:, :kept] = signs(2, kept)
        weight, images = weight.view(2, channels, 1, 1), signs(1, channels, 2, 3)
        images[:, :kept, 0] = weight[0, :kept].view(1, -1, 1)  # as large as it can be
        sums = F.conv2d(images, weight)
        geometry = Geometry(channels, (2, 3), (1, 1))
        assert fits(geometry, kept)
        assert torch.equal(
            through(BitslicedConv(weight.to(torch.int8), None, geometry), images), sums
        )
        for least in (-kept, -kept + 1, 0, kept - 1, kept, kept + 1):
            layer = BitslicedConv(weight.to(torch.int8), torch.full((1, 2), least), geometry)
            assert torch.equal(through(layer, images) > 0, sums >= least), (kept, least)


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("seed", range(6))
def test_first_layers_agree(seed, cpu):
    """On numbers whose sums are exact in any order."""
    random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(20):
        images, weight, _, geometry = random_layer(channels=3)
        images = torch.randint(-16, 17, images.shape) / 8
        sums = F.conv2d(
            images,
            weight,
            None,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            geometry.channels // weight.shape[1],
        )
        least = torch.randint(-16, 17, (len(weight),)) / 8
        falling = torch.rand(len(weight)) < 0.5
        layer = InputConv(weight.to(torch.int8), Thresholds(least, falling), geometry)
        bound = least.view(-1, 1, 1)
        assert torch.equal(
            through(layer, images, layout=None, cpu=cpu) > 0,
            torch.where(falling.view(-1, 1, 1), sums <= bound, sums >= bound),
        ), geometry


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("inputs", [1, 7, 255, 256, 257, 4096, 9000])
def test_vectors_agree(inputs, cpu):
    weight, x = ternary(70, inputs, kept=0.4), signs(3, inputs)
    layer = PopcountLinear(weight.to(torch.int8))
    sums = x @ weight.T
    assert torch.equal(through(layer, x, layout="vectors", cpu=cpu), sums)
    least = torch.randint(-9, 10, (70,))
    found = through(PopcountLinear(weight.to(torch.int8), least), x, layout="vectors", cpu=cpu)
    assert torch.equal(found > 0, sums >= least)


@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 1), (2, 70, 7, 7), (1, 5, 9, 64), (3, 33, 4, 65), (1, 300, 3, 8)]
)
def test_means_are_rounded_once(shape):
    """Exactly what float64 says, in float32."""
    torch.manual_seed(6)
    x = signs(*shape)
    for kept in (0.05, 0.5, 1.0):
        weight = ternary(70, shape[1], kept=kept)
        expected = (x.double().sum((2, 3)) @ weight.double().T / (shape[2] * shape[3])).float()
        assert torch.equal(through(PooledLinear(weight.to(torch.int8)), x), expected)


def test_means_of_other_images_are_told():
    with pytest.raises(MptifyError, match="reads 5 channels, not 4"):
        through(PooledLinear(ternary(3, 5, kept=0.5).to(torch.int8)), signs(1, 4, 2, 2))


@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 7), (1, 1, 1, 1), (2, 5, 4, 8), (1, 4, 3, 65), (3, 2, 2, 12)]
)
def test_images_become_vectors(shape):
    x = signs(*shape)
    assert torch.equal(through(Flatten(), x), x.flatten(1))


def there_and_back(x, layout):
    calls = [Call("pack", ("x",), "bits"), Call("unpack", ("bits",), "y")]
    return Chain({"pack": Pack(layout), "unpack": Unpack()}, calls, ["x"], ["y"])(x)[0]


def test_planes_come_back_as_they_were():
    for shape in ((1, 1, 1, 1), (2, 3, 5, 7), (1, 4, 3, 8), (2, 2, 9, 64), (1, 3, 2, 131)):
        x = torch.randn(shape)
        x.view(-1)[0] = -0.0  # whose sign is +1
        expected = torch.where(x >= 0, 1.0, -1.0)
        assert torch.equal(there_and_back(x, "channels"), expected)
        assert torch.equal(
            there_and_back(x.to(memory_format=torch.channels_last), "channels"), expected
        )
    tokens = torch.randn(2, 5, 3, 11)
    assert torch.equal(there_and_back(tokens, "tokens"), torch.where(tokens >= 0, 1.0, -1.0))
    turned = tokens.transpose(1, 2)  # in another order than memory's
    assert torch.equal(there_and_back(turned, "tokens"), torch.where(turned >= 0, 1.0, -1.0))


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("seed", range(5))
def test_pools_agree(seed, cpu):
    random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(20):
        kernel = random.randint(1, 4), random.randint(1, 4)
        stride, padding = (
            (random.randint(1, 3), random.randint(1, 3)),
            (random.randint(0, kernel[0] // 2), random.randint(0, kernel[1] // 2)),
        )
        dilation = random.randint(1, 2), random.randint(1, 2)
        x = signs(
            2,
            random.randint(1, 9),
            random.randint(9, 20),
            random.choice([random.randint(9, 40), 63, 64, 65, 112, 127, 128, 130]),
        )
        falling = torch.rand(x.shape[1]) < 0.5
        turn = torch.where(falling, -1.0, 1.0).view(-1, 1, 1)
        expected = turn * F.max_pool2d(turn * x, kernel, stride, padding, dilation)
        pool = MaxPool.of(nn.MaxPool2d(kernel, stride, padding, dilation), falling)
        assert torch.equal(through(pool, x, cpu=cpu), expected)


def test_a_window_of_padding_alone_has_nothing_in_it():
    x = signs(1, 3, 2, 9)
    expected = F.max_pool2d(x, 2, 1, 1, 3)
    found = through(MaxPool.of(nn.MaxPool2d(2, 1, 1, 3), None), x)
    seen = expected.isfinite()
    assert torch.equal(found[seen], expected[seen])
    assert (found[~seen] == -1).all()
