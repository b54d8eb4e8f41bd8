"""A name that `save` is given has to be that of the model; models are found inside of what wraps them."""

import pytest
import torch
import torchvision
from torch import nn

import mptify
from mptify.errors import TicketMismatch
from mptify.models import conv2, registry
from tests.nets import Plain


def ticketed(name, bits="1/1", **arguments):
    return mptify.transform(registry.build(registry.resolve(name), **arguments), bits=bits).eval()


def require_fit(model, name, **arguments):
    """As `save` does, for networks that are large to write."""
    from mptify.ticket import fit

    fit.require_fit(model, fit.architecture_named(name, arguments))


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
@pytest.mark.parametrize(
    ("model", "name", "words"),
    [
        (lambda: conv2(), "mptify:conv4", "its classifier.1 is 256×8192, the model's 256×16384"),
        (lambda: conv2(), "timm:test_vit", "its features.0 is missing, the model's 64×3×3×3"),
        (
            lambda: conv2(num_classes=7),
            "mptify:conv2",
            "its classifier.5 is 10×256, the model's 7×256",
        ),
        (
            lambda: conv2(in_chans=1),
            "mptify:conv2",
            "its features.0 is 64×3×3×3, the model's 64×1×3×3",
        ),
        (lambda: Plain(), "mptify:conv2", "built with no arguments, is not the model"),
    ],
)
def test_a_name_that_does_not_fit_is_refused(model, name, words, bits, tmp_path):
    with pytest.raises(TicketMismatch, match=words):
        mptify.save(mptify.transform(model(), bits=bits), tmp_path / "a.ticket", name)
    assert not list(tmp_path.iterdir())


def test_a_network_that_lacks_a_layer_of_the_named_one_is_refused():
    network = torchvision.models.resnet18()
    network.layer4 = nn.Conv2d(256, 512, 3)
    with pytest.raises(TicketMismatch, match=r"its layer4 is missing, the model's 512×256×3×3"):
        require_fit(mptify.transform(network), "resnet18")
    network.layer4 = network.layer3[:0]
    network.fc = nn.Linear(256, 1000)
    with pytest.raises(TicketMismatch, match=r"its fc is 1000×512, the model's 1000×256"):
        require_fit(mptify.transform(network), "resnet18")


def test_a_network_of_another_size_is_refused_although_its_layers_are_the_same():
    small = ticketed("timm:test_vit", input_size=32)
    with pytest.raises(TicketMismatch, match="its pos_embed is"):
        require_fit(small, "timm:test_vit")
    require_fit(small, "timm:test_vit", input_size=32)


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
@pytest.mark.parametrize(
    "name",
    [
        "resnet18", "torchvision:regnet_y_400mf", "torchvision:squeezenet1_0", "torchvision:swin_t", "torchvision:raft_small",
        "timm:test_vit", "timm:coat_tiny", "timm:levit_128s", "timm:mixer_s32_224", "mptify:conv2_x0.5",
    ],
)  # fmt: skip
def test_the_right_name_is_taken(name, bits):
    require_fit(ticketed(name, bits), name)


class Lightning(nn.Module):
    """As Lightning's modules are: the network is an attribute, beside metrics."""

    def __init__(self, network):
        super().__init__()
        self.network, self.loss = network, nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    "wrap", ["DataParallel", "DistributedDataParallel", "Lightning", "compile"]
)
def test_what_wraps_a_model_is_not_saved(wrap, tmp_path, process_group):
    model = ticketed("mptify:conv2", input_size=8)
    wrapped = {
        "DataParallel": nn.DataParallel,
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        "Lightning": Lightning,
        "compile": torch.compile,
    }[wrap](model)
    for network, file in ((model, "plain.ticket"), (wrapped, "wrapped.ticket")):
        mptify.save(network, tmp_path / file, "mptify:conv2", arguments={"input_size": 8})
    assert (tmp_path / "plain.ticket").read_bytes() == (tmp_path / "wrapped.ticket").read_bytes()
    assert mptify.load(tmp_path / "wrapped.ticket")(torch.zeros(1, 3, 8, 8)).shape == (1, 10)
