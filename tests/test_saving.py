"""What training steps save for backward: little, and gradients are the same to the bit."""

import contextlib
import copy
import gc
import math
import weakref

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import mptify
from mptify.nn import layers, native, quantizers, saving, topk
from mptify.nn.quantizers import UniformQuantizer, level_range

pytestmark = pytest.mark.skipif(
    native.library is None, reason="no C++ compiler was there when mptify was installed"
)
PROPERTY = settings(max_examples=80, deadline=None, database=None)
numbers = st.floats(-4, 4, width=32) | st.sampled_from(
    [0.0, -0.0, 0.25, -0.25, 0.5, 1.5, 2.5, 3.75, math.nan, math.inf, -math.inf]
)


def same_bits(one, other):
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


# -- codes ---------------------------------------------------------------------------------------


@PROPERTY
@given(
    bits=st.sampled_from([1, 2, 4, 8]),
    signed=st.booleans(),
    count=st.integers(1, 1500),
    step=st.sampled_from([1.0, 0.34375, 0.1]),
    seed=st.integers(0, 99),
)
def test_levels_come_back_from_few_bits_to_the_bit(bits, signed, count, step, seed):
    generator = torch.Generator().manual_seed(seed)
    lowest, highest = level_range(bits, signed) if bits > 1 else (0, 1)
    x = torch.randint(lowest, highest + 1, (count,), generator=generator) * torch.tensor(step)
    if bits == 1:
        x, step = 2 * x.sign() - 1, 1.0
    elif signed:
        x[:: count // 3 + 1] = -0.0
    levels = native.Levels(bits, lowest, step)
    packed = native.pack_levels(x, levels)
    assert packed.nbytes == -(-count // 256) * 32 * bits
    out = torch.full_like(x, 7)
    native.unpack_levels(packed, levels, out)
    assert same_bits(out, x)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("wrong", [0.4, 9e9, math.nan, math.inf, -math.inf, 256.0])
@pytest.mark.parametrize("place", [0, 300, 99_999])
def test_numbers_that_are_no_levels_are_not_packed(bits, wrong, place):
    x = torch.ones(100_000)
    levels = native.Levels(bits, 0, 1.0)
    assert native.pack_levels(x, levels) is not None
    x[place] = wrong
    assert native.pack_levels(x, levels) is None


def test_minus_zero_is_no_unsigned_level():
    assert native.pack_levels(torch.tensor([1.0, -0.0]), native.Levels(4, 0, 1.0)) is None


@pytest.mark.parametrize("count", [1, 255, 256, 5000, 200_001])
@pytest.mark.parametrize("kind", list(native.Effective))
def test_survivors_in_bits_give_the_effective_weight_again(count, kind):
    generator = torch.Generator().manual_seed(count)
    scores = torch.randn(count, generator=generator).mul_(4).round_()  # with many ties
    weight = torch.randn(count, generator=generator)
    out, bits = torch.empty(count), native.bits_for(count)
    gain, _ = native.select(scores, weight, out, bits, max(1, count // 3), kind, native.NO_HINT)
    assert same_bits(native.expand(bits, weight, gain, kind), out)


# -- quantizers ----------------------------------------------------------------------------------


def plain(x, step, lowest, highest):
    """The definition, on float64 gradients of which none is lost."""
    scaled = x * (1 / step)
    clipped = scaled.clamp(lowest, highest)
    return clipped.round() * step, clipped == scaled


@PROPERTY
@given(
    values=st.lists(numbers, min_size=1, max_size=40),
    bits=st.sampled_from([2, 4]),
    signed=st.booleans(),
)
@example(values=[-0.0, 0.0, math.nan, math.inf, -math.inf], bits=2, signed=True)
def test_rounding_and_its_gradient_are_those_of_the_definition(values, bits, signed):
    quantizer = UniformQuantizer(bits, signed)
    step, lowest, highest = quantizer.step, quantizer.lowest, quantizer.highest
    borders = [level * step for level in (lowest, highest)]
    values += [*borders, *(math.nextafter(b, s * 9) for b in borders for s in (-1, 1))]
    x = torch.tensor(values, requires_grad=True)
    upstream = torch.linspace(-3, 5, len(values))
    found = quantizer(x)
    found.backward(upstream)
    expected, inside = plain(x.detach(), step, lowest, highest)
    assert torch.equal(found.detach().nan_to_num(99), expected.nan_to_num(99))
    assert same_bits(x.grad, upstream * step * inside * (1 / step))


@PROPERTY
@given(st.lists(numbers, min_size=1, max_size=40), st.sampled_from([0.5, 1.0, 1.3]))
def test_the_gradient_of_a_sign_is_that_of_the_definition(values, width):
    x = torch.tensor([*values, width, -width, math.nextafter(width, 0)], requires_grad=True)
    upstream = torch.linspace(-3, 5, len(x))
    quantizers.sign(x, width=width).backward(upstream)
    size = x.detach().double().abs()
    slope = (2 / width * (1 - size / width)).clamp(min=0).nan_to_num(0, 0, 0)
    torch.testing.assert_close(x.grad, (upstream * slope).float(), rtol=1e-6, atol=2e-6)
    outside = size >= width * 1.0001
    assert (x.grad[outside] == 0).all()


@pytest.mark.parametrize("to", [torch.channels_last, torch.contiguous_format])
def test_gradients_may_come_in_another_memory_format(to):
    x = torch.randn(2, 8, 5, 5).requires_grad_()
    upstream = torch.randn(2, 8, 5, 5).to(memory_format=to)
    quantizer = UniformQuantizer(4, True)
    for value in (x, x.to(memory_format=torch.channels_last)):
        (grad,) = torch.autograd.grad(quantizer(value), x, upstream)
        inside = plain(x.detach(), quantizer.step, quantizer.lowest, quantizer.highest)[1]
        assert torch.equal(grad, upstream * quantizer.step * inside * (1 / quantizer.step))


def test_a_gradient_of_the_gradient_can_be_taken():
    x = torch.randn(50, requires_grad=True)
    upstream = torch.ones(50, requires_grad=True)
    (grad,) = torch.autograd.grad(UniformQuantizer(4, False)(x), x, upstream, create_graph=True)
    grad.sum().backward()
    assert upstream.grad.tolist() == grad.tolist()


# -- layers --------------------------------------------------------------------------------------


class Net(nn.Module):
    """Convs of all kinds and linear layers, with quantizers between them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.wide = nn.Sequential(
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.grouped = nn.Sequential(
            nn.Conv2d(32, 32, 3, groups=4, padding=2, dilation=2), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.hidden = nn.Sequential(nn.Linear(32 * 64, 40), nn.ReLU())
        self.last = nn.Linear(40, 10)

    def forward(self, x):
        x = self.wide(self.first(x))
        x = x + self.grouped(x)
        return self.last(self.hidden(x.flatten(1)))


MODES = ["1/32", "1/8", "1/4", "1/2", "1/1", "32/32", "32/8", "32/4"]


def ticketed(bits, **settings):
    torch.manual_seed(0)
    return mptify.transform(Net(), bits=bits, prune=0.7, **settings).train()


def images(requires_grad=False):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(8, 3, 16, 16, generator=generator).requires_grad_(requires_grad)


def gradients(model, x, run=None):
    model.zero_grad(set_to_none=True)
    (run or model)(x).square().sum().backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {**found, "x": x.grad}


@contextlib.contextmanager
def saved_in_full(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(layers, "saved_compactly", lambda *given: contextlib.nullcontext())
        yield


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bits", MODES)
def test_gradients_are_the_same_to_the_bit_as_from_what_autograd_saves(bits, layout, monkeypatch):
    def found():
        x = images().to(memory_format=layout).requires_grad_()
        return gradients(ticketed(bits).to(memory_format=layout), x)

    with saved_in_full(monkeypatch):
        expected = found()
    compactly = found()
    assert compactly.keys() == expected.keys()
    assert all(same_bits(compactly[name], expected[name]) for name in expected)


def saved_bytes(model, x, monkeypatch):
    """By the module's part: what layers save of their operations, and what everything else does."""
    found = {"as it is": 0, "packed": 0, "others": 0}
    seen = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def count(kind, tensor):
        key = tensor.untyped_storage().data_ptr()
        if key not in seen:
            found[kind] += tensor.untyped_storage().nbytes()
        seen.add(key)
        return tensor

    pack = saving._Operands.pack

    def counting(operands, tensor):
        result = pack(operands, tensor)
        if isinstance(result, saving._PackedView):
            count("packed", result.packed)
        else:
            count("as it is", result.tensor)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(saving._Operands, "pack", counting)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: count("others", tensor), lambda tensor: tensor
        ):
            output = model(x)
    return found, output


@pytest.mark.parametrize(("bits", "width"), [("1/1", 1), ("1/2", 2), ("1/4", 4), ("1/8", 8)])
def test_layers_save_inputs_and_weights_in_few_bits(bits, width, monkeypatch):
    model, x = ticketed(bits), images()
    inputs = {"wide.0": 16 * 256, "grouped.0": 32 * 64, "hidden.0": 32 * 64, "last": 40}
    if width == 8:
        inputs |= {"first.0": 3 * 256}
    found, _ = saved_bytes(model, x, monkeypatch)
    codes = sum(-(-8 * count // 256) * 32 * width for count in inputs.values())
    masks = sum(-(-one.count // 256) * 32 for one in mptify.ticket_layers(model).values())
    assert found["packed"] <= codes + masks
    assert found["packed"] >= 0.8 * codes  # which says that they were packed at all
    # The pixels, gains, and the inputs of exempt layers:
    assert found["as it is"] <= 4 * (x.numel() + 8 * 40 + 100)


def test_a_quantizer_saves_a_bit_where_it_clips(monkeypatch):
    x = torch.randn(4096, requires_grad=True)
    saved = []

    def keep(tensor):
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        UniformQuantizer(4, False)(x)
    assert saved == [4096 // 8]


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_what_is_saved_keeps_neither_weights_nor_inputs_alive(bits, monkeypatch):
    model = ticketed(bits)
    seen = []
    conv = nn.Conv2d._conv_forward

    def spy(layer, x, weight, bias):
        storages = [weight.untyped_storage()]
        if bits == "1/1" and layer is not model.get_submodule("first.0"):
            storages.append(x.untyped_storage())
        seen.extend(one.data_ptr() for one in storages)
        return conv(layer, x, weight, bias)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Conv2d, "_conv_forward", spy)
        output = model(images())
    gc.collect()
    alive = {
        one.untyped_storage().data_ptr()
        for one in gc.get_objects()
        if type(one) is torch.Tensor and one.numel() > 400
    }
    assert len(seen) == (3 if bits == "1/32" else 5)
    assert not alive & set(seen)
    output.sum().backward()


def test_inputs_of_several_quantizers_are_saved_as_they_are(monkeypatch):
    """Learned steps differ, so a layer that reads two values sees more than one quantizer's."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("one", "two"):
                setattr(self, name, nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
            self.last = nn.Conv2d(16, 4, 3)

        def forward(self, x):
            return self.last(torch.cat([self.one(x), self.two(x)], 1))

    torch.manual_seed(0)
    model = mptify.transform(Two(), bits="1/4", prune=0.5, learn_clip=True).train()
    with torch.no_grad():
        steps = [one.raw_step for one in model.modules() if isinstance(one, UniformQuantizer)]
        for number, step in enumerate(steps):
            step.mul_(1 + 0.3 * number)
    expected = gradients(copy.deepcopy(model), images(requires_grad=True))
    with saved_in_full(monkeypatch):
        plainly = gradients(model, images(requires_grad=True))
    assert all(same_bits(expected[name], plainly[name]) for name in expected)


# -- the state of a layer --------------------------------------------------------------------------


def test_a_training_step_releases_the_weight_and_the_next_pass_makes_it_again(monkeypatch):
    model = ticketed("1/1")
    layer = model.get_submodule("wide.0")
    mask, weight, gain = layer.mask.clone(), layer.weight.detach().clone(), float(layer.gain)
    model(images())
    assert layer._selection is None
    assert float(layer.gain) == gain
    assert layer._selection is None  # for which the gain is not needed
    selections = []
    with monkeypatch.context() as patch:
        patch.setattr(topk, "select", lambda *args, **settings: selections.append(args))
        model(images())
        assert torch.equal(layer.mask, mask)
        assert same_bits(layer.weight.detach(), weight)
    assert selections == []


@pytest.mark.parametrize("bits", ["1/32", "1/1", "32/32"])
def test_evaluation_keeps_its_weights(bits):
    model = ticketed(bits)
    model(images())
    model.eval()
    layer = model.get_submodule("wide.0")
    kept = layer._selection.effective
    model(images(requires_grad=True)).sum().backward()
    assert layer._selection.effective is kept


def test_scores_changed_between_forward_and_backward_are_noticed():
    model = ticketed("1/1")
    loss = model(images()).sum()
    with torch.no_grad():
        model.get_submodule("wide.0").scores.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place: a \\(32, 16, 3, 3\\) tensor"):
        loss.backward()


@pytest.mark.parametrize("bits", ["1/32", "1/4", "1/1"])
def test_several_forward_passes_before_a_backward_pass(bits, monkeypatch):
    def run(model):
        model.zero_grad(set_to_none=True)
        (model(images()) * model(images() + 1)).sum().backward()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    with saved_in_full(monkeypatch):
        expected = run(ticketed(bits))
    found = run(ticketed(bits))
    assert all(same_bits(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("bits", ["1/32", "1/4", "1/1"])
def test_checkpointing_copies_and_steps_work_after_a_training_step(bits, monkeypatch):
    with saved_in_full(monkeypatch):
        expected = gradients(ticketed(bits), images())
    model = ticketed(bits)
    again = gradients(model, images(), lambda x: checkpoint(model, x, use_reentrant=False))
    assert all(same_bits(again[name], expected[name]) for name in expected if name != "x")
    trained = [one for one in model.parameters() if one.requires_grad]
    torch.optim.SGD(trained, lr=0.1).step()
    other = copy.deepcopy(model)
    assert torch.equal(model.eval()(images()), other.eval()(images()))


def test_autocast_saves_what_it_casts():
    model = ticketed("1/1")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(images()).float().square().sum()
    loss.backward()
    assert all(
        torch.isfinite(layer.scores.grad).all() for layer in mptify.ticket_layers(model).values()
    )


def test_the_layers_tensors_may_be_modified_in_place():
    """A quantizer's output is no view, and may be added to."""
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    for quantizer in (UniformQuantizer(4, False), quantizers.Sign()):
        y = quantizer(x)
        y += 1
        y.sum().backward()


def test_a_model_can_be_collected_while_its_loss_lives():
    model = ticketed("1/1")
    loss = model(images()).sum()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    loss.backward()
