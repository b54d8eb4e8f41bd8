"""The paper's backbones: their sizes against its tables, their starts, and their names in both registries."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import mptify
import mptify.models.in_timm
from mptify import models
from mptify.errors import BadConfig, UnknownModel
from mptify.models import registry
from mptify.tools import zoo_check, zoo_rows

DOCS = Path(__file__).parents[1] / "docs/backbones.md"

# name: all parameters, those of conv and linear layers, fraction pruned, what is kept; the paper's parameters and kept ones, in millions
COUNTS = {
    "mptify:conv2": (4_300_992, 4_300_992, 0.8, 860_199, None, None),
    "mptify:conv4": (2_425_024, 2_425_024, 0.8, 485_005, None, None),
    "mptify:conv6": (2_261_184, 2_261_184, 0.8, 452_237, None, None),
    "mptify:conv8": (5_275_840, 5_275_840, 0.8, 1_055_169, None, None),
    "mptify:vgg_small": (4_660_096, 4_656_512, 0.95, 232_826, "4.6", "0.23"),
    "mptify:vgg_small_x1.25": (7_253_600, 7_249_120, 0.75, 1_812_280, None, "1.44"),
    "mptify:resnet18_cifar": (11_173_962, 11_164_352, 0.8, 2_232_871, "11.2", "2.2"),
    "mptify:resnet20_cifar": (269_722, 268_336, 0.8, 53_668, "0.27", None),
    "mptify:resnet56_cifar": (853_018, 848_944, 0.8, 169_792, "0.85", None),
    "mptify:wide_resnet34_2": (48_296_616, 48_270_528, 0.6, 19_308_213, None, "19.3"),
    "torchvision:wide_resnet50_2": (68_883_240, 68_814_016, 0.8, 13_762_804, None, "13.7"),
    "torchvision:resnet34": (21_797_672, 21_779_648, None, None, "21.8", None),
}


def agrees(count, printed):
    """Whether the paper's figure, in millions, is this count: rounded, or cut off as 4.66 M is to 4.6 M."""
    digits = len(printed.partition(".")[2])
    return printed in (
        f"{count / 1e6:.{digits}f}",
        f"{math.floor(count / 1e6 * 10**digits) / 10**digits:.{digits}f}",
    )


@pytest.mark.parametrize("name", COUNTS)
def test_a_network_has_and_keeps_as_many_weights_as_the_paper_says(name):
    parameters, weights, prune, kept, printed, printed_kept = COUNTS[name]
    with torch.device("meta"):
        network = registry.build(registry.resolve(name))
        report = mptify.summary(mptify.transform(network, prune=prune or 0.0))
    assert (sum(parameter.numel() for parameter in network.parameters()), report.weights) == (
        parameters,
        weights,
    )
    assert prune is None or report.kept == kept
    assert printed is None or agrees(parameters, printed)
    if (
        name == "mptify:vgg_small_x1.25"
    ):  # the paper's figure takes weights to grow with the width, not with its square
        assert not agrees(kept, printed_kept)
        assert f"{4.6 * 1.25 * 0.25:.2f}" == printed_kept
    else:
        assert printed_kept is None or agrees(kept, printed_kept)


def test_the_page_of_backbones_has_these_counts():
    rows = {
        line.split("|")[1].strip().strip("`"): line
        for line in DOCS.read_text().splitlines()
        if line.count("|") == 8
    }
    for name, (parameters, weights, prune, kept, *printed) in COUNTS.items():
        cells = [cell.strip().strip("*") for cell in rows[name].split("|")[2:8]]
        counts = [
            f"{parameters:,}",
            f"{weights:,}",
            "" if prune is None else f"{100 * prune:g} %",
            "" if kept is None else f"{kept:,}",
        ]
        assert cells == [*counts, *("" if one is None else f"{one} M" for one in printed)]


@pytest.mark.parametrize("name", ["conv4", "vgg_small", "resnet20_cifar", "wide_resnet34_2"])
def test_weights_start_as_the_paper_says(name):
    """Kaiming normal: a deviation of sqrt(2 / fan-in), for those that are trained densely."""
    for layer in models.build(name).modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            weight = layer.weight.detach()
            chance = 5 / math.sqrt(2 * weight.numel())
            assert float(weight.std()) == pytest.approx(
                math.sqrt(2 / weight[0].numel()), rel=chance
            )


@pytest.mark.parametrize("name", models.BUILDERS)
def test_a_network_is_built_for_other_images_and_classes(name):
    with torch.device("meta"):
        network = models.build(name, num_classes=7, in_chans=1, input_size=48)
        assert network(torch.zeros(2, 1, 48, 48)).shape == (2, 7)
    assert network.num_classes == 7


@pytest.mark.parametrize(("name", "size"), [("conv8", 15), ("vgg_small", 7)])
def test_images_that_are_too_small_are_told_so(name, size):
    with pytest.raises(
        ValueError,
        match=f"images of {size} pixels are too small for {4 if name == 'conv8' else 3} max-pools",
    ):
        models.build(name, input_size=size)


def test_widths_are_part_of_a_name():
    with torch.device("meta"):
        assert models.build("vgg_small_x1.25").features[0].out_channels == 160
        assert models.build("conv4_x0.5").features[0].out_channels == 32
    assert models.is_known("vgg_small_x2")
    assert not any(
        models.is_known(name)
        for name in (
            "vgg_small_x0",
            "vgg_small_x65",
            "vgg_small_xx",
            "resnet20_cifar_x2",
            "vgg_small_",
        )
    )


def test_the_wide_resnet_is_as_wide_as_the_authors():
    with torch.device("meta"):
        assert [stage[0].conv1.out_channels for stage in models.wide_resnet34_2().stages] == [
            64,
            192,
            384,
            768,
        ]


def test_a_padded_shortcut_drops_every_second_pixel_and_adds_channels_of_zeros():
    values = torch.randn(2, 3, 4, 4)
    shortcut = models.resnet.Padded(3, 8)(values)
    assert torch.equal(shortcut[:, 2:5], values[:, :, ::2, ::2])
    assert not shortcut[:, [0, 1, 5, 6, 7]].any()


@pytest.mark.parametrize("name", ["vgg_small_x0.25", "resnet20_cifar"])
def test_surgery_makes_the_binary_versions(name):
    row = zoo_check.check_model(registry.Entry("mptify", name))
    assert zoo_rows.passed(row), row
    assert all(mode["left"] == [] and mode["parts"] == 1 for mode in row["modes"].values())


def test_vgg_small_needs_no_norms_of_surgery():
    """conv, max-pool, norm is the order that a sign needs."""
    ticketed = mptify.transform(models.vgg_small(width=0.25), bits="1/1")
    assert sum(isinstance(module, nn.BatchNorm2d) for module in ticketed.modules()) == 6
    assert sum(isinstance(module, mptify.Sign) for module in ticketed.modules()) == 6


# -- in timm's registry ------------------------------------------------------------------------------------------------------


def test_one_import_adds_the_networks_to_timm_and_none_does_otherwise():
    known = "timm.is_model('mptify_conv4')"
    code = f"import mptify, timm; before = {known}; import mptify.models.in_timm; print(before, {known})"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert result.stdout == "False True\n", result.stderr


def test_timm_builds_what_mptify_builds():
    import timm

    network = timm.create_model(
        "mptify_vgg_small", width=0.25, num_classes=7, in_chans=1, img_size=16, drop_rate=0.0
    )
    assert network(torch.zeros(2, 1, 16, 16)).shape == (2, 7)
    for name, builder in models.BUILDERS.items():
        with torch.device("meta"):
            network = timm.create_model(f"mptify_{name}", pretrained=False)
            assert [tuple(value.shape) for value in network.parameters()] == [
                tuple(value.shape) for value in builder().parameters()
            ]
        assert (
            network.num_classes
            == network.pretrained_cfg["num_classes"]
            == (1000 if name == "wide_resnet34_2" else 10)
        )
        assert network.pretrained_cfg["input_size"] == (
            (3, 224, 224) if name == "wide_resnet34_2" else (3, 32, 32)
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pretrained": True}, "mptify_conv2: there are no pretrained weights of this network"),
        (
            {"drop_rate": 0.5},
            "mptify_conv2: has no setting 'drop_rate'; there are width, num_classes, in_chans, input_size",
        ),
        ({"features_only": True}, "gives logits only"),
        ({"num_classes": 0}, "num_classes=0: at least 1 is needed"),
    ],
)
def test_what_timm_cannot_have_is_said(settings, words):
    import timm

    with pytest.raises(BadConfig, match=words):
        timm.create_model("mptify_conv2", **settings)


def test_the_zoo_does_not_count_them_twice():
    import timm

    assert "mptify_conv4" in timm.list_models()
    assert not [entry for entry in registry.all_entries() if "mptify" in str(entry)]


def test_timms_names_for_them_lead_to_the_same_networks():
    for name in ("mptify:conv4", "conv4", "mptify_conv4", "timm:mptify_conv4"):
        assert registry.resolve(name) == registry.Entry("mptify", "conv4")
    with pytest.raises(UnknownModel, match="There is no model 'timm:mptify_conv5'"):
        registry.resolve("timm:mptify_conv5")
