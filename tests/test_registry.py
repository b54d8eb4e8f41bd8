"""Variants from outside the package, used by name from end to end."""

import json
import os
import re
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
    with pytest.raises(BadConfig, match=r"The toy 'one' is registered already, by mptify.models.conv.conv2"):
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
    (tmp_path / "outside-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (tmp_path / "outside-1.0.dist-info/entry_points.txt").write_text("[mptify.plugins]\nanything = outside\n")
    command = [sys.executable, "-m", "mptify", "convert", "mptify:conv2", "--init", "toy_uniform"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert found.returncode == 0, found.stderr
    (tmp_path / "outside.py").write_text("import no_such_module")
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert found.returncode == 1
    assert "The plugin 'outside' can't be imported (No module named 'no_such_module')." in found.stderr


# -- init schemes ------------------------------------------------------------------------------------------------------


def test_an_init_scheme_from_outside_survives_a_search_and_a_file(tmp_path):
    images, labels = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8), torch.arange(40) % 10
    config = {"epochs": 1, "batch": 20, "warmup": 0, "ticket": {"init": "toy_uniform", "bits": "1/32"}}
    result = mptify.search(conv2(**SMALL), (images, labels), (images, labels), config)
    for layer in mptify.ticket_layers(result.model).values():
        magnitudes = layer.frozen.detach().abs() / layer.deviation
        assert 0.5 <= float(magnitudes.min()) < 0.6
        assert 1.4 < float(magnitudes.max()) <= 1.5
    mptify.save(result.model, tmp_path / "a.ticket")
    loaded = mptify.load(tmp_path / "a.ticket", model=conv2(**SMALL))
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(loaded(x), result.model.eval()(x))


def test_the_command_line_imports_plugins(tmp_path):
    """In a process of its own, which has not imported the plugin before."""
    command = [sys.executable, "-m", "mptify", "--plugin", plugin.__name__, "convert", "mptify:conv2", "--init", "toy_uniform", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout)["layers"]
    works("--plugin", plugin.__name__, "convert", "mptify:conv2", "--init", "toy_uniform", "--out", tmp_path / "a.ticket")
    assert mptify.read(tmp_path / "a.ticket").config.init == "toy_uniform"


@pytest.mark.parametrize("values", [lambda draw: np.ones(3), lambda draw: -np.ones(draw.count), lambda draw: np.full(draw.count, np.nan)])
def test_a_scheme_that_draws_no_magnitudes_is_refused(values, monkeypatch):
    monkeypatch.setitem(init_schemes._variants, "broken", values)
    with pytest.raises(BadConfig, match="the init scheme 'broken' has to return 12 magnitudes, none of them negative"):
        init.frozen_weight(0, "layer", (3, 4), "broken", 1.0)


# -- data sources and export targets -----------------------------------------------------------------------------------


def test_a_data_source_from_outside_is_searched_on_and_an_export_target_writes_the_ticket(tmp_path):
    """On the command line, by name."""
    options = ["--set", "data=toy_stripes:60", "--set", "model=mptify:conv2_x0.25", "--set", "epochs=2", "--set", "batch=20"]
    outside = ("--plugin", plugin.__name__)
    works(*outside, "search", *options, "--set", "warmup=0", "--no-baseline", "--out", tmp_path / "run")
    ticket = tmp_path / "run" / "last.ticket"
    assert mptify.read(ticket).notes["data"] == "toy_stripes:60"
    works(*outside, "eval", ticket, "--data", "toy_stripes:20")
    works(*outside, "export", ticket, "--to", "toy_state")
    state = torch.load(ticket.with_suffix(".toy"))
    assert torch.equal(state["features.0.frozen"], mptify.load(ticket).state_dict()["features.0.frozen"])


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["search", "--set", "data=digts"], r"There is no data source 'digts'; there are .*cifar10.* Did you mean 'digits'\?"),
        (["export", "a.ticket", "--to", "onx"], r"There is no export target 'onx'; there are .*dense.* Did you mean 'onnx'\?"),
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
    options = ("convert", "mptify:conv2", "--scope", "toy_first", "--prune", "0.9", "--floor", "0.05")
    works("--plugin", plugin.__name__, *options, "--out", tmp_path / "b.ticket")
    assert mptify.read(tmp_path / "b.ticket").digest == mptify.read(tmp_path / "a.ticket").digest
    with pytest.raises(BadConfig, match=r"There is no pruning scope 'gobal'; .* Did you mean 'global'"):
        mptify.transform("mptify:conv2", scope="gobal")


def test_a_scope_that_leaves_a_layer_empty_is_refused(monkeypatch):
    monkeypatch.setattr(plugin.ToyFirst, "select", lambda self, scores, kept: [values > 1e9 for values in scores])
    with pytest.raises(mptify.MptifyError, match=r"features.0: ToyFirst.select has to return a boolean mask .* at least one survivor"):
        mptify.transform("mptify:conv2", scope="toy_first")(torch.randn(1, 3, 32, 32))


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
    command = [sys.executable, "-c", "import mptify, sys; mptify.load(sys.argv[1])", str(path.with_suffix(".packed"))]
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

    with pytest.raises(mptify.MptifyError, match=r"Unknown is not a registered kernel.*mptify\.registry\.kernels"):
        serialize(Unknown())
