"""Ticket files become packed programs."""

import weakref

import pytest
import torch

import mptify
from mptify.errors import MptifyError
from mptify.export import export
from mptify.models import registry
from mptify.runtime import loading, packed_layers
from mptify.runtime.kernels.input_conv import InputConv
from mptify.runtime.kernels.popcount_conv import PopcountConv
from mptify.runtime.kernels.popcount_linear import PopcountLinear
from mptify.runtime.library import library
from tests.helpers.outputs import exact, flat, require_same
from tests.nets import Plain, images

pytestmark = [
    pytest.mark.skipif(library is None, reason="this machine has no C++ compiler"),
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
]


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:test_vit", "mptify:conv2"])
def test_a_file_becomes_a_program_layer_by_layer(name, tmp_path, monkeypatch):
    entry = registry.resolve(name)
    ticketed = mptify.transform(registry.build(entry, num_classes=7), bits="1/1", prune=0.9).train()
    x = torch.randn(
        4, 3, *{"torchvision": (64, 64), "timm": (160, 160), "mptify": (32, 32)}[entry.source]
    )
    with torch.no_grad():
        ticketed(x)
    mptify.save(ticketed.eval(), tmp_path / "a.ticket", name, arguments={"num_classes": 7})
    fetched, alive = [], []

    def watched(*given):
        alive.append(sum(one() is not None for one in fetched))
        weight = effective(*given)
        fetched.append(weakref.ref(weight))
        return weight

    effective = loading._effective
    monkeypatch.setattr(loading, "_effective", watched)
    program = mptify.load(tmp_path / "a.ticket", runtime="packed")
    assert max(alive) <= 1
    assert not any(one() is not None for one in fetched)
    with torch.no_grad():
        x = exact(x)
        require_same(program(x), mptify.load(tmp_path / "a.ticket")(x), program)
    held = sum(parameter.numel() for parameter in program.parameters())
    left = sum(layer.count for layer in mptify.ticket_layers(program).values())
    assert held < left + 30_000  # of what is packed, nothing
    for layer in packed_layers(program):
        most = (
            2.1 * layer.weight_count
            if isinstance(layer, (PopcountLinear, PopcountConv))
            else 16 * layer.survivor_count
        )
        assert isinstance(layer, InputConv) or 8 * layer.weight_bytes <= most


def test_a_program_is_made_of_a_model_of_ones_own_too(tmp_path):
    ticketed = mptify.transform(Plain(), bits="1/1", prune=0.5).eval()
    mptify.save(ticketed, tmp_path / "a.ticket")
    program = mptify.load(tmp_path / "a.ticket", model=Plain(), runtime="packed", example=images())
    with torch.no_grad():
        x = exact(images())
        require_same(program(x), ticketed(x), program)
    with pytest.raises(MptifyError, match="runtime='fast': there are 'float' and 'packed'"):
        mptify.load(tmp_path / "a.ticket", model=Plain(), runtime="fast")
    with pytest.raises(MptifyError, match="run on CPUs"):
        mptify.load(tmp_path / "a.ticket", model=Plain(), runtime="packed", device="meta")
    with pytest.raises(MptifyError, match=r"mptify\.pack takes a ticket model"):
        mptify.load(tmp_path / "a.ticket", model=ticketed, runtime="packed")


def test_a_detectors_file_becomes_a_program(tmp_path):
    name = "torchvision:ssdlite320_mobilenet_v3_large"
    entry = registry.resolve(name)
    network = registry.build(entry, num_classes=7)
    mptify.save(
        mptify.transform(network, bits="1/1", prune=0.9).eval(),
        tmp_path / "a.ticket",
        name,
        arguments={"num_classes": 7},
    )
    program = mptify.load(tmp_path / "a.ticket", runtime="packed")
    x = [exact(one) for one in registry.example_inputs(entry, network)[0]]
    with torch.no_grad():
        for ours, theirs in zip(
            flat(program(x)), flat(mptify.load(tmp_path / "a.ticket")(x)), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(MptifyError, match="does not take one image at a time"):
        export(tmp_path / "a.ticket", "packed", tmp_path / "a.packed")
