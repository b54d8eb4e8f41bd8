"""The commands that measure packed programs; what they measure is nothing for a test."""

import json

import pytest
import torch
from typer.testing import CliRunner

import mptify
from mptify.cli import app
from mptify.models import conv2
from mptify.runtime.library import library

pytestmark = pytest.mark.skipif(library is None, reason="this machine has no C++ compiler")
QUICK = ["--rounds", "1", "--json"]


def measured(*arguments):
    result = CliRunner().invoke(app, ["bench", *arguments, *QUICK])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments):
    return str(CliRunner().invoke(app, ["bench", *arguments, *QUICK]).exception)


@pytest.fixture
def one_image(monkeypatch):
    """Without onnxruntime, whose export takes longer than all else."""
    monkeypatch.setattr("mptify.tools.bench_inference._onnx_session", lambda *given: None)


def test_a_network_is_measured_step_by_step(one_image):
    found = measured("inference", "mptify:conv2", "--prune", "0.9")
    kernels = {node["name"]: node["kernel"] for node in found["nodes"]}
    assert "input_conv" in kernels.values()
    assert "bitsliced_conv" in kernels.values()
    assert found["float_share"] == 0  # from pixels to logits, all of it is packed
    assert min(found[name] for name in ("packed", "eager", "channels_last")) > 0
    assert found["speedup"] is None
    assert found["survivors"] == pytest.approx(0.1 * found["weights"], rel=0.01)


def test_what_torch_still_does_is_counted(one_image):
    found = measured("inference", "timm:test_vit", "--prune", "0.9")
    assert 0 < found["float_share"] < 1


def test_several_threads_are_compared_with_one(one_image):
    found = measured("inference", "mptify:conv2", "--prune", "0.9", "--threads", "2")
    assert found["speedup"] > 0
    assert found["at_once"] > 0
    assert torch.get_num_threads() == 2


def test_batches_are_measured(one_image):
    found = measured("inference", "mptify:conv2", "--bits", "1/4", "--batch", "3")
    assert found["packed"] > 0


def test_a_ticket_file_is_measured_as_its_network_is(one_image, tmp_path):
    mptify.save(
        mptify.transform(conv2(), bits="1/1", prune=0.9), tmp_path / "a.ticket", "mptify:conv2"
    )
    found, other = (
        measured("inference", str(tmp_path / "a.ticket")),
        measured("inference", "mptify:conv2", "--prune", "0.9"),
    )
    assert found["onnxruntime"] is None
    assert [node["kernel"] for node in found["nodes"]] == [
        node["kernel"] for node in other["nodes"]
    ]
    assert (found["weights"], found["survivors"]) == (other["weights"], other["survivors"])


def test_what_has_nothing_to_measure_is_told(tmp_path):
    assert "can't be read" in refused("inference", str(tmp_path / "none.ticket"))
    mptify.save(mptify.transform(conv2(), bits="1/32", prune=0.9), tmp_path / "a.ticket")
    assert "does not name its network" in refused("inference", str(tmp_path / "a.ticket"))


def test_layers_are_measured_beside_torch():
    found = measured("layers", "--prune", "0.98")
    assert [row["channels"] for row in found] == [64, 128, 256, 512]
    assert all(row["ratio"] == row["dense"] / row["packed"] > 0 for row in found)
    assert all(
        row["packed_low"] <= row["packed"] and row["dense_low"] <= row["dense"] for row in found
    )


@pytest.mark.parametrize("bits", ["1/32", "1/4"])
def test_tickets_of_more_bits_are_measured_too(one_image, bits):
    found = measured("inference", "mptify:conv2", "--bits", bits, "--prune", "0.9")
    assert "lanes_conv" in {node["kernel"] for node in found["nodes"]}
    layers = measured("layers", "--bits", bits, "--prune", "0.9")
    assert [layer["channels"] for layer in layers] == [64, 128, 256, 512]
    assert "bits='1/3': should be '1/32'" in refused("layers", "--bits", "1/3")
    assert "should be stages, pointwise, every" in refused("layers", "--which", "all")


def test_pointwise_layers_are_measured_too():
    found = measured("layers", "--which", "pointwise", "--bits", "1/2", "--prune", "0.98")
    assert {row["kernel"] for row in found} == {1}
    assert (found[0]["channels"], found[0]["filters"], found[0]["size"]) == (256, 64, 56)


@pytest.mark.long
@pytest.mark.parametrize("bits", ["1/32", "1/4"])
def test_layers_of_all_kinds_are_measured_and_estimated(bits):
    found = measured("layers", "--which", "every", "--bits", bits, "--prune", "0.8")
    assert {row["stride"] for row in found} == {1, 2, 16}
    assert all(row["packed_estimate"] > 0 and row["dense_estimate"] > 0 for row in found)


def test_time_against_the_prune_rate_is_drawn(tmp_path):
    few = ["--prune", "0.5", "--prune", "0.9", "--bits", "1/1", "--bits", "1/4"]
    found = measured("prune", "mptify:conv2", *few, "--plot", str(tmp_path / "a.png"))
    assert found["prunes"] == [0.5, 0.9]
    assert list(found["packed"]) == ["1/1", "1/4"]
    assert all(ms > 0 for times in found["packed"].values() for ms in [*times, found["dense"]])
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


RESULTS = """run,line,ticket.learn_bn,seed,state,top1
a,1/4,False,0,done,60.0
b,1/4,True,0,done,62.0
c,1/4,True,1,done,64.0
d,1/1,True,0,begun,10.0
e,dense,,0,done,70.0
"""


def test_accuracy_stands_beside_time(tmp_path):
    """Of the runs that fit; those that do not vary along an axis fit any value of it."""
    results, plot = tmp_path / "results.csv", tmp_path / "bits.png"
    results.write_text(RESULTS)
    some = ["mptify:conv2", "--bits", "1/1", "--bits", "1/4", "--accuracies", str(results)]
    learned = ["--where", "ticket.learn_bn=True"]
    found = measured("bits", *some, *learned, "--plot", str(plot))
    assert {row["bits"]: row["top1"] for row in found} == {"dense": 70.0, "1/1": None, "1/4": 63.0}
    assert all(row["speedup"] == found[0]["ms"] / row["ms"] > 0 for row in found)
    assert plot.read_bytes()[1:4] == b"PNG"
    assert "has no axis 'bn'" in refused("bits", *some, "--where", "bn=True")
    assert "should be AXIS=VALUE" in refused("bits", *some, "--where", "bn")
    assert "there is False, True" in refused("bits", *some, "--where", "ticket.learn_bn=maybe")
    assert "pass --accuracies" in refused("bits", "mptify:conv2", "--plot", str(plot))


def test_onnxruntime_runs_the_dense_network():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from mptify.tools.bench_inference import _onnx_session

    network, image = conv2().eval(), torch.randn(1, 3, 32, 32)
    with TemporaryDirectory() as folder:
        session = _onnx_session(network, image, Path(folder) / "dense.onnx")
        (found,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), network(image), rtol=1e-4, atol=1e-5)
