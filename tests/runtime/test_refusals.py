"""What can't be packed or run is refused in one sentence."""

import pytest
import torch
from torch import nn

import mptify
from mptify.errors import MptifyError
from mptify.runtime import compiler
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernels.bitsliced_conv import BitslicedConv
from mptify.runtime.library import library
from tests.helpers.packed import packed_pair
from tests.nets import OneReluManyTimes, Plain, images

pytestmark = [
    pytest.mark.skipif(library is None, reason="this machine has no C++ compiler"),
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
]


def test_what_cannot_be_packed_is_told():
    ticketed = mptify.transform(Plain(), bits="1/1", prune=0.5)
    with pytest.raises(MptifyError, match=r"call model\.eval\(\) first"):
        mptify.pack(ticketed.train(), images())
    with pytest.raises(MptifyError, match="takes a ticket model"):
        mptify.pack(Plain().eval(), images())
    with pytest.raises(MptifyError, match="run on CPUs"):
        mptify.pack(ticketed.eval().to("meta"), images())


def test_without_a_compiler_the_float_path_runs(monkeypatch):
    ticketed = mptify.transform(Plain(), bits="1/1", prune=0.5).eval()
    monkeypatch.setattr(compiler, "library", None)
    with pytest.warns(UserWarning, match="without a C\\+\\+ compiler"):
        assert mptify.pack(ticketed, images()) is ticketed


def test_a_size_that_the_network_can_not_take_is_told():
    from mptify.models import conv2

    ticketed = mptify.transform(conv2(), bits="1/1", prune=0.5).eval()
    with pytest.raises(
        MptifyError, match=r"can't take an input of 1×3×224×224; pass one that it can"
    ):
        mptify.pack(ticketed, torch.zeros(1, 3, 224, 224))


def test_an_example_of_ones_own_network_is_asked_for():
    """Guessing 3×224×224 took 20 GB once."""
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)
    )  # any size would do
    ticketed = mptify.transform(network, bits="1/1", prune=0.5).eval()
    with pytest.raises(MptifyError, match=r"mptify\.pack\(model, example\)"):
        mptify.pack(ticketed)
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(mptify.pack(ticketed, x)(x), ticketed(x))


def test_of_an_unfit_example_our_sentence_is_all_that_is_seen(capfd):
    from mptify.models import conv2

    ticketed = mptify.transform(conv2(), bits="1/1", prune=0.5).eval()
    with pytest.raises(MptifyError, match="can't take") as raised:
        mptify.pack(ticketed, torch.zeros(1, 3, 40, 40))
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    assert "".join(capfd.readouterr()) == ""


def test_a_program_that_was_changed_is_told():
    program, _ = packed_pair(OneReluManyTimes())
    with pytest.raises(MptifyError, match="a: this packed layer was changed"):
        program.half()(images())
    program, _ = packed_pair(OneReluManyTimes())
    with pytest.raises(MptifyError, match="can't be exchanged"):
        program.load_state_dict(program.state_dict())
    layer = BitslicedConv(
        torch.ones(4, 4, 3, 3, dtype=torch.int8), None, Geometry(8, (8, 8), (3, 3))
    )
    assert layer.groups == 2
    layer.validate()
    layer.filters = 0
    with pytest.raises(ValueError, match="its sizes"):
        layer.validate()
    layer.filters = 4
    for weights, told in (
        (0, "its sizes"),
        (72, "channels that their filters do not see"),
        (96, "divide into groups"),
    ):
        layer.weight_count = weights
        with pytest.raises(ValueError, match=told):
            layer.validate()


def test_an_image_elsewhere_is_told():
    program = mptify.pack(mptify.transform(Plain(), bits="1/1", prune=0.5).eval(), images())
    with pytest.raises(MptifyError, match="run on CPUs; this image is on meta"):
        program(images().to("meta"))
