"""The differences from the authors' code that docs/authors.md lists, each pinned on our side and computed as theirs does."""

from pathlib import Path

import pytest
import torch
from torch import nn

import mptify
from mptify import models

PAGE = (Path(__file__).parents[1] / "docs/authors.md").read_text()


def row(beginning):
    """Where they stand, and where we do."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {beginning}")]
    _, _, theirs, ours, *_ = (cell.strip() for cell in line.split("|"))
    return theirs, ours


def test_the_sign_of_zero_is_plus_one_where_theirs_is_zero():
    zeros = torch.zeros(3)
    assert torch.sign(zeros).tolist() == [0, 0, 0]  # what their BiRealAct returns
    assert mptify.Sign()(zeros).tolist() == [1, 1, 1]
    theirs, ours = row("sign of an activation that is 0")
    assert theirs.startswith("0")
    assert ours == "+1"


def test_channels_without_survivors_give_zeros_and_those_plus_one():
    """At 99 % pruned most filters of a small layer have none."""
    layer = nn.Conv2d(4, 64, 1, bias=False)
    ticketed = mptify.transform(
        nn.Sequential(layer, nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 4, 1)),
        bits="1/1",
        prune=0.99,
    ).eval()
    empty = ~mptify.ticket_layers(ticketed)["0"].mask.flatten(1).any(1)
    assert empty.sum() > 32
    sums = ticketed.get_submodule("0")(torch.randn(2, 4, 3, 3))
    assert (sums[:, empty] == 0).all()
    assert (mptify.Sign()(sums[:, empty]) == 1).all()


def test_inserted_norms_have_a_larger_epsilon_and_a_networks_own_keep_theirs():
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, eps=3e-5),
        nn.ReLU(),
        nn.Conv2d(4, 2, 3),
    )
    ticketed = mptify.transform(network, bits="1/1", prune=0.5)
    found = {
        name: module.eps
        for name, module in ticketed.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    assert found == {"1_norm": 1e-2, "3": 3e-5}
    theirs, ours = row("ε of the norms")
    assert float(theirs) == nn.BatchNorm2d(1).eps
    assert ours.startswith("1e-2 ")


def test_tied_sums_give_their_gradient_to_the_first():
    sums = torch.tensor([[[[2.0, 2.0], [2.0, -4.0]]]], requires_grad=True)
    nn.functional.max_pool2d(sums, 2).sum().backward()
    assert sums.grad.flatten().tolist() == [1, 0, 0, 0]
    layer = mptify.transform(
        nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)),
        bits="1/1",
        prune=0.5,
    )
    weight = mptify.ticket_layers(layer)[
        "3"
    ].weight  # without the gain: sums of ±1 are integers, and tie
    assert set(weight.unique().tolist()) == {-1, 0, 1}
    assert "first of the largest" in row("max-pooling of sums")[1]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_stem_pools_before_its_norm(name):
    import torchvision

    with torch.device("meta"):
        graph = mptify.transform(getattr(torchvision.models, name)(), bits="1/1").graph
    assert [node.name for node in graph.nodes][1:5] == ["conv1", "maxpool", "bn1", "relu_sign"]
    theirs, ours = row("stem of a 1/1 ResNet")
    assert theirs == "conv, norm, max-pool, sign"
    assert ours.startswith("conv, max-pool, norm, sign")


def test_vgg_small_has_a_norm_before_every_sign():
    graph = mptify.transform(models.vgg_small(width=0.1), bits="1/1")
    kinds = [
        type(graph.get_submodule(node.target))
        for node in graph.graph.nodes
        if node.op == "call_module"
    ]
    signs = [index for index, kind in enumerate(kinds) if kind is mptify.Sign]
    assert len(signs) == 6
    assert all(kinds[index - 1] is nn.BatchNorm2d for index in signs)
    theirs, ours = row("1/1 VGG-Small")
    assert theirs.startswith("three norms")
    assert ours.startswith("six norms")
