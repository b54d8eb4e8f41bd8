"""Tickets for other programs give the same outputs there."""

import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import mptify
from mptify.cli import app
from mptify.errors import MptifyError
from mptify.export import export, target
from mptify.models import conv2, registry
from mptify.runtime import packed_layers
from mptify.runtime.library import library
from tests.nets import Plain

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)

QUICK = ["mptify:conv2", "timm:test_vit", "timm:test_efficientnet"]
SWEEP = [
    "torchvision:resnet18", "torchvision:vgg11_bn", "torchvision:mobilenet_v2", "torchvision:squeezenet1_1",
    "torchvision:shufflenet_v2_x0_5", "torchvision:densenet121", "torchvision:mnasnet0_5", "torchvision:efficientnet_b0",
    "torchvision:regnet_y_400mf", "torchvision:convnext_tiny", "timm:test_convnext", "timm:test_resnet",
    "timm:test_byobnet", "timm:test_mambaout", "timm:resnet26d", "timm:mixer_s32_224",
    "timm:deit_tiny_patch16_224", "timm:repvgg_a0",
]  # fmt: skip
# Not ghostnet in 1/1: sums of its gates cancel to 0, or nearly, as the order of additions will have it, and a sign is taken of them.


def ticket_file(name, bits, path, **settings):
    """Of a named network whose norms have seen images."""
    entry = registry.resolve(name)
    network = registry.build(entry, num_classes=7)
    ticketed = mptify.transform(network, bits=bits, prune=0.75, **settings).train()
    with torch.no_grad():
        ticketed(*registry.example_inputs(entry, network))
    mptify.save(ticketed.eval(), path, name, arguments={"num_classes": 7})
    return path


# Levels only of a network whose sums are exact: elsewhere a sum between two levels becomes one or the other, as the order
# of additions will have it.
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *((QUICK[0], bits) for bits in ("1/32", "1/8", "1/4", "1/2", "1/1")),
        *(
            pytest.param(name, bits, marks=mark)
            for names, mark in ((QUICK[1:], pytest.mark.long), (SWEEP, pytest.mark.sweep))
            for name in names
            for bits in ("1/32", "1/1")
        ),
    ],
)
def test_onnxruntime_computes_what_the_ticket_does(name, bits, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    file = ticket_file(name, bits, tmp_path / "a.ticket")
    made = export(file, "onnx", tmp_path / "a.onnx")
    assert made.size == made.path.stat().st_size
    session = onnxruntime.InferenceSession(str(made.path), providers=["CPUExecutionProvider"])
    given = session.get_inputs()[0]
    images = (
        torch.randint(-24, 25, (5, *given.shape[1:]), generator=torch.Generator().manual_seed(1))
        / 8
    )  # sums are exact
    with torch.no_grad():
        expected = mptify.load(file)(images)
    found = torch.from_numpy(session.run(None, {given.name: images.numpy()})[0])
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:test_vit"])
def test_a_dense_network_loads_it_without_mptify(name, tmp_path):
    file = ticket_file(name, "1/32", tmp_path / "a.ticket")
    assert export(file, "dense", tmp_path / "a.safetensors").difference <= 1e-5
    source, _, model = name.partition(":")
    make = (
        f"timm.create_model({model!r}, num_classes=7)"
        if source == "timm"
        else f"torchvision.models.get_model({model!r}, num_classes=7)"
    )
    x = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        torch.save((x, mptify.load(file)(x)), tmp_path / "expected.pt")
    script = (
        f"import sys, torch, {source}, safetensors.torch; torch.set_num_threads(1); model = {make}.eval();"
        "model.load_state_dict(safetensors.torch.load_file(sys.argv[1])); x, y = torch.load(sys.argv[2]);"
        "torch.testing.assert_close(model(x), y); assert not any('mptify' in name for name in sys.modules); print('same')"
    )
    command = [
        sys.executable,
        "-c",
        script,
        str(tmp_path / "a.safetensors"),
        str(tmp_path / "expected.pt"),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "same\n", result.stderr


def test_what_can_not_be_exported_is_told_and_nothing_is_written(tmp_path, monkeypatch):
    out = tmp_path / "out"
    signs = ticket_file("mptify:conv2", "1/1", tmp_path / "a.ticket")
    with pytest.raises(MptifyError, match="has signs where its dense network has activations"):
        export(signs, "dense", out)
    with pytest.raises(
        MptifyError, match=r"There is no export target 'foo'; there are dense, .*onnx, packed"
    ):
        export(signs, "foo", out)
    norms = ticket_file("mptify:conv2", "1/32", tmp_path / "b.ticket", bn="insert")
    with pytest.raises(MptifyError, match="a norm that the dense one lacks"):
        export(norms, "dense", out)
    mptify.save(mptify.transform(Plain(), bits="1/32"), tmp_path / "c.ticket")
    with pytest.raises(MptifyError, match="only named networks can be exported"):
        export(tmp_path / "c.ticket", "dense", out)
    plain = ticket_file("mptify:conv2", "1/32", tmp_path / "d.ticket")
    monkeypatch.setattr(target, "_difference", lambda *given: float("nan"))
    with pytest.raises(MptifyError, match="outputs differ from the ticket"):
        export(plain, "dense", out)
    assert not out.exists()


def test_the_command_says_what_8_bit_inputs_cost(tmp_path):
    pytest.importorskip("sklearn")
    if library is None:
        pytest.skip("this machine has no C++ compiler")
    network = conv2(in_chans=1, input_size=8)
    ticketed = mptify.transform(network, bits="1/32", prune=0.75).eval()
    notes = {
        "recipe": {"data": {"source": "digits"}},
        "labels": [str(digit) for digit in range(10)],
    }
    notes["input"] = {"shape": [1, 8, 8], "mean": [0.3], "std": [0.4]}
    built = {"arguments": {"in_chans": 1, "input_size": 8}, "notes": notes}
    mptify.save(ticketed, tmp_path / "a.ticket", "mptify:conv2", **built)
    command = ["export", str(tmp_path / "a.ticket"), "--to", "packed", "--activation-bits", "8"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    cost, wrote = result.output.splitlines()
    assert re.match(
        r"359 calibration images: top-1 [\d.]+ % with 8-bit inputs, [\d.]+ % with 32-bit inputs; "
        r"the same class for [\d.]+ % of the images; outputs differ by at most [\d.e-]+ of the",
        cost,
    )
    assert "outputs differ from the ticket's with 8-bit inputs by 0.0e+00" in wrote
    program = mptify.load(tmp_path / "a.packed")
    assert {kernel.dtype for kernel in packed_layers(program) if hasattr(kernel, "dtype")} == {
        "int8",
        "uint8",
    }
    few = [*command, "--data", "digits", "--set", "val_images=20"]
    assert CliRunner().invoke(app, few).output.startswith("20 calibration images: ")


def test_the_command_says_what_it_wrote(tmp_path):
    file = ticket_file("mptify:conv2", "1/32", tmp_path / "a.ticket")
    result = CliRunner().invoke(app, ["export", str(file), "--to", "dense"])
    assert result.exit_code == 0, result.output
    assert "a.safetensors: 17." in result.output.replace("\n", "")
