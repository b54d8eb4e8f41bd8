"""reset_classifier of a ticket model whose `forward` is a graph."""

import pytest
import timm
import torch

import mptify
from mptify.errors import BadSpec, NotKept
from mptify.surgery.plan import plan_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def ticket(name, **arguments):
    return mptify.transform(timm.create_model(name, num_classes=10, **arguments), bits="1/1", prune=0.75).eval()


@pytest.mark.parametrize(("name", "arguments"), [("test_resnet", {}), ("dpn48b", {"k_sec": (1, 1, 1, 1)})])
def test_another_number_of_classes_is_another_ticket_layer(name, arguments):
    """dpn's classifier is a conv of one pixel."""
    ticketed = ticket(name, **arguments)
    path = ticketed.classifier_paths[0]
    ticketed.reset_classifier(7)
    classifier = ticketed.get_classifier()
    assert isinstance(classifier, type(mptify.ticket_layers(ticketed)[path]))
    assert ticketed(torch.randn(2, 3, 64, 64)).shape == (2, 7)
    assert ticketed.num_classes == 7
    planned = next(layer for layer in plan_of(ticketed).layers if layer.name == path)
    assert planned.shape == tuple(classifier.frozen.shape)
    assert planned.kept == classifier.kept == int(classifier.mask.sum())


def test_zero_classes_leave_the_features():
    ticketed = ticket("test_resnet")
    ticketed.reset_classifier(0)
    assert ticketed(torch.randn(2, 3, 64, 64)).shape == (2, ticketed.num_features)


def test_what_can_not_be_made_anew_is_refused():
    ticketed = ticket("crossvit_tiny_240", depth=((1, 1, 0), (1, 1, 0), (1, 1, 0)))
    with pytest.raises(NotKept, match="head: this classifier is made of several layers"):
        ticketed.reset_classifier(7)
    with pytest.raises(BadSpec, match="a whole number from 0"):
        ticket("test_resnet").reset_classifier(-1)
    with pytest.raises(NotKept, match="the pooling is part of the graph"):
        ticket("test_resnet").reset_classifier(7, "max")


def test_a_network_with_a_second_classifier_is_refused():
    """volo adds what an auxiliary head says of each token, and `get_classifier()` knows nothing of that head."""
    ticketed = ticket("volo_d1_224", img_size=64)
    with pytest.raises(NotKept, match=r"head: this classifier shares the output with aux_head, so it can't be made anew"):
        ticketed.reset_classifier(7)
    assert ticketed(torch.randn(2, 3, 64, 64)).shape == (2, 10)
