"""The invariants of the design on hand-made networks, each with one nasty habit."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import mptify
from mptify.models.registry import training_loss
from mptify.surgery import layer_registry
from mptify.surgery.invariants import (
    bad_gradients,
    real_inputs,
    unnormalised_quantizers,
    wrongly_trainable,
)
from tests.nets import (
    NASTY,
    Attention,
    FunctionalEverything,
    Plain,
    TiedWeights,
    TrainOnlyBranch,
    UsedTwice,
    conv,
    images,
)

MODES = ["1/32", "1/1", "32/32", "32/1"]


@pytest.fixture(params=NASTY, ids=str)
def net(request):
    return NASTY[request.param]()


def seeded(model, x):
    torch.manual_seed(3)
    return model(x)


def same(ours, theirs):
    ours, theirs = ([one] if isinstance(one, torch.Tensor) else list(one) for one in (ours, theirs))
    return all(
        torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True) if a is not None
    )


@pytest.mark.parametrize("bits", MODES)
def test_every_layer_but_the_exempt_sees_only_signs_and_all_scores_get_gradients(net, bits):
    ticketed = mptify.transform(net, bits=bits, prune=0.5).train()
    outputs = []
    ran, real = real_inputs(ticketed, lambda: outputs.append(ticketed(images())))
    assert ran == {layer.tied_to or layer.name for layer in ticketed.ticket_plan.layers}
    if bits.endswith("/1"):
        exempt = {layer.name for layer in ticketed.ticket_plan.layers if layer.input.is_exempt}
        assert real <= exempt
    assert unnormalised_quantizers(ticketed) == []
    assert wrongly_trainable(ticketed) == []
    training_loss(outputs[0]).backward()
    assert bad_gradients(ticketed) == {}


@pytest.mark.parametrize("training", [False, True])
def test_the_null_surgery_is_the_identity(net, training):
    same_net = mptify.transform(net, bits="32/32", prune=0, init="keep", bias="learn")
    net.train(training), same_net.train(training)
    assert same(seeded(same_net, images()), seeded(net, images()))


@pytest.mark.parametrize("bits", MODES)
def test_every_weight_is_accounted_for(net, bits):
    plan = mptify.plan(net, bits=bits)
    weights = {id(p): p.numel() for p in net.parameters() if p.dim() > 1}
    assert plan.total == sum(weights.values())
    assert plan.left_dense == []


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_copies_and_state_dicts_carry_everything(net, bits):
    ticketed = mptify.transform(net, bits=bits, prune=0.5, seed=1)
    seeded(ticketed.train(), images())
    twin = copy.deepcopy(ticketed)
    other = mptify.transform(net, bits=bits, prune=0.5, seed=2)
    other.load_state_dict(ticketed.state_dict())
    expected = ticketed.eval()(images())
    assert all(same(one.eval()(images()), expected) for one in (twin, other))
    expected = seeded(ticketed.train(), images())
    assert all(same(seeded(one.train(), images()), expected) for one in (twin, other))
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in ticketed.parameters()}


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_a_model_can_be_pickled_whole_and_runs_alike_in_both_modes(net, bits):
    ticketed = mptify.transform(net, bits=bits, prune=0.5)
    again = pickle.loads(pickle.dumps(ticketed))
    for mode in (False, True):
        torch.manual_seed(0)
        wanted = ticketed.train(mode)(images())
        torch.manual_seed(0)
        assert same(again.train(mode)(images()), wanted)


def test_the_callers_model_stays_as_it_was(net):
    net.train()
    next(net.children(), net).eval()
    modes = [part.training for part in net.modules()]
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    attributes = [dict(part.__dict__) for part in net.modules()]
    types = [type(part) for part in net.modules()]
    mptify.transform(net, bits="1/1")
    assert [part.training for part in net.modules()] == modes
    assert [type(part) for part in net.modules()] == types
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert [set(dict(part.__dict__)) for part in net.modules()] == [set(one) for one in attributes]
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_the_modes_of_single_parts_are_carried_over(net):
    net.eval()
    ticketed = mptify.transform(net, bits="1/32")
    assert not any(part.training for part in ticketed.modules())
    assert not any(part.training for part in mptify.transform(net, bits="1/1").modules())


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_a_model_on_meta_converts(net, bits):
    ticketed = mptify.transform(net.to("meta"), bits=bits, prune=0.75)
    assert all(layer.scores.is_meta for layer in mptify.ticket_layers(ticketed).values())
    assert mptify.summary(ticketed).converted > 0


def test_tied_weights_share_one_ticket():
    ticketed = mptify.transform(TiedWeights(), bits="1/32", prune=0.5)
    first, second = ticketed.first, ticketed.second
    assert first.scores is second.scores
    assert first.frozen is second.frozen
    assert mptify.summary(ticketed).converted == 8 * 27 + 8 * 72 + 80
    with torch.no_grad():
        first.scores.neg_().mul_(torch.rand_like(first.scores))
    assert torch.equal(first.mask, second.mask)


def test_a_module_used_twice_stays_one_module():
    ticketed = mptify.transform(UsedTwice(), bits="1/32", prune=0.5)
    assert ticketed.body is ticketed.alias


def test_bare_parameters_are_reached_by_their_old_names():
    ticketed = mptify.transform(FunctionalEverything(), bits="1/32", prune=0.5)
    kernel = mptify.ticket_layers(ticketed)["kernel"]
    assert torch.equal(ticketed.kernel, kernel.ticket_weight())
    assert int((ticketed.kernel != 0).sum()) == 108


def test_aux_heads_appear_in_train_mode_only():
    ticketed = mptify.transform(TrainOnlyBranch(), bits="1/1", prune=0.5)
    assert isinstance(ticketed.train()(images()), tuple)
    assert isinstance(ticketed.eval()(images()), torch.Tensor)
    assert isinstance(copy.deepcopy(ticketed).train()(images()), tuple)


def test_a_lazy_module_must_have_run_once():
    net = nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    with pytest.raises(mptify.CannotConvert, match="run one batch through the model first"):
        mptify.transform(net)
    net(images())
    ticketed = mptify.transform(net, bits="1/1")
    assert ticketed(images()).shape == (4, 10)


def test_a_model_without_any_conv_is_told_so():
    with pytest.raises(mptify.NothingToConvert, match="no conv or linear weight"):
        mptify.transform(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))


def test_integer_weights_are_told_so():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(mptify.CannotConvert, match="int8"):
        mptify.transform(nn.Sequential(layer))


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")
def test_a_really_quantized_model_is_told_so():
    quantized = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, torch.qint8
    )
    with pytest.raises(mptify.CannotConvert, match="integer weights"):
        mptify.transform(quantized)


def test_a_parametrized_weight_is_converted_as_what_it_computes():
    layer = parametrizations.weight_norm(nn.Linear(6, 5))
    net = nn.Sequential(layer)
    null = mptify.transform(net, bits="32/32", prune=0, init="keep", bias="learn")
    x = torch.randn(3, 6)
    assert torch.allclose(null(x), net(x), atol=1e-6)
    assert not parametrize.is_parametrized(null[0])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_a_hook_recomputes_is_left_and_named():
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 5)), nn.Linear(5, 4))
    plan = mptify.plan(net)
    assert [(left.name, left.reason) for left in plan.left_dense] == [
        ("0", "a hook recomputes its weight")
    ]
    with pytest.raises(mptify.LeftDense, match="0 would stay dense"):
        mptify.transform(net, strict=True)


@pytest.mark.parametrize(
    "options", [{}, {"kdim": 6, "vdim": 5}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str
)
@pytest.mark.parametrize("need_weights", [True, False])
def test_cross_attention_with_masks_equals_torchs_when_nothing_is_binarized(options, need_weights):
    """The 1/1 attention, its signs taken out, against torch's own on the same effective weights."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
    null = mptify.transform(
        nn.ModuleDict({"a": attention}), bits="1/1", prune=0.5, bias="learn", init="keep"
    )["a"]
    plain = copy.deepcopy(attention)
    with torch.no_grad():
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            ticket = getattr(null, f"{name}_ticket", None)
            if ticket is not None:
                getattr(plain, name).copy_(ticket.ticket_weight())
                ticket.input_quantizer = None
        plain.out_proj.weight.copy_(null.out_proj.ticket_weight())
        null.out_proj.input_quantizer = None
        null.key_quantizer = null.value_quantizer = None
    query = torch.randn(3, 5, 8)
    key, value = (
        torch.randn(3, 7, options.get("kdim", 8)),
        torch.randn(3, 7, options.get("vdim", 8)),
    )
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[:, -1] = True
    mask = torch.randn(5, 7)
    ours = null(
        query,
        key,
        value,
        key_padding_mask=padding.float().masked_fill(padding, -torch.inf),
        attn_mask=mask,
        need_weights=need_weights,
    )
    theirs = plain(
        query,
        key,
        value,
        key_padding_mask=padding.float().masked_fill(padding, -torch.inf),
        attn_mask=mask,
        need_weights=need_weights,
    )
    assert torch.allclose(ours[0], theirs[0], atol=1e-5)
    if need_weights:
        assert torch.allclose(ours[1], theirs[1], atol=1e-5)


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_a_single_layer_is_a_model_too(bits):
    assert list(mptify.ticket_layers(mptify.transform(nn.Linear(3, 4), bits=bits))) == [""]


def test_a_classifier_called_norm_is_not_taken_for_a_norm():
    class NormedLinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, x):
            return nn.functional.normalize(x) @ nn.functional.normalize(self.weight).t()

    net = nn.Sequential(nn.Linear(6, 8), NormedLinear())
    assert torch.equal(mptify.transform(net)[1].weight, net[1].weight)


def test_what_a_layer_with_weights_made_of_pixels_is_no_longer_pixels():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory, self.middle, self.head = (
                nn.LSTM(6, 8, batch_first=True),
                nn.Linear(8, 8),
                nn.Linear(8, 3),
            )

        def forward(self, x):
            return self.head(torch.tanh(self.middle(self.memory(x)[0])))

    plan = mptify.plan(Recurrent(), bits="1/1")
    assert "pixels" not in {layer.input.value for layer in plan.layers}


def test_a_buffer_joined_to_signs_makes_the_input_real():
    class WithGrid(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.body = nn.Conv2d(3, 8, 1), nn.Conv2d(9, 4, 1)
            self.register_buffer(
                "grid", torch.linspace(-1, 1, 256).view(1, 1, 16, 16).repeat(4, 1, 1, 1)
            )

        def forward(self, x):
            return self.body(torch.cat([torch.relu(self.stem(x)), self.grid], 1))

    ticketed = mptify.transform(WithGrid(), bits="1/1")
    assert real_inputs(ticketed, lambda: ticketed(images()))[1] == {"stem"}


def test_a_value_joined_to_itself_counts_twice():
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.body = nn.Conv2d(3, 8, 1), nn.Conv2d(16, 4, 1)

        def forward(self, x):
            x = self.stem(x)
            return self.body(torch.relu(torch.cat([x, x], 1)))

    assert mptify.transform(Doubled(), bits="1/1")(images()).shape == (4, 4, 16, 16)


def test_tracing_changes_no_buffer_of_the_callers_model():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps += 1
            return torch.relu(self.layer(x))

    net = Counting()
    ticketed = mptify.transform(net, bits="1/1")
    assert net.steps == 0
    ticketed(torch.randn(4, 3))
    assert ticketed.steps == 1


def test_sites_that_only_one_mode_has_do_not_shift_the_others():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.x, self.b, self.c = (
                nn.Linear(3, 8),
                nn.Linear(8, 6),
                nn.Linear(8, 8),
                nn.Linear(8, 2),
            )

        def forward(self, x):
            h = torch.relu(self.a(x))
            aux = None
            if self.training:
                aux = torch.relu(self.x(h))
            out = self.c(torch.relu(self.b(h)))
            return (out, aux) if self.training else out

    ticketed = mptify.transform(Shifted(), bits="1/1")
    behind = {}
    for mode, graph in ticketed._graphs.items():
        (b,) = [node for node in graph.nodes if node.target == "b"]
        behind[mode] = next(iter(b.users)).target
    assert behind[True] == behind[False]
    ticketed.train()(torch.randn(4, 3))
    ticketed.eval()(torch.randn(4, 3))


def test_inserted_modules_take_names_of_their_own():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = conv(3, 8), conv(8, 8), conv(8, 4)
            self.relu, self.relu_1, self.relu_norm = nn.ReLU(), nn.ReLU(), nn.GroupNorm(2, 8)

        def forward(self, x):
            x = self.relu_norm(self.relu(self.a(x)))
            return self.relu_1(self.c(self.relu(self.b(x))))

    ticketed = mptify.transform(Named(), bits="1/1")
    targets = [node.target for node in ticketed.graph.nodes if node.op == "call_module"]
    assert len(targets) == len(set(targets))
    assert isinstance(ticketed.relu_norm, nn.GroupNorm)
    assert unnormalised_quantizers(ticketed) == []


def test_hooks_go_on_being_called():
    calls = []
    net = Plain()
    net.register_forward_pre_hook(lambda *_: calls.append("whole"))
    net.features.register_forward_hook(lambda *_: calls.append("features"))
    ticketed = mptify.transform(net, bits="1/1")
    assert calls == []
    ticketed(images())
    assert calls == ["whole", "features"]


def test_an_activation_in_place_whose_result_is_ignored_still_acts():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, x):
            y = self.a(x)
            nn.functional.relu_(y)
            return self.b(y)

    seen = []
    ticketed = mptify.transform(InPlace(), bits="1/32", bn="insert")
    ticketed.b.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    ticketed(torch.randn(4, 3))
    assert (seen[0] >= 0).all()


def test_layers_can_be_called_by_keyword():
    class ByKeyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x):
            return self.layer(input=x)

    assert mptify.transform(ByKeyword())(torch.randn(2, 3)).shape == (2, 4)


def test_a_functional_call_keeps_its_own_options_and_bias():
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = conv(3, 8), nn.Conv2d(8, 2, 3)

        def forward(self, x):
            return nn.functional.conv2d(torch.relu(self.a(x)), self.b.weight, stride=2, padding=1)

    net = Strided()
    ticketed = mptify.transform(net, bits="1/1", bias="learn", init="keep")
    with torch.no_grad():
        ticketed.b.output_bias.fill_(100.0)
    output = ticketed(images())
    assert output.shape == net(images()).shape == (4, 2, 8, 8)
    assert output.abs().max() < 100


@pytest.mark.parametrize("part", ["attention.out_proj", "attention.in_proj_weight"])
def test_attention_is_converted_whole_or_not_at_all(part):
    plan = mptify.plan(Attention(batch_first=True), bits="1/1", exclude=part)
    assert {left.name for left in plan.left_dense} == {
        "attention.out_proj",
        "attention.in_proj_weight",
    }


def test_weights_of_their_own_count_in_the_packed_size():
    net = nn.Sequential(nn.Linear(64, 64))
    sizes = [
        mptify.summary(mptify.transform(net, bits=bits, prune=0.5, init="keep")).packed_bytes
        for bits in ("1/32", "32/32")
    ]
    assert sizes == [64 * 64 // 8 + 64 * 32 // 8 + 4, 64 * 64 // 8 + 64 * 32 * 4 + 4]


class TokenDense(nn.Module):
    """A linear layer of somebody else's, whose last dimension is the channels."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 6))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x @ self.kernel.T + self.bias


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.dense = nn.Linear(6, 6), TokenDense()

    def forward(self, x):
        x = self.first(x)
        return self.dense(x) if float(x.detach().sum()) < 1e9 else x


@pytest.mark.parametrize("bits", ["1/1", "1/4", "1/8"])
def test_a_registered_layer_in_untraced_code_is_normalised_along_its_own_channels(bits):
    @mptify.register(TokenDense)
    def describe(layer):
        return mptify.Handler(weight="kernel", inputs=6, outputs=4, axis=-1, fan_in=6)

    try:
        ticketed = mptify.transform(Untraceable(), bits=bits, prune=0.5, bias="learn").train()
        assert ticketed(torch.randn(2, 7, 6)).shape == (2, 7, 4)  # 7 tokens of 6 channels
    finally:
        layer_registry._REGISTERED.pop(TokenDense)
