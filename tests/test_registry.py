"""Variants from outside the package, used by name from end to end."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mptify
from mptify.errors import BadConfig
from mptify.models import conv2
from mptify.nn import init
from mptify.registry import Registry, import_plugin, init_schemes
from mptify.runtime.kernel import Candidate, TorchKernel
from mptify.runtime.kernels.bitsliced_conv import BitslicedConv
from mptify.runtime.kernels.popcount_conv import PopcountConv
from mptify.runtime.library import library
from mptify.runtime.serialize import serialize
from mptify.surgery.invariants import real_inputs
from tests.helpers import plugin
from tests.helpers.cli import run, works

SMALL = {"in_chans": 1, "input_size": 8}


def test_an_unknown_name_lists_the_known_ones():
    words = r"There is no init scheme 'kaiming_norml'; there are .*signed_constant.* Did you mean 'kaiming_normal'\?"
    with pytest.raises(BadConfig, match=words):
        init_schemes["kaiming_norml"]


def test_a_name_is_given_once():
    registry = Registry("toy", "tests.helpers.plugin")
    registry.register("one")(conv2)
    registry.register("one")(conv2)  # as when a module is reloaded
    with pytest.raises(
        BadConfig, match=r"The toy 'one' is registered already, by mptify.models.conv.conv2"
    ):
        registry.register("one")(works)


def test_a_plugin_that_cannot_be_imported_is_an_error_of_one_sentence():
    with pytest.raises(BadConfig, match="The plugin 'no_such_module' can't be imported"):
        import_plugin("no_such_module")
    result = run("--plugin", "no_such_module", "recipes")
    assert result.exit_code != 0
    assert "no_such_module" in str(result.exception)


def test_an_installed_package_is_found_by_its_entry_point(tmp_path):
    """In a process of its own: nobody imports the package, and its scheme is known by name."""
    (tmp_path / "outside.py").write_text(Path(plugin.__file__).read_text())
    (tmp_path / "outside-1.0.dist-info").mkdir()
    (tmp_path / "outside-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n"
    )
    (tmp_path / "outside-1.0.dist-info/entry_points.txt").write_text(
        "[mptify.plugins]\nanything = outside\n"
    )
    command = [sys.executable, "-m", "mptify", "convert", "mptify:conv2", "--init", "toy_uniform"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert found.returncode == 0, found.stderr
    (tmp_path / "outside.py").write_text("import no_such_module")
    found = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert found.returncode == 1
    assert (
        "The plugin 'outside' can't be imported (No module named 'no_such_module')." in found.stderr
    )


# -- init schemes ------------------------------------------------------------------------------------------------------


def test_an_init_scheme_from_outside_survives_a_search_and_a_file(tmp_path):
    images, labels = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8), torch.arange(40) % 10
    config = {
        "epochs": 1,
        "batch": 20,
        "warmup": 0,
        "ticket": {"init": "toy_uniform", "bits": "1/32"},
    }
    result = mptify.search(conv2(**SMALL), (images, labels), (images, labels), config)
    for layer in mptify.ticket_layers(result.model).values():
        magnitudes = layer.frozen.detach().abs() / layer.init_std
        assert 0.5 <= float(magnitudes.min()) < 0.6
        assert 1.4 < float(magnitudes.max()) <= 1.5
    mptify.save(result.model, tmp_path / "a.ticket")
    loaded = mptify.load(tmp_path / "a.ticket", model=conv2(**SMALL))
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(loaded(x), result.model.eval()(x))


def test_the_command_line_imports_plugins(tmp_path):
    """In a process of its own, which has not imported the plugin before."""
    command = [
        sys.executable,
        "-m",
        "mptify",
        "--plugin",
        plugin.__name__,
        "convert",
        "mptify:conv2",
        "--init",
        "toy_uniform",
        "--json",
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout)["layers"]
    works(
        "--plugin",
        plugin.__name__,
        "convert",
        "mptify:conv2",
        "--init",
        "toy_uniform",
        "--out",
        tmp_path / "a.ticket",
    )
    assert mptify.read(tmp_path / "a.ticket").config.init == "toy_uniform"


@pytest.mark.parametrize(
    "values",
    [
        lambda draw: np.ones(3),
        lambda draw: -np.ones(draw.count),
        lambda draw: np.full(draw.count, np.nan),
    ],
)
def test_a_scheme_that_draws_no_magnitudes_is_refused(values, monkeypatch):
    monkeypatch.setitem(init_schemes._variants, "broken", values)
    with pytest.raises(
        BadConfig, match="the init scheme 'broken' must return 12 non-negative magnitudes"
    ):
        init.frozen_weight(0, "layer", (3, 4), "broken", 1.0)


# -- data sources and export targets -----------------------------------------------------------------------------------


def test_a_data_source_from_outside_is_searched_on_and_an_export_target_writes_the_ticket(tmp_path):
    """On the command line, by name."""
    options = [
        "--set",
        "data=toy_stripes:60",
        "--set",
        "model=mptify:conv2_x0.25",
        "--set",
        "epochs=2",
        "--set",
        "batch=20",
    ]
    outside = ("--plugin", plugin.__name__)
    works(
        *outside,
        "search",
        *options,
        "--set",
        "warmup=0",
        "--no-baseline",
        "--out",
        tmp_path / "run",
    )
    ticket = tmp_path / "run" / "last.ticket"
    assert mptify.read(ticket).notes["data"] == "toy_stripes:60"
    works(*outside, "eval", ticket, "--data", "toy_stripes:20")
    works(*outside, "export", ticket, "--to", "toy_state")
    state = torch.load(ticket.with_suffix(".toy"))
    assert torch.equal(
        state["features.0.fixed_weight"],
        mptify.load(ticket).state_dict()["features.0.fixed_weight"],
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ["search", "--set", "data=digts"],
            r"There is no data source 'digts'; there are .*cifar10.* Did you mean 'digits'\?",
        ),
        (
            ["export", "a.ticket", "--to", "onx"],
            r"There is no export target 'onx'; there are .*dense.* Did you mean 'onnx'\?",
        ),
    ],
)
def test_unknown_sources_and_targets_are_told_with_the_known_ones(command, words):
    result = run(*command)
    assert isinstance(result.exception, BadConfig)
    assert re.search(words, str(result.exception))


# -- pruning scopes ----------------------------------------------------------------------------------------------------


def test_a_scope_from_outside_decides_what_survives(tmp_path):
    """In Python, in a file, and on the command line."""
    ticketed = mptify.transform("mptify:conv2", scope="toy_first", prune=0.9, floor=0.05)
    layers = list(mptify.ticket_layers(ticketed).values())
    assert layers[-1].kept == 128
    assert [layer.mask.all().item() for layer in layers[:2]] == [True, True]
    assert sum(layer.kept for layer in layers) == 430_099
    mptify.save(ticketed, tmp_path / "a.ticket")
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(mptify.load(tmp_path / "a.ticket")(x), ticketed.eval()(x))
    options = (
        "convert",
        "mptify:conv2",
        "--scope",
        "toy_first",
        "--prune",
        "0.9",
        "--floor",
        "0.05",
    )
    works("--plugin", plugin.__name__, *options, "--out", tmp_path / "b.ticket")
    assert mptify.read(tmp_path / "b.ticket").digest == mptify.read(tmp_path / "a.ticket").digest
    with pytest.raises(
        BadConfig, match=r"There is no pruning scope 'gobal'; .* Did you mean 'global'"
    ):
        mptify.transform("mptify:conv2", scope="gobal")


def test_a_scope_that_leaves_a_layer_empty_is_refused(monkeypatch):
    monkeypatch.setattr(
        plugin.ToyFirst, "select", lambda self, scores, kept: [values > 1e9 for values in scores]
    )
    with pytest.raises(
        mptify.MptifyError,
        match=r"features.0: ToyFirst.select must return a boolean mask .* at least one survivor",
    ):
        mptify.transform("mptify:conv2", scope="toy_first")(torch.randn(1, 3, 32, 32))


# -- quantizers ------------------------------------------------------------------------------------


def test_a_quantizer_from_outside_estimates_the_gradient(tmp_path):
    """In Python, through a search, in a file, packed, and on the command line."""
    ticketed = mptify.transform("mptify:conv2", bits="1/1", quantizer="toy_flat", sign_width=0.5)
    signs = [module for module in ticketed.modules() if isinstance(module, mptify.Sign)]
    x = torch.linspace(-1, 1, 9, requires_grad=True)
    signs[0](x).sum().backward()
    assert x.grad.tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert {sign.quantizer for sign in signs} == {"toy_flat"}
    mptify.save(ticketed, tmp_path / "a.ticket")
    images = torch.randn(2, 3, 32, 32)
    expected = ticketed.eval()(images)
    assert torch.equal(mptify.load(tmp_path / "a.ticket")(images), expected)
    assert torch.equal(mptify.pack(ticketed, images)(images), expected)
    assert torch.equal(pickle.loads(pickle.dumps(ticketed))(images), expected)
    options = ("--bits", "1/1", "--quantizer", "toy_flat", "--sign-width", "0.5")
    outside = ("--plugin", plugin.__name__)
    works(*outside, "convert", "mptify:conv2", *options, "--out", tmp_path / "b.ticket")
    assert mptify.read(tmp_path / "b.ticket").digest == mptify.read(tmp_path / "a.ticket").digest
    small = ["--set", "model=mptify:conv2_x0.25", "--set", "epochs=1", "--set", "warmup=0"]
    small += ["--set", "ticket.bits=1/1", "--set", "ticket.bn=keep"]
    small += ["--set", "ticket.quantizer=toy_flat"]
    works(*outside, "search", *small, "--no-baseline", "--out", tmp_path / "run")
    assert mptify.read(tmp_path / "run" / "last.ticket").config.quantizer == "toy_flat"


def test_a_quantizer_that_is_not_one_bit_is_refused():
    words = r"quantizer='toy_zero': with 1-bit activations it must return -1 for negative inputs"
    with pytest.raises(BadConfig, match=words):
        mptify.transform("mptify:conv2", bits="1/1", quantizer="toy_zero")
    with pytest.raises(BadConfig, match=r"There is no quantizer 'sing'; .* Did you mean 'sign'"):
        mptify.transform("mptify:conv2", bits="1/1", quantizer="sing")


# -- search methods --------------------------------------------------------------------------------


class StopInThirdEpoch(mptify.Callback):
    def on_step_end(self, search, metrics):
        if (search.epoch, search.step) == (2, 1):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_method_from_outside_runs_and_resumes(tmp_path):
    """On the command line, and in Python: stopped and resumed, it ends in the same bytes."""
    small = ["--set", "model=mptify:conv2_x0.25", "--set", "epochs=2", "--set", "warmup=0"]
    small += ["--set", "method=toy_shrink", "--set", "data.train_images=200"]
    works("--plugin", plugin.__name__, "search", *small, "--no-baseline", "--out", tmp_path / "cli")
    rows = (tmp_path / "cli/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row).get("halved") for row in rows] == [None, 1]

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8, generator=generator)
    data = (images, torch.arange(60) % 10)

    def search(name, method="toy_shrink", **options):
        config = {"epochs": 4, "batch": 20, "warmup": 0, "method": method}
        return mptify.search(conv2(**SMALL), data, data, config, out=tmp_path / name, **options)

    whole = search("whole")
    assert [row.get("halved") for row in whole.rows] == [None, 1, None, 2]
    assert whole.rows[-1]["masks"] != search("biprop", "biprop").rows[-1]["masks"]
    assert not search("parts", callbacks=[StopInThirdEpoch()]).finished
    search("parts", resume=True)
    parts, expected = (tmp_path / run / "last.ticket" for run in ("parts", "whole"))
    assert parts.read_bytes() == expected.read_bytes()


def test_an_unknown_method_is_an_error_that_lists_the_known_ones():
    words = r"There is no search method 'biprob'; .* Did you mean 'biprop'"
    with pytest.raises(BadConfig, match=words):
        mptify.search(conv2(**SMALL), None, None, {"method": "biprob"})


# -- layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_layers_from_outside_are_converted(bits, tmp_path):
    """A layer with one weight and a module with two: in Python, packed, in a search and a file."""
    plan = mptify.plan("timm:toy_net", bits=bits)
    assert {layer.name for layer in plan.layers} == {"stem", "pair.left", "pair.right", "head"}
    assert not plan.left_dense
    ticketed = mptify.transform("timm:toy_net", bits=bits, prune=0.5)
    images = torch.randn(4, 3, 32, 32)
    ran, real = real_inputs(ticketed, lambda: ticketed(images))
    assert ran == {"stem", "pair.left", "pair.right", "head"}
    assert bits == "1/32" or real == {"stem"}
    ticketed(images).sum().backward()
    assert all(layer.scores.grad is not None for layer in mptify.ticket_layers(ticketed).values())
    mptify.save(ticketed, tmp_path / "a.ticket")
    expected = ticketed.eval()(images)
    assert torch.equal(mptify.load(tmp_path / "a.ticket")(images), expected)
    if bits == "1/1":
        assert torch.allclose(mptify.pack(ticketed, images)(images), expected, atol=1e-5)
    outside = ("--plugin", plugin.__name__)
    options = ("--bits", bits, "--prune", "0.5", "--out", tmp_path / "b.ticket")
    works(*outside, "convert", "timm:toy_net", *options)
    fresh = mptify.transform("timm:toy_net", bits=bits, prune=0.5)
    ticket = mptify.save(fresh, tmp_path / "c.ticket")
    assert mptify.read(tmp_path / "b.ticket").digest == ticket.digest
    works(*outside, "export", tmp_path / "b.ticket", "--to", "dense" if bits == "1/32" else "onnx")


def test_a_composite_is_converted_whole_or_not_at_all():
    plan = mptify.plan("timm:toy_net", exclude="pair.left")
    assert {layer.name for layer in plan.layers} == {"stem", "head"}
    assert {left.name: left.reason for left in plan.left_dense} == {
        "pair.left": "asked: excluded (its module is converted whole)",
        "pair.right": "asked: excluded (its module is converted whole)",
    }


# -- runtime kernels ---------------------------------------------------------------------------------------------------

packs = pytest.mark.skipif(library is None, reason="this machine has no C++ compiler")
TWO_CHANNELS = "mptify:conv2_x0.03"  # whose second convolution reads two channels of signs


def two_channel_ticket():
    torch.manual_seed(0)
    ticketed = mptify.transform(TWO_CHANNELS, bits="1/1", prune=0.4).train()
    x = torch.randint(-24, 25, (4, 3, 32, 32)) / 8
    with torch.no_grad():
        ticketed(x)
    return ticketed.eval(), x


@packs
def test_a_kernel_from_outside_is_packed_exported_and_loaded(tmp_path):
    ticketed, x = two_channel_ticket()
    program = mptify.pack(ticketed, x)
    assert sum(isinstance(module, plugin.ToyConv) for module in program.modules()) == 1
    path = tmp_path / "a.ticket"
    mptify.save(ticketed, path, TWO_CHANNELS)
    works("--plugin", plugin.__name__, "export", path, "--to", "packed")
    loaded = mptify.load(path.with_suffix(".packed"))
    assert sum(isinstance(module, plugin.ToyConv) for module in loaded.modules()) == 1
    with torch.no_grad():
        for run_it in (program, loaded):
            assert torch.equal(run_it(x), ticketed(x))


@packs
def test_a_packed_file_asks_for_the_package_of_its_kernel(tmp_path):
    """In a process of its own, which does not import the plugin."""
    ticketed, _ = two_channel_ticket()
    path = tmp_path / "a.ticket"
    mptify.save(ticketed, path, TWO_CHANNELS)
    works("--plugin", plugin.__name__, "export", path, "--to", "packed")
    command = [
        sys.executable,
        "-c",
        "import mptify, sys; mptify.load(sys.argv[1])",
        str(path.with_suffix(".packed")),
    ]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 1
    assert "There is no runtime kernel 'toy_conv'; there are bitsliced_conv" in found.stderr
    assert "mptify --plugin PACKAGE" in found.stderr


@packs
def test_the_cheapest_kernel_is_used(monkeypatch):
    ticketed, x = two_channel_ticket()
    expensive = classmethod(lambda cls, pattern: Candidate(1e12, lambda: cls(pattern)))
    monkeypatch.setattr(plugin.ToyConv, "candidate", expensive)
    program = mptify.pack(ticketed, x)
    assert not any(isinstance(module, plugin.ToyConv) for module in program.modules())
    assert any(isinstance(module, (BitslicedConv, PopcountConv)) for module in program.modules())


def test_a_kernel_that_nobody_registered_is_not_stored():
    class Unknown(TorchKernel):
        pass

    with pytest.raises(
        mptify.MptifyError, match=r"Unknown is not a registered kernel.*mptify\.registry\.kernels"
    ):
        serialize(Unknown())
