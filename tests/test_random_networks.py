"""What surgery promises, on random networks: 40 of them, or as many as one asks for.

    MPTIFY_RANDOM_NETWORKS=1000 pytest tests/test_random_networks.py
    MPTIFY_RANDOM_NETWORKS=100-140 pytest tests/test_random_networks.py

A test that fails prints its network, step by step.
"""

import copy
import os
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import mptify
from mptify.models import registry
from mptify.nn.quantizers import Sign
from mptify.runtime.library import library
from mptify.surgery.graphs import TicketGraph
from mptify.surgery.invariants import (
    lost_layers,
    real_inputs,
    unnormalised_quantizers,
    wrongly_trainable,
)
from mptify.surgery.plans import Reason
from tests.helpers.outputs import agree, exact, flat, require_same, seeded
from tests.helpers.random_networks import random_network


def _asked_for():
    first, _, last = os.environ.get("MPTIFY_RANDOM_NETWORKS", "40").rpartition("-")
    return range(int(first or 0), int(last))


each_network = pytest.mark.parametrize("seed", _asked_for())
each_mode = pytest.mark.parametrize("bits", ["1/32", "1/1"])


def build(seed):
    network = random_network(seed)
    print(network)  # which pytest shows where a test fails
    inputs = tuple(exact(one) if one.is_floating_point() else one for one in network.inputs)
    return network.model, inputs


def lived_in(model, inputs, bits):
    """A ticket model in `eval()` that is no longer what its seed made it: other scores, other statistics."""
    ticketed = mptify.transform(model, bits=bits, prune=0.5)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        seeded(ticketed.train(), inputs)
        for parameter in ticketed.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return ticketed.eval()


@each_network
def test_the_null_surgery_is_the_identity(seed):
    model, inputs = build(seed)
    null = mptify.transform(model, bits="32/32", prune=0, init="keep", bias="learn")
    for training in (False, True):
        expected = seeded(copy.deepcopy(model).train(training), inputs)
        agree(seeded(null.train(training), inputs), expected)


@each_network
def test_layers_see_signs(seed):
    model, inputs = build(seed)
    ticketed = mptify.transform(model, bits="1/1", prune=0.5)
    plan = ticketed.ticket_plan
    assert lost_layers(ticketed) == []
    assert unnormalised_quantizers(ticketed) == []
    assert wrongly_trainable(ticketed) == []
    assert all(
        left.obstacle.reason is Reason.UNTRACED_USE
        and left.name.rpartition(".")[0] in plan.untraced
        for left in plan.left_dense
    )
    exempt = {layer.name for layer in plan.layers if layer.input.is_exempt}
    executed = set()
    with torch.no_grad():
        for training in (True, False):
            ran, real = real_inputs(
                ticketed, lambda mode=training: seeded(ticketed.train(mode), inputs)
            )
            executed |= ran
            assert real <= exempt
    assert executed == {layer.tied_to or layer.name for layer in plan.layers}


@each_mode
@each_network
def test_what_could_be_trained_can_be_trained(seed, bits):
    model, inputs = build(seed)
    try:
        registry.training_loss(seeded(copy.deepcopy(model).train(), inputs)).backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        pytest.skip("the dense network overwrites what its own gradients need")
    ticketed = mptify.transform(model, bits=bits, prune=0.5).train()
    ran, _ = real_inputs(
        ticketed, lambda: registry.training_loss(seeded(ticketed, inputs)).backward()
    )
    gradients = {
        layer.ticket_name: layer.scores.grad for layer in mptify.ticket_layers(ticketed).values()
    }
    assert {name for name, gradient in gradients.items() if gradient is not None} == ran
    assert all(torch.isfinite(gradients[name]).all() for name in ran)


@pytest.mark.skipif(library is None, reason="this machine has no C++ compiler")
@each_network
def test_a_packed_program_computes_the_same(seed):
    """Layer norms see numbers that lie in memory in another order, and add them up in another."""
    model, inputs = build(seed)
    ticketed = lived_in(model, inputs, "1/1")
    rounded = any(isinstance(module, nn.LayerNorm) for module in model.modules())
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        program = mptify.pack(ticketed, inputs)
        for ours, theirs in zip(flat(program(*inputs)), flat(ticketed(*inputs)), strict=True):
            if rounded:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            else:
                require_same(ours, theirs, program)
    assert [str(one.message) for one in told] in ([], [NOT_PACKED])
    if told:
        assert layers_in_graphs(ticketed) == []


NOT_PACKED = "No part of this network has a graph to pack: it runs as a float32 network."


def layers_in_graphs(ticketed):
    """Those of the kinds that can be packed."""
    graphs = [module for module in ticketed.modules() if isinstance(module, TicketGraph)]
    kinds = (mptify.TicketConv2d, mptify.TicketLinear)
    return [
        name
        for graph in graphs
        for name, layer in mptify.ticket_layers(graph).items()
        if isinstance(layer, kinds)
    ]


@each_mode
@each_network
def test_a_file_holds_all_of_a_ticket(seed, bits, tmp_path):
    model, inputs = build(seed)
    ticketed = lived_in(model, inputs, bits)
    ticket = mptify.save(ticketed, tmp_path / "a.ticket")
    loaded = mptify.load(tmp_path / "a.ticket", model=model)
    assert mptify.ticket_of(loaded) == ticket
    with torch.no_grad():
        agree(seeded(loaded, inputs), seeded(ticketed, inputs), 0)


def through_state_dict(ticketed, model, bits):
    other = mptify.transform(model, bits=bits, prune=0.5, seed=1)
    other.load_state_dict(ticketed.state_dict())
    return other.eval()


WAYS = {
    "deepcopy": lambda ticketed, model, bits: copy.deepcopy(ticketed),
    "pickle": lambda ticketed, model, bits: pickle.loads(pickle.dumps(ticketed)),
    "state_dict": through_state_dict,
}


@pytest.mark.parametrize("way", WAYS)
@each_mode
@each_network
def test_a_copy_computes_the_same(seed, bits, way):
    model, inputs = build(seed)
    ticketed = lived_in(model, inputs, bits)
    copied = WAYS[way](ticketed, model, bits)
    with torch.no_grad():
        for training in (False, True):
            agree(
                seeded(copied.train(training), inputs), seeded(ticketed.train(training), inputs), 0
            )
    assert [name for name, _ in copied.named_parameters()] == [
        name for name, _ in ticketed.named_parameters()
    ]


@each_mode
@each_network
def test_numbers_of_other_kinds(seed, bits):
    model, inputs = build(seed)
    ticketed = lived_in(model, inputs, bits)
    masks = {name: layer.mask.clone() for name, layer in mptify.ticket_layers(ticketed).items()}
    expected, signs = run(ticketed, inputs)
    for dtype in (torch.float64, torch.bfloat16):
        cast = tuple(one.to(dtype) if one.is_floating_point() else one for one in inputs)
        other = copy.deepcopy(ticketed).to(dtype)
        given, others = run(other, cast)
        assert {one.dtype for one in given} == {dtype}
        assert all(torch.isfinite(one).all() for one in given)
        assert all(
            torch.equal(layer.mask, masks[name])
            for name, layer in mptify.ticket_layers(other).items()
        )
        if dtype == torch.float64:
            same_but_for_ties([one.float() for one in given], others, expected, signs)
    other = copy.deepcopy(ticketed).to(memory_format=torch.channels_last)
    turned = tuple(
        one.to(memory_format=torch.channels_last) if one.dim() == 4 else one for one in inputs
    )
    same_but_for_ties(*run(other, turned), expected, signs)
    assert all(
        torch.equal(layer.mask, masks[name]) for name, layer in mptify.ticket_layers(other).items()
    )


def run(model, inputs):
    """The outputs, and what went into each sign, in the order of their calls."""
    signs, handles = [], []
    for name, module in model.named_modules():
        if isinstance(module, Sign):
            handles.append(
                module.register_forward_hook(
                    lambda _, given, __, name=name: signs.append((name, given[0].float()))
                )
            )
    with torch.no_grad():
        outputs = seeded(model, inputs)
    for handle in handles:
        handle.remove()
    return outputs, signs


def same_but_for_ties(ours, our_signs, theirs, their_signs):
    """Outputs agree, unless a sign came out otherwise because what went into it was 0 but for rounding."""
    assert [name for name, _ in our_signs] == [name for name, _ in their_signs]
    for (_, one), (_, other) in zip(our_signs, their_signs, strict=True):
        turned = (one >= 0) != (other >= 0)
        if turned.any():
            assert one[turned].abs().max() < 1e-3
            return  # from here on, two networks
    agree(ours, theirs, 1e-3)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_network_comes_from_its_seed_alone(seed):
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()
    one = random_network(seed)
    random.seed(5)
    torch.manual_seed(5)
    other = random_network(seed)
    assert str(one) == str(other)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            one.model.state_dict().values(), other.model.state_dict().values(), strict=True
        )
    )
    assert torch.equal(one.inputs[0], other.inputs[0])
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    random_network(seed)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert (np.random.get_state()[1] == states[2]).all()


EVERY_FEATURE = {
    "1d", "MultiheadAttention", "adaptive pool", "attention by hand", "average pool", "bare conv", "bare linear", "batch norm", "block",
    "channel shuffle", "class token", "concatenation", "conv head", "depthwise", "dilated", "dropout", "group norm", "grouped", "in place",
    "in place on a value read elsewhere", "layer norm", "layer scale", "max pool", "mlp", "none norm", "optional argument given",
    "pool function", "pool module", "position parameter", "several heads", "shared activation", "shared module", "skip", "split",
    "squeeze-excite", "strided", "tied weights", "token embedding", "torch's encoder layer", "train/eval branch", "transposed",
    *(f"{kind} {form}" for kind in ("relu", "gelu", "silu", "hardswish") for form in ("function", "module")), "prelu module",
}  # fmt: skip


def test_forty_networks_contain_everything():
    found = set().union(*(random_network(seed).features for seed in range(40)))
    assert EVERY_FEATURE - found == set()
