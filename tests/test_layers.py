"""Ticket layers against torch's own functions, fed with effective weights that are computed here."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import mptify
from mptify.config import make_config
from mptify.nn import layers as layers_module
from mptify.nn import topk
from mptify.nn.layers import TicketParameter, ticket_class
from mptify.nn.norms import ChannelBatchNorm, ScalarBatchNorm, TokenBatchNorm
from mptify.nn.quantizers import Sign
from mptify.nn.scopes import GlobalScope

PROPERTY = settings(max_examples=60, deadline=None, database=None)

# name: (the layer, the shape of a batch, what the layer computes)
CASES = {
    "Conv1d": (
        lambda: nn.Conv1d(6, 8, 3, stride=2, padding=1, groups=2),
        (2, 6, 11),
        lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1, groups=2),
    ),
    "Conv2d": (
        lambda: nn.Conv2d(4, 5, (3, 2), stride=(1, 2), padding=(2, 1), dilation=2),
        (2, 4, 7, 9),
        lambda x, w, b: F.conv2d(x, w, b, stride=(1, 2), padding=(2, 1), dilation=2),
    ),
    "Conv3d": (lambda: nn.Conv3d(3, 4, 2), (2, 3, 4, 5, 4), lambda x, w, b: F.conv3d(x, w, b)),
    "ConvTranspose1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1),
        (2, 4, 5),
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2, padding=1, output_padding=1),
    ),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2),
        (2, 4, 5, 4),
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, groups=2),
    ),
    "ConvTranspose3d": (
        lambda: nn.ConvTranspose3d(2, 3, 2),
        (2, 2, 3, 4, 3),
        lambda x, w, b: F.conv_transpose3d(x, w, b),
    ),
    "Linear": (lambda: nn.Linear(12, 7), (2, 5, 12), F.linear),
}
every_layer = pytest.mark.parametrize("kind", CASES)
BITS = ["1/32", "32/32", "1/1", "32/1"]
every_bits = pytest.mark.parametrize("bits", BITS)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def ticket(layer, **settings):
    """The ticket layer of one torch layer, without surgery around it."""
    settings = {"bits": "1/32", "prune": 0.6, **settings}
    return ticket_class(type(layer)).from_layer(
        layer, make_config(settings), name="x", fan_in=layer.weight[0].numel()
    )


def case(kind, **settings):
    """A ticket layer, a batch of ±1 for it, and the function it should compute."""
    make, shape, function = CASES[kind]
    torch.manual_seed(0)
    return (
        ticket(make(), **settings),
        torch.randint(0, 2, shape, generator=seeded(1)) * 2.0 - 1,
        function,
    )


def conv(**settings):
    return ticket(nn.Conv2d(3, 6, 3), **settings)


def images(seed=1):
    return torch.randn(2, 3, 8, 8, generator=seeded(seed))


def new_scores_(layer, seed=7):
    with torch.no_grad():
        layer.scores.copy_(torch.randn(layer.scores.shape, generator=seeded(seed)))
    return layer


def slow_mask(scores, prune):
    flat = np.abs(scores.detach().double().numpy().ravel())
    kept = max(1, flat.size - round(flat.size * prune))
    mask = np.zeros(flat.size, bool)
    mask[np.argsort(-flat, kind="stable")[:kept]] = True
    return torch.from_numpy(mask).view(scores.shape)


def parts(layer, prune=0.6):
    """Mask, signs, gain and effective weight, computed from the layer's scores and frozen weights alone."""
    mask, frozen = slow_mask(layer.scores, prune), layer.frozen.detach()
    signs = torch.where(frozen < 0, -1.0, 1.0)
    if layer.weight_bits == 32:
        return mask, signs, torch.tensor(1.0), frozen * mask
    gain = frozen[mask].abs().double().mean().float()
    return mask, signs, gain, gain * signs * mask


# -- what they compute -----------------------------------------------------------------------------------------------------


@every_layer
@pytest.mark.parametrize("bits", ["1/32", "32/32", "32/1"])
@pytest.mark.parametrize("bias", ["drop", "learn"])
def test_a_layer_computes_with_its_effective_weight(kind, bits, bias):
    layer, x, function = case(kind, bits=bits, bias=bias)
    mask, _, gain, weight = parts(layer)
    torch.testing.assert_close(
        layer(x), function(x, weight, layer.bias if bias == "learn" else None)
    )
    torch.testing.assert_close(layer.ticket_weight(), weight)
    assert torch.equal(layer.mask, mask)
    torch.testing.assert_close(layer.gain, gain)


@every_layer
def test_with_one_bit_activations_the_gain_multiplies_an_integer_sum(kind):
    layer, x, function = case(kind, bits="1/1")
    mask, signs, gain, weight = parts(layer)
    total = function(x, signs * mask, None)
    assert torch.equal(total, total.round())
    assert torch.equal(
        layer(x), gain * total
    )  # to the bit: nothing but one multiplication is rounded
    assert torch.equal(layer.weight, signs * mask)
    torch.testing.assert_close(layer.ticket_weight(), weight)


@every_layer
def test_with_one_bit_activations_a_learned_bias_is_added_behind_the_gain(kind):
    make, _, function = CASES[kind]
    original = make()
    layer, x, _ = ticket(original, bits="1/1", bias="learn"), *case(kind)[1:]
    torch.testing.assert_close(layer(x), function(x, parts(layer)[3], original.bias))


@every_layer
@every_bits
def test_a_single_sample_gives_what_it_gives_in_a_batch(kind, bits):
    layer, x, _ = case(kind, bits=bits, bias="learn")
    torch.testing.assert_close(layer(x[0]), layer(x)[0])


@every_layer
@every_bits
@pytest.mark.parametrize("score_grad", ["biprop", "alpha"])
def test_the_scores_receive_the_gradient_of_the_effective_weight(kind, bits, score_grad):
    layer, x, function = case(kind, bits=bits, score_grad=score_grad)
    _, signs, gain, weight = parts(layer)
    weight.requires_grad_()
    expected_y = function(x, weight, None)
    upstream = torch.randn(expected_y.shape, generator=seeded(2))
    expected_y.backward(upstream)
    layer(x).backward(upstream)
    scale = layer.frozen.abs() if score_grad == "biprop" else gain
    expected = weight.grad * signs * scale * torch.where(layer.scores < 0, -1.0, 1.0)
    torch.testing.assert_close(layer.scores.grad, expected, rtol=1e-5, atol=1e-5)
    assert layer.frozen.grad is None


@every_layer
def test_the_input_receives_the_gradient_of_the_effective_weight(kind):
    for bits in BITS:
        layer, x, function = case(kind, bits=bits)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        layer(ours).sum().backward()
        function(theirs, parts(layer)[3], None).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


@every_layer
def test_transform_puts_the_ticket_layer_of_the_same_kind(kind):
    make, _, function = CASES[kind]
    model = mptify.transform(nn.Sequential(make()), prune=0.6)
    x = case(kind)[1]
    assert type(model[0]) is getattr(layers_module, f"Ticket{kind}")
    assert isinstance(model[0], getattr(nn, kind))
    torch.testing.assert_close(model(x), function(x, parts(model[0])[3], None))


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_modes_work_as_in_the_plain_layer(mode):
    plain = nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode, bias=False)
    layer = ticket(plain, init="keep", bits="32/32", prune=0.0)
    torch.testing.assert_close(layer(images()), plain(images()))


def test_transposed_convs_still_take_an_output_size():
    layer = ticket(nn.ConvTranspose2d(3, 4, 3, stride=2), bits="1/1")
    assert layer(images(), output_size=[18, 18]).shape == (2, 4, 18, 18)


def test_nothing_pruned_and_kept_weights_are_the_original_layer():
    for kind in CASES:
        make, shape, _ = CASES[kind]
        plain = make()
        layer = ticket(plain, bits="32/32", prune=0.0, init="keep", bias="learn")
        x = torch.randn(shape, generator=seeded(3))
        assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize("prune", [0.0, 0.5])
@every_bits
def test_a_kept_weight_of_minus_zero_counts_as_plus_one(prune, bits):
    plain = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        plain.weight.copy_(torch.tensor([[-0.0, -2.0, 0.0, 2.0]]))
    layer = ticket(plain, prune=prune, init="keep", bits=bits)
    set_scores_(layer, [4.0, 3.0, 2.0, 1.0])
    assert layer.sign.tolist() == [[1.0, -1.0, 1.0, 1.0]]
    torch.testing.assert_close(layer.ticket_weight(), parts(layer, prune)[3])


@pytest.mark.parametrize("prune", [0.0, 0.999])
def test_the_ends_of_pruning_keep_all_and_one(prune):
    layer = conv(prune=prune)
    assert int(layer.mask.sum()) == layer.kept == (layer.count if prune == 0 else 1)
    torch.testing.assert_close(layer(images()), F.conv2d(images(), parts(layer, prune)[3]))


def test_a_layer_of_one_weight_keeps_it():
    layer = ticket(nn.Linear(1, 1, bias=False), prune=0.9)
    assert layer.mask.tolist() == [[True]]
    torch.testing.assert_close(layer.ticket_weight(), layer.frozen.detach())


# -- how they look and what they train -------------------------------------------------------------------------------------


def test_repr_says_what_was_kept():
    text = repr(ticket(nn.Conv2d(64, 64, 3, bias=False), prune=0.8))
    assert text.startswith(
        "TicketConv2d(64, 64, kernel_size=(3, 3), bits=1/32, kept=7373/36864, gain="
    )
    through_surgery = mptify.transform(nn.Sequential(nn.Conv2d(64, 64, 3)), prune=0.8)
    assert "TicketConv2d(64, 64, kernel_size=(3, 3), bits=1/32, kept=7373/36864, gain=" in repr(
        through_surgery
    )


def test_repr_shows_the_gain_and_what_differs_from_the_default():
    layer = ticket(
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2),
        bits="1/1",
        init="signed_constant",
        prune=0.5,
    )
    assert f"gain={math.sqrt(2 / (36 * 0.5)):.4f}" in repr(layer)
    assert "stride=(2, 2), padding=(1, 1), groups=2, bits=1/1, kept=144/288" in repr(layer)


def test_a_layer_without_memory_still_has_a_repr():
    layer = ticket(nn.Conv2d(64, 64, 3, device="meta"), prune=0.8)
    assert "kept=7373/36864, gain=meta" in repr(layer)


def test_only_scores_and_a_learned_bias_train():
    def training(layer):
        return {name for name, parameter in layer.named_parameters() if parameter.requires_grad}

    assert training(conv()) == {"scores"}
    assert training(conv(bias="learn")) == {"scores", "bias"}
    assert len(training(conv(bias="learn", bits="1/1"))) == 2
    assert training(conv(bits="1/1")) == {"scores"}


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_a_learned_bias_starts_as_the_original_and_learns(bits):
    plain = nn.Conv2d(3, 6, 3)
    before = plain.bias.detach().clone()
    layer = ticket(plain, bits=bits, bias="learn")
    (bias,) = (p for name, p in layer.named_parameters() if name not in ("scores", "frozen"))
    assert torch.equal(bias, before)
    layer(images()).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((6,), 2.0 * 6 * 6))
    with torch.no_grad():
        bias.add_(1)
    assert torch.equal(plain.bias, before)


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_a_dropped_bias_leaves_nothing_behind(bits):
    plain = nn.Linear(4, 3)
    layer = ticket(plain, bits=bits, bias="drop")
    assert set(layer.state_dict()) == {"scores", "frozen"}
    assert layer(torch.zeros(2, 4)).tolist() == [[0.0] * 3] * 2
    assert plain.bias is not None


# -- when the mask is recomputed ---------------------------------------------------------------------------------------------


@pytest.fixture
def selections(monkeypatch):
    """Counts how often survivors are selected, by whichever function a layer calls for it."""
    calls, inside = [], []

    def count(name):
        real = getattr(topk, name)

        def counting(*args, **options):
            calls.extend([] if inside else [name])  # one may call the other
            inside.append(name)
            try:
                return real(*args, **options)
            finally:
                inside.pop()

        monkeypatch.setattr(topk, name, counting)

    count("select_mask")
    count("select")
    return calls


def fresh(layer):
    """Whether mask, gain and output are those of the scores as they are now."""
    expected = copy.deepcopy(layer)
    return (
        torch.equal(layer.mask, expected.mask)
        and torch.equal(layer.gain, expected.gain)
        and torch.equal(layer(images()), expected(images()))
    )


@every_bits
def test_the_mask_is_selected_once_while_the_scores_stay(selections, bits):
    layer = conv(bits=bits)
    for _ in range(3):
        layer(images()).sum().backward()
        (
            layer.mask,
            layer.gain,
            layer.weight,
            layer.ticket_weight(),
            repr(layer),
            layer.eval(),
            layer.train(),
        )
    assert len(selections) == (
        2 if bits.startswith("32") else 1
    )  # a 32-bit weight of 0 hides whether it was kept


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=1.0, foreach=True),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    ],
    ids=["sgd", "sgd-foreach", "adam", "adamw-fused"],
)
def test_the_mask_follows_an_optimizer_step(selections, optimizer):
    layer = conv()
    steps = optimizer([layer.scores])
    before = layer.mask.clone()
    for step in range(1, 4):
        layer(images()).square().sum().backward()
        steps.step()
        layer(images())
        assert len(selections) == step + 1
    assert not torch.equal(layer.mask, before)
    assert fresh(layer)


def test_the_mask_follows_load_state_dict(selections):
    layer, other = conv(), new_scores_(conv())
    layer(images())
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(images()), other(images()))
    assert torch.equal(layer.mask, other.mask)
    assert len(selections) == 3  # layer, layer again, other


def test_the_mask_follows_load_state_dict_that_assigns():
    layer = conv()
    for seed in range(6):
        layer(images())
        other = new_scores_(conv(), seed)
        layer.load_state_dict(other.state_dict(), assign=True)
        del other
        assert fresh(layer)


def test_the_mask_follows_set_prune():
    layer = conv(prune=0.5)
    layer(images())
    layer.set_prune_(0.9)
    assert torch.equal(layer.mask, slow_mask(layer.scores, 0.9))
    torch.testing.assert_close(layer(images()), F.conv2d(images(), parts(layer, 0.9)[3]))
    assert layer.kept == int(layer.mask.sum())


def test_the_mask_follows_scores_that_are_put_in_for_one_call():
    layer = conv()
    for seed in range(8):  # each new tensor may well lie where the last one lay
        scores = torch.randn(layer.scores.shape, generator=seeded(seed))
        expected = copy.deepcopy(layer)
        with torch.no_grad():
            expected.scores.copy_(scores)
        found = torch.func.functional_call(layer, {"scores": scores}, (images(),))
        assert torch.equal(found, expected(images())), seed
        del scores, found, expected


def test_the_mask_follows_parameters_set_from_a_vector():
    layer = conv()
    layer(images())
    nn.utils.vector_to_parameters(torch.randn(layer.count, generator=seeded(3)), [layer.scores])
    assert fresh(layer)


@every_bits
def test_training_goes_on_after_a_pass_in_inference_mode(bits):
    layer = conv(bits=bits)
    with torch.inference_mode():
        layer(images())
    layer(images()).sum().backward()
    assert bool(layer.scores.grad.any())


@every_bits
def test_writing_into_a_weight_that_was_read_changes_nothing(bits):
    layer = conv(bits=bits)
    expected, mask = layer(images()), layer.mask.clone()
    nn.init.kaiming_normal_(
        layer.weight
    )  # what `model.apply(init_weights)` does to every nn.Conv2d
    assert torch.equal(layer.mask, mask)
    assert torch.equal(layer(images()), expected)


def test_a_layer_made_in_inference_mode_runs_there():
    with torch.inference_mode():
        layer = conv()
        torch.testing.assert_close(layer(images()), F.conv2d(images(), parts(layer)[3]))


# -- copies ------------------------------------------------------------------------------------------------------------------


class Doubled(nn.Conv2d):
    """A layer class of a user's own; at module level, so that it can be pickled."""

    def forward(self, x):
        return super().forward(x) * 2


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": lambda layer: torch.load(_saved(layer), weights_only=False),
}


def _saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return file


@every_layer
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_computes_the_same_and_lives_its_own_life(kind, how):
    layer, x, _ = case(kind, bits="1/1", bias="learn")
    new_scores_(layer)
    expected = layer(x)
    copied = COPIES[how](layer)
    assert type(copied) is type(layer)
    assert torch.equal(copied(x), expected)
    new_scores_(copied, 8)
    assert not torch.equal(copied(x), expected)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("how", COPIES)
def test_a_layer_class_of_a_users_own_can_be_copied(how):
    layer = ticket(Doubled(3, 6, 3))
    copied = COPIES[how](layer)
    assert type(copied) is type(layer)
    assert type(copied).__name__ == "TicketDoubled"
    torch.testing.assert_close(copied(images()), 2 * F.conv2d(images(), parts(layer)[3]))


@every_layer
@every_bits
def test_a_state_dict_round_trip_restores_everything(kind, bits):
    layer, x, _ = case(kind, bits=bits, bias="learn")
    new_scores_(layer)
    other, _, _ = case(kind, bits=bits, bias="learn", seed=99)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_a_layer_without_memory_can_be_filled_later():
    layer = new_scores_(conv())
    empty = ticket(nn.Conv2d(3, 6, 3, device="meta")).to_empty(device="cpu")
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(images()), layer(images()))


def test_the_original_layer_is_left_as_it_was():
    plain = nn.Conv2d(3, 6, 3)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    layer = ticket(plain, init="keep", bias="learn")
    layer(images()).sum().backward()
    new_scores_(layer)
    assert type(plain) is nn.Conv2d
    assert all(torch.equal(tensor, before[name]) for name, tensor in plain.state_dict().items())
    assert plain.weight.grad is None


# -- number formats ----------------------------------------------------------------------------------------------------------

DTYPES = [torch.float16, torch.bfloat16, torch.float64]


@every_bits
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_and_frozen_weights_stay_float32(bits, dtype):
    layer = conv(bits=bits, bias="learn")
    scores, frozen, mask = (
        layer.scores.detach().clone(),
        layer.frozen.detach().clone(),
        layer.mask.clone(),
    )
    expected = layer(images().to(dtype).float())
    layer.to(dtype)
    found = layer(images().to(dtype))
    found.sum().backward()
    assert layer.scores.dtype == layer.frozen.dtype == layer.scores.grad.dtype == torch.float32
    assert found.dtype == dtype
    assert torch.equal(layer.scores, scores)
    assert torch.equal(layer.frozen, frozen)
    assert torch.equal(layer.mask, mask)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("name", ["half", "bfloat16", "double"])
def test_a_gradient_that_is_already_there_stays_float32_too(name):
    layer = conv()
    layer(images()).sum().backward()
    before = layer.scores.grad.clone()
    getattr(layer, name)()
    assert layer.scores.grad.dtype == torch.float32
    assert torch.equal(layer.scores.grad, before)


def test_going_through_half_and_back_loses_nothing():
    layer = conv(bits="32/32")
    expected = layer(images())
    assert torch.equal(layer.half().float()(images()), expected)


# Not the strided transposed convs: in bfloat16, torch 2.15's own end in an illegal instruction where oneDNN tries AMX.
@pytest.mark.parametrize("kind", ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose3d", "Linear"])
@every_bits
def test_autocast_runs_and_gives_float32_score_gradients(kind, bits):
    layer, x, _ = case(kind, bits=bits)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
        mask, gain = layer.mask, layer.gain
    found.float().sum().backward()
    assert found.dtype == torch.bfloat16
    assert layer.scores.grad.dtype == torch.float32
    assert bool(layer.scores.grad.isfinite().all())
    assert bool(layer.scores.grad.any())
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.1)
    assert torch.equal(mask, parts(layer)[0])
    torch.testing.assert_close(gain, parts(layer)[2])


@every_bits
def test_autocast_gives_the_dtype_that_a_plain_layer_gives(bits):
    plain = nn.Conv2d(3, 6, 3)
    layer = ticket(plain, bits=bits, bias="learn")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(images()).dtype == plain(images()).dtype == torch.bfloat16


@every_bits
def test_channels_last_gives_the_same_mask_and_output(bits):
    layer = conv(bits=bits)
    expected, mask = layer(images()), layer.mask
    layer.to(memory_format=torch.channels_last)
    found = layer(images().to(memory_format=torch.channels_last))
    assert torch.equal(layer.mask, mask)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    other = conv(bits=bits)
    other(images()).sum().backward()
    torch.testing.assert_close(layer.scores.grad, other.scores.grad)


# -- compilers -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
@every_bits
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_gives_the_same_output_and_gradients(bits, backend):
    layer = conv(bits=bits, bias="learn")
    compiled = torch.compile(layer, fullgraph=True, backend=backend)

    def agree():
        results = []
        for run in (compiled, layer):  # in this order: the plain one refreshes the mask
            layer.zero_grad()
            y = run(images())
            y.square().sum().backward()
            results.append((y.detach(), layer.scores.grad.clone()))
        (fast, fast_grad), (plain, plain_grad) = results
        torch.testing.assert_close(fast, plain)
        torch.testing.assert_close(fast_grad, plain_grad)
        return plain

    first = agree()
    new_scores_(layer)
    second = agree()
    layer.set_prune_(0.95)
    third = agree()
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # Dynamo hides it, but not from warnings=error
def test_a_compiled_model_with_one_threshold_follows_its_scores():
    model = mptify.transform(nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)), scope="global")
    compiled = torch.compile(model, backend="eager")
    for seed in (1, 2):
        torch.testing.assert_close(compiled(images()), model(images()))
        new_scores_(model[1], seed)
    torch.testing.assert_close(compiled(images()), model(images()))


EXPORTED = {
    "in eval": lambda layer: layer.eval(),
    "copied": lambda layer: copy.deepcopy(layer.eval()),
    "converted": lambda layer: layer.eval().to(torch.float64).to(torch.float32),
    "after load_state_dict": lambda layer: _loaded(layer.eval()),
    "after set_prune": lambda layer: _repruned(layer.eval()),
}


def _loaded(layer):
    layer.load_state_dict(new_scores_(copy.deepcopy(layer)).state_dict())
    return layer


def _repruned(layer):
    layer.set_prune_(0.95)
    return layer


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
@pytest.mark.parametrize("when", EXPORTED)
def test_an_exported_layer_gives_the_same_output(bits, when):
    layer = EXPORTED[when](conv(bits=bits, bias="learn"))
    exported = torch.export.export(layer, (images(),)).module()
    torch.testing.assert_close(exported(images(2)), layer(images(2)))


# -- one threshold for all -------------------------------------------------------------------------------------------------------


def linears(*shapes, **settings):
    return [ticket(nn.Linear(*shape, bias=False), **settings) for shape in shapes]


def set_scores_(layer, values):
    with torch.no_grad():
        layer.scores.copy_(torch.as_tensor(values, dtype=torch.float32).view(layer.scores.shape))


def slow_global(scores, prune, floor):
    """Floors first, each layer's own best; then the best of the rest, earlier layer and lower index first."""
    total = sum(len(one) for one in scores)
    floors = [max(1, math.ceil(len(one) * floor)) for one in scores]
    kept = max(max(1, total - round(total * prune)), sum(floors))
    chosen, rest = set(), []
    for layer, (values, least) in enumerate(zip(scores, floors)):
        ranked = sorted(range(len(values)), key=lambda index: (-abs(values[index]), index))
        chosen |= {(layer, index) for index in ranked[:least]}
        rest += [(-abs(values[index]), layer, index) for index in ranked[least:]]
    chosen |= {(layer, index) for _, layer, index in sorted(rest)[: kept - len(chosen)]}
    return [
        [(layer, index) in chosen for index in range(len(values))]
        for layer, values in enumerate(scores)
    ]


tied_scores = st.lists(
    st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0]) | st.floats(-4, 4, width=32),
    min_size=12,
    max_size=12,
)


@PROPERTY
@given(
    scores=st.tuples(tied_scores, tied_scores, tied_scores),
    prune=st.floats(0, 1, exclude_max=True),
    floor=st.sampled_from([0.0, 0.01, 0.25, 0.3, 0.5]),
)
def test_one_threshold_keeps_what_a_sort_of_all_layers_keeps(scores, prune, floor):
    group = linears((4, 3), (3, 4), (12, 1))
    for layer, values in zip(group, scores):
        set_scores_(layer, values)
    GlobalScope(group, prune, floor)
    assert [layer.mask.flatten().tolist() for layer in group] == slow_global(scores, prune, floor)


@pytest.mark.parametrize("prune", [0.0, 0.5, 0.8, 0.97])
def test_transform_with_one_threshold_keeps_the_exact_total(prune):
    model = mptify.transform(
        nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 20), nn.Linear(20, 3)),
        scope="global",
        prune=prune,
    )
    assert sum(int(layer.mask.sum()) for layer in model) == 2060 - round(2060 * prune)
    removed = (
        torch.cat([layer.scores[~layer.mask].abs() for layer in model]) if prune else torch.zeros(1)
    )
    for layer in model:
        floor = math.ceil(layer.count * 0.01)
        ranked = layer.scores[layer.mask].abs().sort(descending=True).values
        assert len(ranked) >= floor
        assert bool((ranked[floor:] >= removed.max()).all())


def test_no_layer_dies_under_one_threshold():
    group = linears((10, 10), (10, 10))
    set_scores_(group[0], torch.linspace(5, 6, 100))
    set_scores_(group[1], torch.linspace(0, 1, 100))
    GlobalScope(group, 0.9, 0.05)
    assert [int(layer.mask.sum()) for layer in group] == [15, 5]
    assert group[1].mask.flatten().nonzero().flatten().tolist() == [95, 96, 97, 98, 99]


@pytest.mark.parametrize("extreme", [math.inf, math.nan])
def test_no_layer_dies_next_to_one_that_has_diverged(extreme):
    group = linears((4, 4), (4, 4))
    set_scores_(group[0], torch.full((16,), extreme))
    GlobalScope(group, 0.5, 0.25)
    assert [int(layer.mask.sum()) for layer in group] == [12, 4]


def test_ties_go_to_the_earlier_layer():
    group = linears((4, 4), (4, 4), (4, 4))
    for layer in group:
        set_scores_(layer, torch.ones(16))
    GlobalScope(group, 0.5, 0.0)
    assert [int(layer.mask.sum()) for layer in group] == [16, 7, 1]  # one each, then in order
    assert group[1].mask.flatten().tolist() == [True] * 7 + [False] * 9


def test_ties_go_to_the_earlier_layer_even_when_a_later_one_shares_its_scores():
    first, second, third = linears((4, 4), (4, 4), (4, 4))
    third.tie_to_(first)
    for layer in (first, second):
        set_scores_(layer, torch.ones(16))
    GlobalScope([first, second, third], 0.5, 0.0)
    assert [int(layer.mask.sum()) for layer in (first, second)] == [15, 1]


def test_kept_counts_the_mask_under_one_threshold():
    model = mptify.transform(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 30)), scope="global", prune=0.5
    )
    for prune in (0.5, 0.9):
        model[0].set_prune_(prune)
        kept = [layer.kept for layer in model]
        assert kept == [int(layer.mask.sum()) for layer in model]
        assert sum(kept) == 304 - round(304 * prune)


def test_one_threshold_ranks_again_only_when_some_scores_changed(selections):
    model = mptify.transform(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), scope="global", prune=0.5
    )
    x = torch.randn(2, 8, generator=seeded(0))
    model(x)
    once = len(selections)
    model(x)
    assert len(selections) == once
    before = model[0].mask.clone()
    set_scores_(model[1], torch.full((64,), 9.0))
    model(x)
    assert len(selections) == 2 * once
    assert int(model[0].mask.sum()) < int(before.sum())
    assert sum(int(layer.mask.sum()) for layer in model) == 64


@pytest.mark.parametrize("how", COPIES)
def test_a_copied_model_has_a_threshold_of_its_own(how):
    model = mptify.transform(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), scope="global", prune=0.5
    )
    expected = [layer.mask.clone() for layer in model]
    copied = COPIES[how](model)
    assert [torch.equal(layer.mask, mask) for layer, mask in zip(copied, expected)] == [True, True]
    set_scores_(copied[0], torch.full((64,), 9.0))
    assert sum(int(layer.mask.sum()) for layer in copied) == 64
    assert not torch.equal(copied[1].mask, expected[1])
    assert [torch.equal(layer.mask, mask) for layer, mask in zip(model, expected)] == [True, True]


# -- shared weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_tied_layers_share_scores_and_masks(scope):
    plain = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    plain[2].weight = plain[0].weight
    model = mptify.transform(plain, scope=scope, prune=0.5)
    assert model[2].scores is model[0].scores
    assert model[2].frozen is model[0].frozen
    new_scores_(model[0])
    assert torch.equal(model[2].mask, model[0].mask)
    assert torch.equal(model[2].mask, slow_mask(model[0].scores, 0.5))
    x = torch.randn(2, 6, generator=seeded(0))
    model(x).sum().backward()
    weight = parts(model[0], 0.5)[3].requires_grad_()
    torch.testing.assert_close(model(x), F.linear(F.relu(F.linear(x, weight)), weight))
    F.linear(F.relu(F.linear(x, weight)), weight).sum().backward()
    torch.testing.assert_close(
        model[0].scores.grad,
        weight.grad * model[0].frozen * torch.where(model[0].scores < 0, -1.0, 1.0),
    )


def test_a_tied_layer_prunes_as_the_one_it_is_tied_to():
    first, second = linears((6, 6), prune=0.5)[0], linears((6, 6), prune=0.9)[0]
    second.tie_to_(first)
    assert torch.equal(second.mask, first.mask)
    assert second.kept == 18


def test_tied_layers_stay_tied_when_copied_and_converted():
    plain = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    plain[2].weight = plain[0].weight
    copied = copy.deepcopy(mptify.transform(plain)).double()
    assert copied[2].scores is copied[0].scores
    new_scores_(copied[0])
    assert torch.equal(copied[2].mask, copied[0].mask)


# -- weights that are read from outside ------------------------------------------------------------------------------------------


@every_bits
def test_a_bare_parameters_ticket_computes_with_it(bits):
    torch.manual_seed(0)
    bare = TicketParameter(
        torch.randn(5, 4), make_config({"bits": bits, "prune": 0.6}), name="x", fan_in=4
    )
    x = torch.randn(3, 4, generator=seeded(1))
    torch.testing.assert_close(bare(x), F.linear(x, parts(bare)[3]))


@every_bits
def test_an_escaped_weight_computes_what_the_layer_would(bits):
    layer, bias = conv(bits=bits), torch.randn(6, generator=seeded(4))
    layer.weight_escapes = True
    expected = F.conv2d(images(), parts(layer)[3], bias, padding=1)
    torch.testing.assert_close(F.conv2d(images(), layer.weight, bias, padding=1), expected)
    torch.testing.assert_close(
        F.conv2d(images(), weight=layer.weight, bias=bias, padding=1), expected
    )
    torch.testing.assert_close(F.conv2d(images()[0], layer.weight, bias, padding=1), expected[0])
    assert layer.weight.shape == layer.scores.shape


# -- signs and norms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0.5, 1.0, 2.0])
def test_the_sign_module_is_sign_forward_and_a_triangle_backward(width):
    x = torch.tensor([-2.5, -0.75, -0.25, -0.0, 0.0, 0.25, 0.75, 2.5], requires_grad=True)
    y = Sign(width)(x)
    y.sum().backward()
    assert y.tolist() == [-1, -1, -1, 1, 1, 1, 1, 1]
    expected = [max(0.0, 2 / width * (1 - abs(value) / width)) for value in x.tolist()]
    torch.testing.assert_close(x.grad, torch.tensor(expected))


def test_the_sign_module_has_no_state_and_shows_a_width_of_its_own():
    assert not Sign().state_dict()
    assert repr(Sign()) == "Sign()"
    assert repr(Sign(0.5)) == "Sign(width=0.5)"


def check_norm(norm, inner, x, dims, shape):
    """Train twice, then eval, against means and variances taken over `dims`."""
    running_mean, running_var = torch.zeros(shape), torch.ones(shape)
    for batch in (x, 2 * x + 1):
        count = batch.numel() // math.prod(shape)
        mean, var = batch.mean(dims, keepdim=True), batch.var(dims, correction=0, keepdim=True)
        torch.testing.assert_close(
            norm(batch), (batch - mean) / (var + 1e-5).sqrt(), rtol=1e-4, atol=1e-5
        )
        running_mean = 0.9 * running_mean + 0.1 * mean.view(shape)
        running_var = 0.9 * running_var + 0.1 * var.view(shape) * count / (count - 1)
    torch.testing.assert_close(inner.running_mean, running_mean)
    torch.testing.assert_close(inner.running_var, running_var)
    norm.eval()
    broadcast = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    expected = (x - running_mean.view(broadcast)) / (running_var.view(broadcast) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x), expected, rtol=1e-4, atol=1e-5)


SHAPES = [(8, 5), (4, 5, 3), (4, 5, 3, 2), (2, 5, 3, 2, 4), (2, 5, 2, 2, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_channel_norm_normalises_dimension_one(shape):
    norm, x = ChannelBatchNorm(5, affine=False), torch.randn(shape, generator=seeded(0)) * 3 + 2
    check_norm(norm, norm, x, [dim for dim in range(len(shape)) if dim != 1], (5,))


@pytest.mark.parametrize("shape", [(8, 5), (4, 3, 5), (2, 3, 4, 5), (2, 2, 2, 2, 5)])
def test_token_norm_normalises_the_last_dimension(shape):
    norm, x = TokenBatchNorm(5), torch.randn(shape, generator=seeded(0)) * 3 + 2
    check_norm(norm, norm.norm, x, list(range(len(shape) - 1)), (5,))


@pytest.mark.parametrize("shape", [(9,), *SHAPES])
def test_scalar_norm_normalises_everything_at_once(shape):
    norm, x = ScalarBatchNorm(), torch.randn(shape, generator=seeded(0)) * 3 + 2
    check_norm(norm, norm.norm, x, list(range(len(shape))), (1,))


@pytest.mark.parametrize(
    "make", [lambda: ChannelBatchNorm(4, affine=False), ScalarBatchNorm, lambda: TokenBatchNorm(6)]
)
def test_norms_take_any_memory_format(make):
    x = torch.randn(2, 4, 3, 6, generator=seeded(0))
    torch.testing.assert_close(make()(x.to(memory_format=torch.channels_last)), make()(x))


@pytest.mark.parametrize("affine", [True, False])
def test_norms_learn_a_scale_and_an_offset_only_when_asked(affine):
    for norm in (
        ChannelBatchNorm(4, affine=affine),
        TokenBatchNorm(4, affine=affine),
        ScalarBatchNorm(affine=affine),
    ):
        assert len(list(norm.parameters())) == (2 if affine else 0)


def test_channel_norm_wants_a_channel_dimension():
    with pytest.raises(ValueError, match="at least 2 dimensions, got 1"):
        ChannelBatchNorm(4)(torch.randn(4))
