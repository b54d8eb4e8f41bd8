"""Quantizers of 2, 4 and 8 bits: their levels, gradients and files, and the networks they stand in."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import mptify
from mptify.config import make_config
from mptify.errors import BadConfig
from mptify.models import conv2, conv4
from mptify.nn.quantizers import (
    RunningQuantizer,
    UniformQuantizer,
    check_quantizer,
    level_range,
    uniform,
)
from mptify.surgery.invariants import (
    bad_gradients,
    real_inputs,
    unnormalised_quantizers,
    wrongly_trainable,
)
from mptify.surgery.plans import LayerInput

PROPERTY = settings(max_examples=60, deadline=None, database=None)
WIDTHS = ["1/8", "1/4", "1/2", "32/8", "32/4", "32/2"]


@PROPERTY
@given(
    values=st.lists(st.floats(-6, 6, width=32), min_size=1, max_size=30),
    bits=st.sampled_from([2, 4]),
    signed=st.booleans(),
)
def test_a_value_is_the_nearest_level_times_the_step(values, bits, signed):
    quantizer = UniformQuantizer(bits, signed)
    step, (lowest, highest) = quantizer.step, level_range(bits, signed)
    found = quantizer(torch.tensor(values))
    inverse = np.float32(1 / step)
    nearest = np.clip(np.rint(np.float32(values) * inverse), lowest, highest) * np.float32(step)
    assert found.tolist() == nearest.tolist()
    assert np.abs(nearest - np.clip(values, lowest * step, highest * step)).max() <= 0.51 * step


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", [2, 4])
def test_the_gradient_passes_inside_the_range_only(bits, signed):
    quantizer = UniformQuantizer(bits, signed)
    low, high = (level * quantizer.step for level in level_range(bits, signed))
    x = torch.tensor([low - 0.1, low, (low + high) / 2, high, high + 0.1], requires_grad=True)
    quantizer(x).backward(torch.arange(1.0, 6.0))
    assert x.grad.tolist() == [0, 2, 3, 4, 0]


def test_the_gradient_of_a_learned_step_is_that_of_lsq():
    x = torch.tensor([-1.0, 0.2, 0.8, 5.0], requires_grad=True)
    step = torch.tensor(0.5, requires_grad=True)
    upstream = torch.tensor([1.0, 2.0, 3.0, 4.0])
    uniform(x, step=step, lowest=0, highest=3).backward(upstream)
    scaled = x.detach() / 0.5
    error = torch.tensor([0.0, 0 - scaled[1], 2 - scaled[2], 3.0])
    assert float(step.grad) == pytest.approx(float((upstream * error).sum()) / (4 * 3) ** 0.5)
    assert x.grad.tolist() == [0, 2, 3, 0]


@PROPERTY
@torch.no_grad()
@given(step=st.floats(2.0**-12, 8, width=32), count=st.integers(1, 4000), seed=st.integers(0, 9))
def test_sums_of_levels_are_exact_whatever_the_learned_step(step, count, seed):
    quantizer = UniformQuantizer(4, False, learn_clip=True)
    quantizer.raw_step.fill_(step)
    assert float(quantizer.step) == pytest.approx(step, rel=1 / 64)
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 16, (count,), generator=generator)
    signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    values = quantizer(levels * quantizer.step) * signs
    exact = int((levels * signs).sum()) * float(quantizer.step)
    assert float(values.sum()) == exact
    assert float(values[torch.randperm(count, generator=generator)].cumsum(0)[-1]) == exact


def test_a_range_of_eight_bits_follows_the_batches_and_then_stays():
    quantizer = RunningQuantizer()
    x = torch.linspace(0, 2, 50)
    assert quantizer.train()(x).max() == 2
    assert not quantizer.is_signed
    assert torch.equal(quantizer.levels(x), (x * (1 / quantizer.step)).round())
    assert float(quantizer.step) == pytest.approx(2 / 255)
    for _ in range(200):
        quantizer(x - 1)
    assert quantizer.is_signed
    assert float(quantizer.step) == pytest.approx(1 / 127, rel=1e-3)
    before = copy.deepcopy(quantizer.state_dict())
    quantizer.eval()(100 * x)
    assert all(torch.equal(value, before[name]) for name, value in quantizer.state_dict().items())


def test_a_quantizer_of_other_bits_is_refused():
    check_quantizer("uniform", 2)
    with pytest.raises(BadConfig, match="quantizer='sign': it is not one for 4-bit activations"):
        check_quantizer("sign", 4)
    with pytest.raises(BadConfig, match="quantizer='uniform': it is not one for 1-bit"):
        mptify.transform(conv2(), bits="1/1", quantizer="uniform")
    with pytest.raises(BadConfig, match="learn_clip=True is for 2- and 4-bit activations"):
        make_config({"bits": "1/8", "learn_clip": True})
    assert make_config({"bits": "1/4"}).quantizer == "uniform"


# -- networks ------------------------------------------------------------------------------------


def trained(network, x, **settings):
    ticketed = mptify.transform(network, prune=0.6, **settings).train()
    ticketed(x).square().mean().backward()
    return ticketed


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(
    "name", ["mptify:resnet18_cifar", "timm:test_vit", "timm:test_efficientnet", "mptify:vgg_small"]
)
def test_every_layer_reads_levels(name, bits):
    x = torch.randn(2, 3, 32, 32) if name.startswith("mptify") else torch.randn(2, 3, 64, 64)
    ticketed = mptify.transform(name, bits=bits, prune=0.6, num_classes=10).train()
    plan = ticketed.ticket_plan
    exempt = {layer.name for layer in plan.layers if layer.input.is_exempt}
    ran, real = real_inputs(ticketed, lambda: ticketed(x).square().mean().backward())
    assert ran == set(mptify.ticket_layers(ticketed))
    assert real <= exempt  # averages of few levels may look like levels
    pixels = {layer.name for layer in plan.layers if layer.input is LayerInput.PIXELS}
    assert pixels <= real  # so the check can fail
    assert bool(pixels) != bits.endswith("/8")
    assert not unnormalised_quantizers(ticketed)
    assert not wrongly_trainable(ticketed)
    assert not bad_gradients(ticketed)


@pytest.mark.parametrize("settings", [{}, {"learn_clip": True}])
@pytest.mark.parametrize("bits", ["1/8", "1/4", "1/2"])
def test_a_file_gives_the_same_logits(tmp_path, bits, settings):
    settings = {} if bits == "1/8" else settings
    x = torch.randn(4, 3, 32, 32)
    ticketed = trained(conv4(), x, bits=bits, **settings).eval()
    for module in ticketed.modules():
        if isinstance(module, UniformQuantizer) and settings:
            with torch.no_grad():
                module.raw_step.mul_(1.3)
    mptify.save(ticketed, tmp_path / "a.ticket", "mptify:conv4")
    assert torch.equal(mptify.load(tmp_path / "a.ticket")(x), ticketed(x))
    pickled = copy.deepcopy(ticketed)
    assert torch.equal(pickled(x), ticketed(x))


def test_a_layer_of_eight_bits_sums_levels_and_scales_them_once():
    x = torch.randn(2, 3, 8, 8).relu()
    ticketed = trained(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), x, bits="1/8")
    layer = ticketed.eval()[0]
    quantizer = layer.input_quantizer
    levels = (x * (1 / quantizer.step)).round().clamp(0, 255)
    sums = F.conv2d(levels.double(), (layer.mask * layer.sign).double(), padding=1)
    expected = sums.float() * (layer.gain * quantizer.step)
    assert torch.equal(ticketed(x), expected)


@pytest.mark.parametrize("bits", ["1/4", "1/8"])
def test_scores_get_the_gradient_of_the_effective_weight(bits):
    """As if the layer computed with gain · M ⊙ B on the dequantized input."""
    x = torch.randn(5, 6)
    ticketed = mptify.transform(nn.Sequential(nn.Linear(6, 3)), bits=bits, prune=0.5).train()
    layer = next(iter(mptify.ticket_layers(ticketed).values()))
    seen = []
    layer.register_forward_hook(lambda module, args, y: seen.append((args[0].detach(), y)))
    ticketed(x).square().sum().backward()
    value, y = seen[0]
    if bits == "1/8":
        quantizer = layer.input_quantizer
        value = quantizer.eval()(value)
    upstream = 2 * y.detach()
    expected = (upstream.T @ value) * layer.frozen * layer.scores.sign()
    torch.testing.assert_close(layer.scores.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bits", ["1/8", "1/4", "1/2"])
def test_a_search_of_few_bits_learns_and_resumes_its_ranges(tmp_path, bits):
    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    images = (40 * labels[:, None, None, None] + torch.randint(0, 60, (60, 1, 8, 8))).byte()
    config = {"epochs": 6, "batch": 20, "ticket": {"bits": bits, "prune": 0.5}}
    data = (images, labels)
    network = conv2(num_classes=3, in_chans=1, input_size=8)
    result = mptify.search(network, data, data, config)
    assert result.accuracy > 0.9
