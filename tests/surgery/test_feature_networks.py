"""Features from inside of a network: timm's `features_only=True`, hooks, and feature extractors made of ticket models."""

import pytest
import timm
import torch
import torchvision
from torch import nn

import mptify
from mptify.runtime.library import library
from mptify.surgery.edges import split_fused_norms_
from mptify.surgery.trace import trace

FEATURE_NETWORKS = {
    "resnet18": {},  # rebuilt from its children
    "xception41": {"img": 96},  # hooks on activations
    "vit_tiny_patch16_224": {"depth": 3, "img_size": 64},  # calls forward_intermediates
    "levit_128s": {"img": 224},
    "mixer_s32_224": {"img": 224},
    "selecsls42": {},  # children that pass lists to each other
    "hrnet_w18_small": {},
    "mobilenetv3_small_050": {},
    "efficientnet_b0": {"feature_cls": "hook"},
}


def images(size=64, count=2):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=FEATURE_NETWORKS)
def feature_network(request):
    options = dict(FEATURE_NETWORKS[request.param])
    size = options.pop("img", 64)
    return timm.create_model(request.param, features_only=True, **options).eval(), images(size)


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_a_network_of_features_keeps_them_all(feature_network, bits):
    network, x = feature_network
    ticketed = mptify.transform(network, bits=bits, prune=0.5).eval()
    with torch.no_grad():
        shapes = [tuple(one.shape) for one in network(x)]
        features = ticketed(x)
    assert [tuple(one.shape) for one in features] == shapes
    assert all(one.std() > 0 for one in features)
    assert ticketed.ticket_plan.converted == ticketed.ticket_plan.total


def test_the_null_surgery_of_a_network_of_features_is_the_identity(feature_network):
    network, x = feature_network
    for region in trace(network).regions:
        if region.path == "":  # traced whole: its graph gives what its code gives
            split_fused_norms_(list(region.graphs.values()), region.module)
            traced = torch.fx.GraphModule(region.module, region.graphs[False])
            with torch.no_grad():
                torch.testing.assert_close(list(traced(x)), list(network(x)))


class Hooked(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 2, 3),
        )


@pytest.mark.parametrize("position", [0, 1, 2, 5])
def test_hooks_go_on_being_called(position):
    network, before, behind = Hooked(), [], []
    network[position].register_forward_pre_hook(lambda module, args: before.append(args[0]))
    network[position].register_forward_hook(lambda module, args, output: behind.append(output))
    x = images(16)
    with torch.no_grad():
        network(x)
        mptify.transform(network, bits="1/1", prune=0.5)(x)
    assert [tuple(one.shape) for one in before] == [tuple(before[0].shape)] * 2
    assert [tuple(one.shape) for one in behind] == [tuple(behind[0].shape)] * 2
    if isinstance(network[position], nn.ReLU):
        assert set(behind[1].unique().tolist()) <= {-1.0, 1.0}


def test_hooks_of_a_norm_with_its_activation_inside_see_the_activation():
    from timm.layers import BatchNormAct2d

    seen = []
    network = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4), nn.Conv2d(4, 2, 3))
    network[1].register_forward_hook(lambda module, args, output: seen.append(output))
    mptify.transform(network, bits="1/1", prune=0.5)(images(16))
    assert set(seen[0].unique().tolist()) == {-1.0, 1.0}


def test_hooks_behind_a_real_valued_shortcut_stay():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.norm, self.act, self.two = (
                nn.Conv2d(3, 3, 3, padding=1),
                nn.BatchNorm2d(3),
                nn.ReLU(),
                nn.Conv2d(3, 3, 3),
            )

        def forward(self, x):
            return self.two(self.act(self.norm(self.one(x)) + x))

    seen = []
    block = Block()
    block.act.register_forward_hook(lambda module, args, output: seen.append(output))
    ticketed = mptify.transform(block, bits="1/1", prune=0.5, residual="real")
    ticketed(images(16))
    assert len(seen) == 1


def test_a_wrapper_that_hooks_fill_is_not_traced():
    """A trace calls no hooks, so that what they leave would be frozen as it was."""

    class Catching(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.caught = Hooked(), {}
            self.net[1].register_forward_hook(self.catch)

        def catch(self, module, args, output):
            self.caught["relu"] = output

        def forward(self, x):
            return self.net(x), self.caught.get("relu")

    logits, caught = mptify.transform(Catching(), bits="1/1", prune=0.5)(images(16))
    assert caught.shape == (2, 4, 14, 14)
    assert logits.shape == (2, 2, 3, 3)


@pytest.mark.skipif(library is None, reason="needs the compiled library")
def test_packing_refuses_to_lose_hooks():
    network = Hooked()
    network[5].register_forward_hook(lambda module, args, output: None)
    ticketed = mptify.transform(network, bits="1/1", prune=0.5).eval()
    with pytest.raises(
        mptify.MptifyError, match=r"5_sign has hooks, which a packed program would not call"
    ):
        mptify.pack(ticketed, images(16))


# -- feature extractors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
@pytest.mark.parametrize(
    ("build", "extract"),
    [
        (
            torchvision.models.resnet18,
            torchvision.models.feature_extraction.create_feature_extractor,
        ),
        (lambda: timm.create_model("test_resnet"), timm.layers.create_feature_extractor),
        (lambda: timm.create_model("test_vit"), timm.layers.create_feature_extractor),
        (lambda: timm.create_model("test_convnext"), timm.layers.create_feature_extractor),
    ],
    ids=["torchvision's resnet18", "timm's resnet", "timm's vit", "timm's convnext"],
)
def test_extractors_are_made_of_ticket_models(build, extract, bits):
    ticketed = mptify.transform(build(), bits=bits, prune=0.5).eval()
    inner = [layer for layer in ticketed.ticket_plan.layers if not layer.functional][1].name
    extractor = extract(ticketed, {inner: "inner"})
    x, seen = images(160), []
    handle = mptify.ticket_layers(ticketed)[inner].register_forward_hook(
        lambda module, args, output: seen.append(output)
    )
    with torch.no_grad():
        ticketed(x)
        handle.remove()
        torch.testing.assert_close(extractor(x)["inner"], seen[0])
