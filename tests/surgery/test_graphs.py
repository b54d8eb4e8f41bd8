"""What other code does with a ticket model whose `forward` is a graph: trace it again, group its parameters, pickle it."""

import pickle

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.feature_extraction import create_feature_extractor

import mptify
from mptify.errors import NotKept
from mptify.training.evaluation import evaluating

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)

BOTH = pytest.mark.parametrize("bits", ["1/32", "1/1"])


def test_a_matcher_that_is_a_local_function_is_pickled_as_its_answers():
    """cait's group_matcher() returns a function inside of a function, which pickle can't carry."""
    dense = timm.create_model("cait_xxs24_224", depth=2, img_size=32, num_classes=4)
    ticketed = mptify.transform(dense, bits="1/1", prune=0.5)
    copied = pickle.loads(pickle.dumps(ticketed))
    matcher = dense.group_matcher()
    for name, _ in copied.named_parameters():
        assert copied.group_matcher(coarse=False)(name) == matcher(name)


class Shared(nn.Module):
    """A layer with two names, whose first user comes last in `forward`."""

    def __init__(self):
        super().__init__()
        self.position = nn.Conv2d(4, 4, 3, padding=1)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.block = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), self.position)

    def forward(self, x):
        return self.position(self.block(self.stem(x)).relu()).mean((2, 3))


@BOTH
def test_parameters_come_in_the_order_of_the_dense_network(bits):
    """timm groups a parameter by the first of its names: a shared layer must not get another one by a graph's order."""
    dense = Shared()
    names = [name for name, module in dense.named_modules() if isinstance(module, nn.Conv2d)]
    ticketed = mptify.transform(dense, bits=bits, prune=0.5)
    assert list(mptify.ticket_layers(ticketed)) == names == ["position", "stem"]


class ReadsWeight(nn.Module):
    """Uses a layer's weight by itself, as timm's BEiT does to add a bias of its own."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.qkv = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = nn.functional.linear(self.norm(self.stem(x)), weight=self.qkv.weight, bias=None)
        return self.head(x)


@BOTH
def test_an_extractor_follows_the_scores_of_a_layer_whose_weight_is_read(bits):
    ticketed = mptify.transform(ReadsWeight(), bits=bits, prune=0.5).eval()
    extractor = create_feature_extractor(ticketed, {"head": "logits"}).eval()
    x = torch.randn(5, 8)
    torch.testing.assert_close(extractor(x)["logits"], ticketed(x))
    before = ticketed(x)
    with torch.no_grad():
        ticketed.qkv.scores.copy_(torch.rand(8, 8))
    assert not torch.equal(ticketed(x), before)
    torch.testing.assert_close(extractor(x)["logits"], ticketed(x))
    extractor(x)["logits"].sum().backward()
    assert ticketed.qkv.scores.grad.abs().sum() > 0


def test_inserted_norms_are_leaves_for_other_tracers():
    ticketed = mptify.transform(timm.create_model("test_byobnet"), bits="1/1", prune=0.5).eval()
    norms = [
        name
        for name, module in ticketed.named_modules()
        if type(module).__name__ == "ChannelBatchNorm"
    ]
    x = torch.randn(1, 3, 64, 64)
    extracted = create_feature_extractor(ticketed, [norms[0]])(x)[norms[0]]
    seen = []
    ticketed.get_submodule(norms[0]).register_forward_hook(
        lambda _, __, output: seen.append(output)
    )
    ticketed(x)
    torch.testing.assert_close(extracted, seen[0])


def test_a_method_that_is_gone_says_why_and_what_to_do():
    ticketed = mptify.transform(timm.create_model("test_vit", depth=2), bits="1/1", prune=0.5)
    with pytest.raises(
        NotKept,
        match=r"VisionTransformer\.forward_intermediates is gone: .*create_feature_extractor",
    ) as caught:
        ticketed.forward_intermediates(torch.randn(1, 3, 160, 160))
    assert isinstance(caught.value, AttributeError)
    assert not hasattr(ticketed, "set_grad_checkpointing")


def test_a_head_alone_keeps_to_the_arguments_that_it_was_traced_with():
    ticketed = mptify.transform(
        timm.create_model("test_vit", depth=2), bits="1/1", prune=0.5
    ).eval()
    x = torch.randn(1, 3, 160, 160)
    torch.testing.assert_close(ticketed.forward_head(ticketed.forward_features(x)), ticketed(x))
    with pytest.raises(NotKept, match="pre_logits=False only"):
        ticketed.forward_head(ticketed.forward_features(x), pre_logits=True)


@BOTH
def test_a_weight_can_not_be_assigned(bits):
    ticketed = mptify.transform(Shared(), bits=bits, prune=0.5)
    with pytest.raises(
        mptify.MptifyError,
        match=r"stem: its weight is computed from frozen weights and scores, so it can't be assigned",
    ):
        ticketed.stem.weight = nn.Parameter(torch.zeros(4, 3, 3, 3))


class ReadsTable(nn.Module):
    """Runs a layer on a buffer, as timm's Swin V2 does with the coordinates of its position bias."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, 8).view(1, 8))
        self.bias = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(x + self.bias(self.table))


@BOTH
def test_an_extractor_follows_the_scores_of_a_layer_that_sees_no_input(bits):
    ticketed = mptify.transform(ReadsTable(), bits=bits, prune=0.5).eval()
    extractor = create_feature_extractor(ticketed, {"head": "logits"}).eval()
    x = torch.randn(5, 8)
    before = ticketed(x)
    with torch.no_grad():
        ticketed.bias.scores.copy_(torch.rand(8, 8))
    assert not torch.equal(ticketed(x), before)
    torch.testing.assert_close(extractor(x)["logits"], ticketed(x))


class ReadsMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        x = F.dropout(F.relu(self.first(x)), 0.5, self.training)
        return self.last(x)


def test_the_graph_follows_the_mode_however_it_is_set():
    """As `evaluating` restores the mode of each module, without calling `train()`."""
    ticketed = mptify.transform(ReadsMode(), bits="1/1", prune=0.5)
    x = torch.randn(2, 3, 9, 9)

    def is_random():
        return not torch.equal(ticketed(x), ticketed(x))

    assert is_random()
    with evaluating(ticketed):
        assert not is_random()
    assert is_random()
    ticketed.training = False
    assert not is_random()
    copied = pickle.loads(pickle.dumps(ticketed))
    copied.training = True
    assert not torch.equal(copied(x), copied(x))
