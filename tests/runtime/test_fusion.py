"""Patterns of layers, and the kernels that they get."""

import pytest
import torch
from torch import nn

import mptify
from mptify.errors import MptifyError
from mptify.runtime.chain import Chain
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernels.bitsliced_conv import BitslicedConv, addition_cost
from mptify.runtime.kernels.concat import Concat
from mptify.runtime.kernels.pooled_linear import PooledLinear
from mptify.runtime.kernels.popcount_conv import PopcountConv, count_cost
from mptify.runtime.kernels.residual_add import ResidualAdd
from mptify.runtime.library import library
from tests.helpers.outputs import exact, require_same
from tests.helpers.packed import shaken_
from tests.nets import images

pytestmark = [
    pytest.mark.skipif(library is None, reason="this machine has no C++ compiler"),
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
]


class Averaged(nn.Module):
    """A classifier behind an average pool; with `twice`, something else reads the averages too."""

    def __init__(self, way, twice):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 9, 3),
            nn.BatchNorm2d(9),
            nn.ReLU(),
            nn.Conv2d(9, 11, 3),
            nn.BatchNorm2d(11),
            nn.ReLU(),
        )
        self.pool, self.drop, self.head = nn.AdaptiveAvgPool2d(1), nn.Dropout(0.2), nn.Linear(11, 5)
        self.way, self.twice = way, twice

    def forward(self, x):
        x = self.body(x)
        if self.way == "module":
            x = torch.flatten(self.pool(x), 1)
        elif self.way == "function":
            x = nn.functional.adaptive_avg_pool2d(x, (1, 1)).flatten(1)
        elif self.way == "mean":
            x = x.mean((-2, -1))
        else:
            x = x.mean((1, 3))  # over other dimensions: no average pool
        y = self.head(self.drop(x))
        return y + x.sum(1, keepdim=True) if self.twice else y


@pytest.mark.parametrize(
    ("way", "twice", "packed"),
    [
        ("module", False, True),
        ("function", False, True),
        ("mean", False, True),
        ("module", True, False),
        ("other", False, False),
    ],
)
def test_a_classifier_that_reads_averages_is_packed_with_them(way, twice, packed):
    """And where something else reads them too, or where they are other averages, it is not."""
    torch.manual_seed(12)
    ticketed = shaken_(mptify.transform(Averaged(way, twice), bits="1/1", prune=0.4)).eval()
    x = exact(torch.randn(2, 3, 15, 15))
    program = mptify.pack(ticketed, x)
    assert any(isinstance(module, PooledLinear) for module in program.modules()) == packed
    with torch.no_grad():
        require_same(program(x), ticketed(x), program)


class Crossing(nn.Module):
    """Signs that are read again behind a gate of torch's, which is changed in place later."""

    def __init__(self):
        super().__init__()
        self.first, self.gated, self.second, self.third = (
            nn.Conv2d(n, 8, 3, padding=1) for n in (3, 8, 8, 8)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        a = torch.relu(self.norms[0](self.first(x)))
        gate = torch.sigmoid(self.gated(a))
        b = torch.relu(self.norms[1](self.second(a) * gate))
        c = torch.relu(self.norms[2](self.third(b) + a))
        gate.neg_()
        return self.head((c * gate).mean((2, 3)))


def test_planes_are_handed_from_chain_to_chain():
    torch.manual_seed(5)
    ticketed = shaken_(mptify.transform(Crossing(), bits="1/1", prune=0.5)).eval()
    program = mptify.pack(ticketed, images())
    chains = [module for module in program.modules() if isinstance(module, Chain)]
    assert len(chains) == 2
    assert any("unpack" in name and "relu" not in name for name in chains[0].kernels), list(
        chains[0].kernels
    )
    with torch.no_grad():
        x = exact(images())
        require_same(program(x), ticketed(x), program)


class Fire(nn.Module):
    """As SqueezeNet's: two branches, joined channel by channel."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.three, self.last = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 5, 1),
            nn.Conv2d(8, 6, 3, padding=1),
            nn.Conv2d(11, 7, 3),
        )
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.cat([torch.relu(self.one(x)), torch.relu(self.three(x))], 1)
        return self.head(torch.relu(self.last(x)).mean((2, 3)))


def test_channels_are_joined_as_bits():
    torch.manual_seed(8)
    ticketed = shaken_(mptify.transform(Fire(), bits="1/1", prune=0.5)).eval()
    program = mptify.pack(ticketed, images())
    (chain,) = (module for module in program.modules() if isinstance(module, Chain))
    assert sum(isinstance(kernel, Concat) for kernel in chain.kernels.values()) == 1
    with torch.no_grad():
        x = exact(images())
        require_same(program(x), ticketed(x), program)


class TwoInputs(nn.Module):
    """Its second layer's shortcut is the same for all images."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 1),
        )
        self.norms, self.other = (
            nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3)),
            nn.Parameter(torch.randn(1, 8, 16, 16)),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        a = torch.relu(self.norms[0](self.first(x)))
        b = torch.relu(self.norms[1](self.second(a) + torch.relu(self.other)))
        return self.head(torch.relu(self.norms[2](self.third(b))).mean((2, 3)))


def test_what_is_there_once_is_there_for_all_images():
    torch.manual_seed(9)
    ticketed = mptify.transform(TwoInputs(), bits="1/1", prune=0.5).eval()
    x = exact(torch.randn(3, 3, 16, 16))
    with torch.no_grad():
        program = mptify.pack(ticketed, x)
        require_same(program(x), ticketed(x), program)
        for chain in (
            module
            for module in program.modules()
            if isinstance(module, Chain) and len(module.inputs) == 2
        ):
            with pytest.raises(MptifyError, match="3 and 2 images at once"):
                chain(torch.zeros(3, 3, 16, 16), torch.zeros(2, 8, 16, 16))


class Tokens(nn.Module):
    """Linear layers on N × H × W × C, then one on all of it."""

    def __init__(self, start=1):
        super().__init__()
        self.first, self.second, self.head = (
            nn.Linear(3, 8),
            nn.Linear(8, 6),
            nn.Linear(6 * 20 if start == 1 else 6, 5),
        )
        self.start, self.values = start, nn.Linear(5, 5)

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.first(x))))
        x = x.flatten(1) if self.start == 1 else x.flatten(0, 2)
        return self.values(torch.relu(self.head(x)))


@pytest.mark.parametrize("start", [1, 0])
def test_tokens_keep_their_order_when_they_are_flattened(start):
    torch.manual_seed(10)
    ticketed = shaken_(mptify.transform(Tokens(start), bits="1/1", prune=0.3)).eval()
    x = exact(torch.randn(2, 4, 5, 3))
    with torch.no_grad():
        assert torch.equal(mptify.pack(ticketed, x)(x), ticketed(x))


def test_few_pixels_are_counted_and_many_added():
    few, many = (
        Geometry(512, (4, 4), (3, 3), padding=(1, 1)),
        Geometry(64, (56, 56), (3, 3), padding=(1, 1)),
    )

    def added(geometry, filters, share):
        count = filters * geometry.channels * 9
        weight = torch.arange(count) < count // share
        return addition_cost(weight, geometry)

    assert count_cost(few, 512) < added(few, 512, 4)
    assert count_cost(few, 512) > added(few, 512, 50)  # few survivors are soon added
    assert count_cost(many, 64) > added(many, 64, 4)
    from mptify.models import resnet18_cifar

    program = mptify.pack(
        mptify.transform(resnet18_cifar(), bits="1/1", prune=0.5).eval(), torch.zeros(1, 3, 32, 32)
    )
    kinds = {name: type(module) for name, module in program.chain_0_0.kernels.items()}
    assert kinds["layer1_0_conv1"] is BitslicedConv
    assert kinds["layer4_1_conv2"] is PopcountConv


def test_two_layers_added_are_one_kernel():
    from mptify.models import resnet18_cifar

    ticketed = mptify.transform(resnet18_cifar(), bits="1/1", prune=0.9).eval()
    program = mptify.pack(ticketed, torch.randn(1, 3, 32, 32))
    assert sum(isinstance(module, ResidualAdd) for module in program.modules()) == 3
    assert not any(isinstance(module, nn.BatchNorm2d) for module in program.modules())
