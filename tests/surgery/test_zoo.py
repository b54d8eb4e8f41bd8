"""The invariants of the design on one model per timm module and per torchvision family."""

import copy
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mptify
from mptify.models.registry import training_loss
from mptify.nn.layers import Ticketed
from mptify.surgery.graphs import TicketGraph
from mptify.surgery.invariants import (
    bad_gradients,
    lost_layers,
    real_inputs,
    unnormalised_quantizers,
    wrongly_trainable,
)
from mptify.surgery.plans import Reason
from mptify.surgery.trace import trace
from tests.helpers.outputs import agree, seeded
from tests.representatives import ENTRIES, SOME_QUICK, build

MODES = {"1/32": 0.8, "1/1": 0.75}
_LARGE = 5_000_000  # weights
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


# csatv2 normalises over a single channel, so parts of it get no gradient in the dense network either: tests/test_coverage.py


def still(model):
    """Switch off what drops whole blocks at random, and their gradients with them."""
    for module in model.modules():
        if type(module).__name__ in ("DropPath", "StochasticDepth"):
            module.eval()
    return model


def nearly_all(plan):
    """Converted: all but what LSTMs hold, and tables of code that can't be traced."""
    listed = sum(
        one.count
        for one in plan.left_dense
        if one.obstacle.reason in (Reason.RECURRENT, Reason.UNTRACED_USE)
    )
    return plan.converted + listed >= 0.999 * plan.total


@pytest.mark.parametrize("entry", SOME_QUICK)
def test_signs_gradients_and_copies(entry, process_group, tmp_path):
    """I1, I2, I4, I5, what of I6 needs no compiler, and of all but the largest the way into a file and back. The training step is a
    data-parallel one."""
    model, inputs = build(entry)
    for bits, prune in MODES.items():
        ticketed = mptify.transform(model, bits=bits, prune=prune)
        plan = ticketed.ticket_plan
        assert nearly_all(plan)
        assert lost_layers(ticketed) == []
        assert unnormalised_quantizers(ticketed) == []
        assert wrongly_trainable(ticketed) == []
        still(ticketed.train())
        outputs, parallel = [], torch.nn.parallel.DistributedDataParallel(ticketed, init_sync=False)
        ran, real = real_inputs(
            ticketed, lambda run=parallel, into=outputs: into.append(run(*inputs))
        )
        assert ran == {layer.tied_to or layer.name for layer in plan.layers}
        if bits == "1/1":
            assert real <= {layer.name for layer in plan.layers if layer.input.is_exempt}
        training_loss(outputs.pop()).backward()
        assert {
            name: what
            for name, what in bad_gradients(ticketed).items()
            if (entry.name, what) != ("csatv2", "zero")
        } == {}
        ticketed.zero_grad(set_to_none=True)
        with torch.no_grad():
            expected = seeded(ticketed.eval(), inputs)
            if bits == "1/1":
                if plan.total < _LARGE:
                    _check_file(model, ticketed, inputs, expected, tmp_path / "a.ticket")
                _check_copies(model, ticketed, inputs, expected)
            else:  # a sign could tip over where sums are taken in another order
                _check_memory_format(ticketed, inputs, expected)


@pytest.mark.sweep
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_files_of_large_networks(entry, tmp_path):
    """The same way into a file and back, which takes as long as a network is large."""
    model, inputs = build(entry)
    ticketed = mptify.transform(model, bits="1/1", prune=0.75)
    if ticketed.ticket_plan.total >= _LARGE:
        with torch.no_grad():
            seeded(ticketed.train(), inputs)  # for its norms' sake
            _check_file(
                model, ticketed, inputs, seeded(ticketed.eval(), inputs), tmp_path / "a.ticket"
            )


def _check_file(model, ticketed, inputs, expected, path):
    ticket = mptify.save(ticketed, path)
    loaded = mptify.load(path, model=model)
    assert mptify.ticket_of(loaded, architecture=ticket.architecture) == ticket
    agree(seeded(loaded, inputs), expected, 0)


def _check_copies(model, ticketed, inputs, expected):
    agree(seeded(pickle.loads(pickle.dumps(ticketed)), inputs), expected, 0)
    other = copy.deepcopy(ticketed)
    agree(seeded(other, inputs), expected, 0)
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(ticketed.state_dict())
    agree(seeded(other, inputs), expected, 0)
    for attribute in (
        "num_classes",
        "pretrained_cfg",
        "default_cfg",
        "num_features",
        "feature_info",
        "grad_checkpointing",
    ):
        if hasattr(model, attribute):
            assert getattr(ticketed, attribute) == getattr(model, attribute)
    for method in ("no_weight_decay", "group_matcher"):
        if hasattr(model, method):
            ours, theirs = getattr(ticketed, method)(), getattr(model, method)()
            if callable(theirs):
                assert all(ours(name) == theirs(name) for name, _ in ticketed.named_parameters())
            else:
                assert ours == theirs
    if isinstance(getattr(model, "get_classifier", lambda: None)(), torch.nn.Linear):
        assert isinstance(ticketed.get_classifier(), Ticketed)
    with torch.autocast("cpu", torch.bfloat16), _QuickConvolutions():
        assert all(
            torch.isfinite(one).all() for one in seeded(ticketed, inputs) if one.is_floating_point()
        )


class _QuickConvolutions(TorchDispatchMode):
    """Those of bfloat16 computed in float32: a processor without instructions for it takes 30 times as long for them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            func is torch.ops.aten.convolution.default
            and args[0].dtype == args[1].dtype == torch.bfloat16
        ):
            wide = [one.float() if isinstance(one, torch.Tensor) else one for one in args]
            return func(*wide, **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


def _check_memory_format(ticketed, inputs, expected):
    dims = {parameter.dim() for parameter in ticketed.parameters()} & {4, 5}
    if len(dims) != 1:
        return  # nothing to turn, or what torch refuses to: `Module.to` takes one format for all
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}[dims.pop()]
    masks = {name: layer.mask.clone() for name, layer in mptify.ticket_layers(ticketed).items()}
    ticketed.to(memory_format=channels_last)
    turned = tuple(
        x.to(memory_format=channels_last) if isinstance(x, torch.Tensor) else x for x in inputs
    )
    agree(seeded(ticketed, turned), expected, 1e-3)
    assert all(
        torch.equal(layer.mask, masks[name])
        for name, layer in mptify.ticket_layers(ticketed).items()
    )


@pytest.mark.parametrize("entry", SOME_QUICK)
def test_the_null_surgery_is_the_identity(entry):
    """I3, with the layers swapped and with every traced region turned into its graph."""
    model, inputs = build(entry)
    null = mptify.transform(model, bits="32/32", prune=0, init="keep", bias="learn")
    graphed = _as_graphs(model)
    for training in (False, True):
        expected = seeded(copy.deepcopy(model).train(training), inputs)
        agree(seeded(null.train(training), inputs), expected)
        agree(seeded(graphed.train(training), inputs), expected)


def _as_graphs(model):
    traced = trace(model)
    whole = copy.deepcopy(traced.model)
    for region in traced.regions:
        if not region.graphs:
            continue
        root = whole.get_submodule(region.path)
        for name, value in vars(region.module).items():
            if "_tensor_constant" in name:
                setattr(root, name, value)
        if hasattr(root, "compute_loss"):
            continue  # its parent asks it for more than `forward`, as detectors' heads are; surgery changes none of their edges
        if any(
            node.meta.get("norm_only") for graph in region.graphs.values() for node in graph.nodes
        ):
            continue  # a norm and its activation traced apart: the rewriter splits the module too
        graph = TicketGraph.of(root, region.graphs)
        if not region.path:
            return graph
        parent, _, name = region.path.rpartition(".")
        whole.get_submodule(parent)._modules[name] = graph
    return whole


@pytest.mark.parametrize("entry", SOME_QUICK)
def test_real_shortcuts(entry):
    model = build(entry, "meta")
    ticketed = mptify.transform(model, bits="1/1", prune=0.75, residual="real")
    assert nearly_all(ticketed.ticket_plan)
    assert unnormalised_quantizers(ticketed) == []
    assert wrongly_trainable(ticketed) == []
