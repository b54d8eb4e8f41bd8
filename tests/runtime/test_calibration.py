"""Finished 1/32 tickets get 8-bit inputs: integer lanes, ranges from images, and what it costs."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mptify
from mptify.errors import BadConfig, MptifyError
from mptify.models import conv2, resnet18_cifar
from mptify.nn.quantizers import RunningQuantizer
from mptify.runtime import compiler
from mptify.runtime.calibration import Batches, Calibration, round_inputs
from mptify.runtime.kernels.lanes_conv import LanesConv
from mptify.runtime.library import library
from tests.helpers.outputs import flat
from tests.nets import Plain, images
from tests.representatives import SOME_QUICK, build

pytestmark = [
    pytest.mark.skipif(library is None, reason="this machine has no C++ compiler"),
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
]


def settled(network, x, bits="1/32", **settings):
    """A ticket model whose norms have seen images."""
    ticketed = mptify.transform(network, bits=bits, prune=0.75, **settings).train()
    with torch.no_grad():
        ticketed(*x)
    return ticketed.eval()


def state_of(model):
    """Everything that a model holds, and the mode of each of its modules."""
    modes = [module.training for module in model.modules()]
    return modes, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def require_state(model, before):
    modes, tensors = before
    assert [module.training for module in model.modules()] == modes
    after = model.state_dict()
    assert after.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(after[name].nan_to_num(), tensor.nan_to_num()), name


@pytest.mark.parametrize("entry", SOME_QUICK)
def test_every_network_that_packs_takes_8_bit_inputs(entry):
    model, inputs = build(entry)
    ticketed = settled(model, inputs, bias="learn")
    x = inputs[:1] if isinstance(inputs[0], list) else inputs  # targets are for training
    before = state_of(ticketed)
    program = mptify.pack(ticketed, x, activation_bits=8, calibrate=[(x,)])
    require_state(ticketed, before)
    rounded, calibration = round_inputs(ticketed, Batches([(x,)]))
    assert program.calibration == calibration
    with torch.no_grad():
        for ours, theirs in zip(flat(program(*x)), flat(rounded(*x)), strict=True):
            if ours.shape != theirs.shape or not ours.is_floating_point() or not ours.numel():
                continue  # a detector's boxes
            size = theirs.abs().max().clamp_min(1e-6)
            assert (ours - theirs).abs().max() <= 2e-2 * size


def test_layers_run_on_integers_as_in_a_ticket_of_8_bits():
    """The same masks, signs, gains and norms, with the same ranges: the same logits to the bit."""
    torch.manual_seed(0)
    x = torch.randn(6, 3, 32, 32)
    network = resnet18_cifar()
    ticketed = settled(network, (x,), bias="learn", learn_bn=True)
    program = mptify.pack(ticketed, activation_bits=8, calibrate=x)
    kernels = [part for part in program.modules() if isinstance(part, LanesConv)]
    assert len(kernels) == 20
    assert {kernel.dtype for kernel in kernels} == {"uint8", "int8"}
    eight = mptify.transform(network, bits="1/8", prune=0.75, bias="learn", learn_bn=True).eval()
    rounded, _ = round_inputs(ticketed, Batches(x))
    ranges = {
        name: tensor for name, tensor in rounded.state_dict().items() if "input_quantizer" in name
    }
    norms = {
        name: tensor
        for name, tensor in ticketed.state_dict().items()
        if not name.endswith((".scores", ".frozen"))
    }
    eight.load_state_dict(norms | ranges, strict=False)
    with torch.no_grad():
        assert torch.equal(program(x), mptify.pack(eight, x)(x))
        difference = (program(x) - ticketed(x)).abs().max() / ticketed(x).abs().max()
    assert 0 < float(difference) <= program.calibration.difference * 1.001 < 0.05


def test_ranges_are_those_of_all_images():
    torch.manual_seed(1)
    x = torch.rand(4, 1, 8, 8)
    x[2] *= 5
    ticketed = settled(conv2(in_chans=1, input_size=8), (x,))
    rounded, _ = round_inputs(ticketed, Batches([x[:2], x[2:]]))
    first = next(module for module in rounded.modules() if isinstance(module, RunningQuantizer))
    assert (float(first.running_low), float(first.running_high)) == (
        min(0, float(x.min())) or float(x.min()),
        float(x.max()),
    )


def test_labels_give_the_accuracy_before_and_after():
    torch.manual_seed(2)
    x = torch.randn(10, 1, 8, 8)
    ticketed = settled(conv2(in_chans=1, input_size=8), (x,))
    with torch.no_grad():
        labels = ticketed(x).argmax(1)
    labels[:3] += 1
    found = mptify.pack(
        ticketed, activation_bits=8, calibrate=[(x[:6], labels[:6]), [x[6:], labels[6:]]]
    )
    calibration = found.calibration
    assert (calibration.images, calibration.float_top1) == (10, 0.7)
    with torch.no_grad():
        assert calibration.top1 == int((found(x).argmax(1) == labels).sum()) / 10
    assert str(calibration).startswith(
        f"10 calibration images: top-1 {100 * calibration.top1:.2f} % with 8-bit inputs, "
        "70.00 % with 32-bit inputs; the same class for "
    )
    found = mptify.pack(ticketed, activation_bits=8, calibrate=x).calibration
    assert (found.top1, found.float_top1) == (None, None)
    assert found.agreement == calibration.agreement
    assert "the same class for 100.00 % of the images; outputs differ by at most" in str(found)
    assert str(Calibration(3, None)) == "3 calibration images: not comparable"


@pytest.mark.parametrize("searched", [True, False])
def test_searched_and_loaded_models_give_the_same_program(searched, tmp_path):
    torch.manual_seed(3)
    x = torch.randn(4, 3, 8, 8)
    ticketed = settled(conv2(input_size=8), (x,), bias="learn")
    mptify.save(ticketed, tmp_path / "a.ticket")
    model = ticketed if searched else mptify.load(tmp_path / "a.ticket", model=conv2(input_size=8))
    with torch.no_grad():
        found = mptify.pack(model, activation_bits=8, calibrate=iter([x[:2], x[2:]]))(x)
        expected = mptify.pack(copy.deepcopy(ticketed), activation_bits=8, calibrate=x)(x)
    assert torch.equal(found, expected)


class Borrows(nn.Module):
    """Multiplies by a layer's weight in its own code, too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.b(F.linear(self.a(x), self.a.weight)) @ self.a.weight


def test_layers_whose_weight_other_code_reads_keep_their_inputs():
    x = torch.randn(5, 6)
    ticketed = settled(Borrows(), (x,))
    rounded, calibration = round_inputs(ticketed, Batches(x))
    assert (rounded.a.activation_bits, rounded.b.activation_bits) == (32, 8)
    assert calibration.difference < 0.05


def test_one_layer_under_two_names_stays_one():
    network = Borrows()
    network.a.weight = network.b.weight
    network.forward = None
    shared = nn.Sequential(network.b, nn.ReLU(), network.b)
    x = torch.randn(5, 6)
    rounded, calibration = round_inputs(settled(shared, (x,)), Batches(x))
    assert rounded[0] is rounded[2]
    assert calibration.difference < 0.05


def test_tied_layers_share_their_weight_and_have_ranges_of_their_own():
    tied = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    tied[2].weight = tied[0].weight
    x = 9 * torch.randn(5, 6)
    rounded, _ = round_inputs(settled(tied, (x,)), Batches(x))
    assert rounded[0].fixed_weight is rounded[2].fixed_weight
    assert rounded[0].input_quantizer.running_low < 0 <= rounded[2].input_quantizer.running_low


def test_without_a_compiler_the_float_path_rounds(monkeypatch):
    x = images()
    ticketed = settled(Plain(), (x,))
    rounded, _ = round_inputs(ticketed, Batches(x))
    monkeypatch.setattr(compiler, "library", None)
    with pytest.warns(UserWarning, match="without a C\\+\\+ compiler"):
        found = mptify.pack(ticketed, activation_bits=8, calibrate=x)
    with torch.no_grad():
        assert torch.equal(found(x), rounded(x))
        assert not torch.equal(found(x), ticketed(x))
    assert found.calibration.images == len(x)


@pytest.mark.parametrize("bits", [4, 1, 32, 8.5, "8", True])
def test_other_bits_are_refused(bits):
    ticketed = settled(Plain(), (images(),))
    with pytest.raises(
        BadConfig, match=f"activation_bits={bits!r}: a finished ticket can be given"
    ):
        mptify.pack(ticketed, images(), activation_bits=bits, calibrate=images())


@pytest.mark.parametrize("bits", ["1/8", "1/4", "1/1", "32/32"])
def test_other_tickets_are_refused(bits):
    ticketed = settled(Plain(), (images(),), bits=bits)
    with pytest.raises(BadConfig, match=f"is for 1/32 tickets, and this one has bits={bits}"):
        mptify.pack(ticketed, images(), activation_bits=8, calibrate=images())


@pytest.mark.parametrize(
    ("calibrate", "told"),
    [
        (None, "needs calibrate=images: a tensor of images or an iterable of batches, not None"),
        (3, "not 3"),
        ("images", "not 'images'"),
        ({"images": 3}, "not {'images': 3}"),
        (torch.tensor(3.0), "not tensor"),
        (torch.zeros(0, 3, 12, 12), "calibrate has no images"),
        ([], "calibrate has no images"),
        (iter(()), "calibrate has no images"),
        ([torch.zeros(0, 3, 12, 12)], "calibrate has no images"),
        ([3], "a batch is a tensor of images, or a tuple whose first element is one, not 3"),
        ([()], "calibrate has no images"),
        (torch.zeros(2, 1, 12, 12), "can't take calibration images of 2×1×12×12"),
        (torch.zeros(2, 3, 1, 1), "can't take calibration images of 2×3×1×1"),
    ],
)
def test_images_that_are_none_are_refused(calibrate, told):
    ticketed = settled(Plain(), (images(),))
    with pytest.raises(MptifyError, match=told):
        mptify.pack(ticketed, images(), activation_bits=8, calibrate=calibrate)


def test_images_without_a_wish_are_refused():
    with pytest.raises(BadConfig, match=r"calibrate=\.\.\. is for activation_bits=8"):
        mptify.pack(settled(Plain(), (images(),)), images(), calibrate=images())
