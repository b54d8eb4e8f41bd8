"""A network that is transformed by its name is saved and loaded by it."""

import pytest
import timm
import torch

import mptify
from mptify.errors import BadConfig, UnknownModel
from mptify.models import conv2


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
@pytest.mark.parametrize("name", ["mptify:conv2", "timm:test_vit", "torchvision:resnet18"])
def test_a_name_is_remembered(name, bits, tmp_path):
    ticketed = mptify.transform(name, bits=bits, num_classes=7)
    mptify.save(ticketed, tmp_path / "a.ticket")
    built = mptify.read(tmp_path / "a.ticket").architecture
    assert (str(built), built.arguments) == (name, {"num_classes": 7})
    x = torch.randn(1, 3, *((32, 32) if "conv2" in name else (160, 160)))
    assert torch.equal(mptify.load(tmp_path / "a.ticket")(x), ticketed.eval()(x))


def test_a_model_that_became_another_is_saved_without_a_name(tmp_path):
    ticketed = mptify.transform("timm:test_vit", bits="1/1")
    ticketed.reset_classifier(5)
    mptify.save(ticketed, tmp_path / "a.ticket")
    assert mptify.read(tmp_path / "a.ticket").architecture is None


def test_a_network_by_name_depends_on_the_seed_alone():
    first = mptify.transform("timm:test_vit", seed=3, init="keep").state_dict()
    torch.manual_seed(99)
    second = mptify.transform("timm:test_vit", seed=3, init="keep").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_plan_takes_a_name_too():
    assert [layer.name for layer in mptify.plan("mptify:conv2").layers] == [
        layer.name for layer in mptify.plan(conv2()).layers
    ]


def test_what_means_nothing_is_one_sentence():
    with pytest.raises(UnknownModel, match="There is no model 'resnet81'"):
        mptify.transform("resnet81")
    with pytest.raises(BadConfig, match="num_classes: is for a network that is built by its name"):
        mptify.transform(conv2(), num_classes=5)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("test_vit", {}),
        ("test_vit", {"num_classes": 7, "in_chans": 1}),
        ("resnet18", {"num_classes": 7}),
        ("test_efficientnet", {"in_chans": 1}),
        ("vit_tiny_patch16_224", {"img_size": 64}),
    ],
)
def test_a_timm_model_is_remembered(name, given, tmp_path):
    ticketed = mptify.transform(timm.create_model(name, **given))
    mptify.save(ticketed, tmp_path / "a.ticket")
    built = mptify.read(tmp_path / "a.ticket").architecture
    expected = {"input_size" if key == "img_size" else key: value for key, value in given.items()}
    assert (str(built), built.arguments) == (f"timm:{name}", expected)
    size = given.get("img_size", 224 if "resnet" in name else 160)
    x = torch.randn(1, given.get("in_chans", 3), size, size)
    assert torch.equal(mptify.load(tmp_path / "a.ticket")(x), ticketed.eval()(x))


@pytest.mark.parametrize(
    "options",
    [{"drop_rate": 0.3}, {"act_layer": torch.nn.ReLU}, {"qkv_bias": False}, {"global_pool": "avg"}],
)
def test_a_timm_model_of_other_arguments_is_saved_without_a_name(options, tmp_path):
    mptify.save(mptify.transform(timm.create_model("test_vit", **options)), tmp_path / "a.ticket")
    assert mptify.read(tmp_path / "a.ticket").architecture is None


def test_a_loaded_ticket_remembers_its_name(tmp_path):
    mptify.save(mptify.transform("mptify:conv2", num_classes=7), tmp_path / "a.ticket")
    again = mptify.save(mptify.load(tmp_path / "a.ticket"), tmp_path / "b.ticket")
    assert again.architecture.arguments == {"num_classes": 7}
    alone = mptify.load(tmp_path / "a.ticket", model=conv2(num_classes=7))
    assert mptify.save(alone, tmp_path / "c.ticket").architecture is None
