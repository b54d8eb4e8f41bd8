"""reset_classifier of a ticket model whose `forward` is a graph."""

import pytest
import timm
import torch

import mptify
from mptify.errors import BadConfig, NotKept
from mptify.surgery.plans import plan_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


def ticket(name, **arguments):
    return mptify.transform(
        timm.create_model(name, num_classes=10, **arguments), bits="1/1", prune=0.75
    ).eval()


LINEAR, CONV, NESTED = (
    ("test_resnet", "fc", {}),
    ("dpn48b", "classifier", {"k_sec": (1, 1, 1, 1)}),
    ("sequencer2d_s", "head.fc", {"layers": (1, 1, 1, 1)}),
)

OF_TIMM = ("mobilenetv3_small_050", "classifier", {})  # a subclass of nn.Linear


@pytest.mark.parametrize(("name", "path", "arguments"), [LINEAR, CONV, NESTED, OF_TIMM])
def test_another_number_of_classes_is_another_ticket_layer(name, path, arguments):
    """Also where `get_classifier` returns a module with the pooling in it."""
    ticketed = ticket(name, **arguments)
    before = ticketed.get_submodule(path)
    ticketed.reset_classifier(7)
    classifier = mptify.ticket_layers(ticketed)[path]
    assert type(classifier) is type(before)
    assert classifier is not before
    assert ticketed(torch.randn(2, 3, 64, 64)).shape == (2, 7)
    assert ticketed.num_classes == 7
    planned = next(layer for layer in plan_of(ticketed).layers if layer.name == path)
    assert planned.shape == classifier.shape
    assert planned.kept == classifier.kept == int(classifier.mask.sum())


def test_zero_classes_leave_the_features():
    ticketed = ticket("test_resnet")
    ticketed.reset_classifier(0)
    assert ticketed(torch.randn(2, 3, 64, 64)).shape == (2, ticketed.num_features)


def test_what_can_not_be_made_anew_is_refused():
    ticketed = ticket("crossvit_tiny_240", depth=((1, 1, 0), (1, 1, 0), (1, 1, 0)))
    with pytest.raises(
        NotKept,
        match=r"head: the classifier can't be replaced, since the output comes from head\.0, head\.1",
    ):
        ticketed.reset_classifier(7)
    with pytest.raises(BadConfig, match="a whole number from 0"):
        ticket("test_resnet").reset_classifier(-1)
    with pytest.raises(NotKept, match="the pooling is part of the graph"):
        ticket("test_resnet").reset_classifier(7, "max")


def test_a_network_with_two_classifiers_is_refused():
    ticketed = ticket("levit_128s", img_size=64, depth=(1, 1, 1))
    with pytest.raises(
        NotKept, match=r"since the output comes from head\.linear, head_dist\.linear; give"
    ):
        ticketed.reset_classifier(7)


def test_a_network_with_a_second_classifier_is_refused():
    """volo adds what an auxiliary head says of each token, and `get_classifier()` knows nothing of that head."""
    ticketed = ticket("volo_d1_224", img_size=64)
    with pytest.raises(
        NotKept, match="can't be replaced, since the output comes from aux_head, head"
    ):
        ticketed.reset_classifier(7)
    assert ticketed(torch.randn(2, 3, 64, 64)).shape == (2, 10)
