"""Networks whose code does something that few do: each found by trying to break the pass."""

import collections
import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mptify
from mptify.surgery.invariants import real_inputs, unnormalised_quantizers
from tests.nets import Plain, conv, images


class Net(nn.Module):
    """A network from its parts and a function."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


@torch.fx.wrap
def hand_over(x, weight):
    return F.linear(x, weight)


@torch.fx.wrap
def hand_over_transposed(x, weight):
    return x @ weight.t()


@torch.fx.wrap
def hand_over_grouped(x, weight):
    return F.conv2d(x, weight, padding=1, groups=2)


def vectors(count=4, size=6):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(5))


# -- weights that leave their layer ------------------------------------------------------------------------------------


def test_a_weight_handed_to_a_function_meets_signs_and_its_gain():
    net = Net(
        lambda self, x: hand_over(self.a(x), self.b.weight),
        a=nn.Linear(6, 8),
        b=nn.Linear(8, 3, bias=False),
    )
    ticketed = mptify.transform(net, bits="1/1", prune=0.5)
    assert real_inputs(ticketed, lambda: ticketed(vectors())) == ({"a", "b"}, {"a"})
    ticketed.eval()
    signs = ticketed.b.input_quantizer(ticketed.a(vectors()))
    torch.testing.assert_close(ticketed(vectors()), F.linear(signs, ticketed.b.ticket_weight()))


def test_a_layer_both_called_and_robbed_of_its_weight_counts_its_gain_once():
    net = Net(
        lambda self, x: self.b(self.a(x)) + hand_over(self.a(x), self.b.weight),
        a=nn.Linear(6, 8),
        b=nn.Linear(8, 3, bias=False),
    )
    ticketed = mptify.transform(net, bits="1/1", prune=0.5).eval()
    assert real_inputs(ticketed, lambda: ticketed(vectors())) == ({"a", "b"}, {"a"})
    torch.testing.assert_close(
        ticketed(vectors()),
        2 * F.linear(ticketed.b.input_quantizer(ticketed.a(vectors())), ticketed.b.ticket_weight()),
    )


def test_a_weight_read_by_code_that_cannot_be_traced_meets_signs_too():
    def forward(self, x):
        return F.linear(self.a(x), self.b.weight) if x.sum() < 1e9 else x

    ticketed = mptify.transform(
        Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3, bias=False)), bits="1/1", prune=0.5
    )
    assert real_inputs(ticketed, lambda: ticketed(vectors())) == ({"a", "b"}, {"a"})


def test_a_weight_that_goes_where_no_input_can_be_binarized_is_refused_when_it_runs():
    net = Net(
        lambda self, x: hand_over_transposed(self.a(x), self.b.weight),
        a=nn.Linear(6, 8),
        b=nn.Linear(8, 3, bias=False),
    )
    with pytest.raises(mptify.CannotConvert, match=r"b: its weight goes into t\(\).*exclude='b'"):
        mptify.transform(net, bits="1/1")(vectors())
    assert mptify.transform(net, bits="1/32")(vectors()).shape == (4, 3)
    assert mptify.transform(net, bits="1/1", exclude="b")(vectors()).shape == (4, 3)


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_a_weight_turned_before_its_use_stays_dense_where_inputs_would_have_to_be_signs(bits):
    net = Net(
        lambda self, x: torch.relu(self.a(x)) @ self.b.weight.t() + self.b.bias,
        a=nn.Linear(6, 8),
        b=nn.Linear(8, 3),
    )
    ticketed = mptify.transform(net, bits=bits, bias="learn")
    assert ticketed(vectors()).shape == (4, 3)
    assert {left.name for left in ticketed.ticket_plan.left_dense} == (
        {"b"} if bits == "1/1" else set()
    )


def test_a_bias_read_by_itself_keeps_its_layer_dense_where_biases_are_dropped():
    net = Net(
        lambda self, x: torch.relu(self.a(x)) @ self.b.weight.t() + self.b.bias,
        a=nn.Linear(6, 8),
        b=nn.Linear(8, 3),
    )
    ticketed = mptify.transform(net)
    assert [left.reason for left in ticketed.ticket_plan.left_dense] == [
        "its bias is read by other code than its own"
    ]
    assert ticketed(vectors()).shape == (4, 3)


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_a_weight_fetched_early_is_still_the_tickets(bits):
    def forward(self, x):
        weight, bias = self.b.weight, self.b.bias
        x = torch.relu(self.a(x))
        return F.linear(x, weight, bias)

    ticketed = mptify.transform(
        Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3)), bits=bits, bias="learn"
    )
    assert ticketed.ticket_plan.left_dense == []
    assert ticketed(vectors()).shape == (4, 3)


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_a_transposed_conv_on_a_bare_parameter_is_converted(bits):
    net = Net(
        lambda self, x: F.conv_transpose2d(torch.relu(self.a(x)), self.kernel, stride=2),
        a=conv(3, 8),
        kernel=nn.Parameter(torch.randn(8, 4, 2, 2)),
    )
    ticketed = mptify.transform(net, bits=bits, prune=0.5)
    assert {layer.name for layer in ticketed.ticket_plan.layers} == {"a", "kernel"}
    outputs = []
    ran, real = real_inputs(ticketed, lambda: outputs.append(ticketed(images())))
    assert ran == {"a", "kernel"}
    assert outputs[0].shape == (4, 4, 32, 32)
    if bits == "1/1":
        assert real == {"a"}
    null = mptify.transform(net, bits="32/32", prune=0, init="keep", bias="learn")
    torch.testing.assert_close(null(images()), net(images()))


def test_a_parameter_multiplied_without_a_layer_is_listed():
    net = Net(
        lambda self, x: self.a(x) @ self.matrix,
        a=nn.Linear(6, 8),
        matrix=nn.Parameter(torch.randn(8, 3)),
    )
    (left,) = mptify.plan(net).left_dense
    assert (left.name, left.count) == ("matrix", 24)
    assert "matmul" in left.reason


def test_a_table_that_is_only_looked_up_by_a_product_is_no_weight():
    """timm's MaxViT in the Tensorflow flavour makes its position biases so."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, 6))
            self.register_buffer("lookup", torch.eye(6))
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.b(
                self.a(x) + torch.einsum("ij,jk->ik", self.lookup, self.table)[: x.shape[0]]
            )

    plan = mptify.plan(Table())
    assert [layer.name for layer in plan.layers] == ["a", "b"]
    assert not plan.left_dense


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_convs_that_each_sample_mixes_for_itself_become_one_ticket(groups):
    from timm.layers import CondConv2d

    def forward(self, x):
        x = self.relu(self.norm(self.a(x)))
        return self.last(self.mixed(x, torch.sigmoid(self.route(x.mean((2, 3))))).mean((2, 3)))

    net = Net(
        forward,
        a=conv(3, 8),
        norm=nn.BatchNorm2d(8),
        relu=nn.ReLU(),
        route=nn.Linear(8, 4),
        mixed=CondConv2d(8, 16, 3, padding=1, groups=groups, num_experts=4),
        last=nn.Linear(16, 3),
    )
    plan = mptify.plan(net, bits="1/1", prune=0.5)
    assert not plan.left_dense
    assert next(layer for layer in plan.layers if layer.name == "mixed").depthwise == (groups == 8)
    binary = mptify.transform(net, bits="1/1", prune=0.5)
    ran, real = real_inputs(binary, lambda: binary(images()))
    assert ran == {"a", "route", "mixed", "last"}
    assert "mixed" not in real
    binary(images()).square().sum().backward()
    assert binary.mixed.scores.grad.abs().sum() > 0
    same = mptify.transform(net.eval(), bits="32/32", prune=0.0, init="keep", bias="learn")
    torch.testing.assert_close(same(images()), net(images()), rtol=0, atol=0)


def test_a_grouped_conv_on_a_bare_parameter_binarizes_all_of_its_input():
    """Where the weight is used in code that can't be traced, the norm before it is the ticket's own, and as wide as the input."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(8, 3, 3, 3))

        def forward(self, x):
            return hand_over_grouped(x, self.kernel) + F.conv2d(x, self.kernel, padding=1, groups=2)

    net = Net(lambda self, x: self.part(self.a(x)), a=conv(3, 6), part=Part())
    ticketed = mptify.transform(net, bits="1/1", prune=0.5)
    assert real_inputs(ticketed, lambda: ticketed(images())) == ({"a", "part.kernel"}, {"a"})


def test_a_weight_shared_with_an_embedding_is_left_and_named():
    net = Net(
        lambda self, x: self.head(self.middle(self.words(x))),
        words=nn.Embedding(10, 6),
        middle=nn.Linear(6, 6),
        head=nn.Linear(6, 10),
    )
    net.head.weight = net.words.weight
    ticketed = mptify.transform(net)
    assert ticketed.head.weight is ticketed.words.weight
    assert ticketed.words.weight is not net.words.weight
    assert [(left.name, left.reason) for left in ticketed.ticket_plan.left_dense] == [
        ("head", "shared with words.weight, which is not a layer's")
    ]


# -- attention and transformers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
@pytest.mark.parametrize("bias", ["drop", "learn"])
def test_torchs_transformer_encoder_runs_with_padding(bits, bias):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    ticketed = mptify.transform(nn.TransformerEncoder(layer, 2), bits=bits, prune=0.5, bias=bias)
    x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    padding[:, -1] = True
    ticketed(x, src_key_padding_mask=padding)
    ticketed.eval()
    with torch.no_grad():
        quick = ticketed(x, src_key_padding_mask=padding)
        _, real = real_inputs(ticketed, lambda: ticketed(x, src_key_padding_mask=padding))
    torch.testing.assert_close(quick, ticketed(x, src_key_padding_mask=padding))
    if bits == "1/1":
        assert real <= {
            layer.name for layer in ticketed.ticket_plan.layers if layer.input.is_exempt
        }


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_attention_alone_is_a_model_too(bits):
    ticketed = mptify.transform(nn.MultiheadAttention(8, 2, batch_first=True), bits=bits, prune=0.5)
    assert set(mptify.ticket_layers(ticketed)) == {"in_proj_weight", "out_proj"}
    x = torch.randn(2, 3, 8)
    assert ticketed(x, x, x)[0].shape == x.shape


def test_queries_keys_and_values_of_different_origin_have_norms_of_their_own():
    """In eval() each is then normalised as it was in training; one norm for all three would mix their statistics."""
    net = Net(
        lambda self, x: self.attend(self.a(x), self.b(x) + 3, self.b(x) - 3)[0],
        a=nn.Linear(6, 8),
        b=nn.Linear(6, 8),
        attend=nn.MultiheadAttention(8, 2, batch_first=True),
    )
    ticketed = mptify.transform(net, bits="1/1", prune=0.5)
    assert unnormalised_quantizers(ticketed) == []
    tokens = torch.randn(32, 10, 6, generator=torch.Generator().manual_seed(3))
    for _ in range(60):
        ticketed.train()(tokens)
    seen = {
        name: ticketed.get_submodule(f"{name}.0.norm").running_mean
        for name in ("attend.key_quantizer", "attend.value_quantizer")
    }
    read = ticketed.b(tokens).mean((0, 1)).detach()
    torch.testing.assert_close(seen["attend.key_quantizer"], read + 3, rtol=0.01, atol=0.01)
    torch.testing.assert_close(seen["attend.value_quantizer"], read - 3, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_attention_to_oneself_has_one_norm(layer):
    ticketed = mptify.transform(layer(8, 2, 16), bits="1/1", prune=0.5)
    assert "self_attn.key_quantizer" not in dict(ticketed.named_modules())
    assert ("multihead_attn.key_quantizer" in dict(ticketed.named_modules())) == (
        layer is nn.TransformerDecoderLayer
    )


def test_unbatched_attention_takes_a_padding_mask():
    ticketed = mptify.transform(nn.MultiheadAttention(8, 2), bits="1/1", prune=0.5).eval()
    x, padding = torch.randn(5, 8), torch.tensor([False, False, False, False, True])
    together = ticketed(x[:, None], x[:, None], x[:, None], key_padding_mask=padding[None])
    alone = ticketed(x, x, x, key_padding_mask=padding)
    torch.testing.assert_close(alone[0], together[0][:, 0])
    torch.testing.assert_close(alone[1], together[1][0])


# -- what is known of values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "exempt"), [(1, True), ((1, 1), True), (2, False), ((2, 2), False)]
)
def test_only_pooling_to_one_value_makes_pooled_features(size, exempt):
    count = 8 if exempt else 32
    net = Net(
        lambda self, x: self.b(F.adaptive_avg_pool2d(self.a(x), size).flatten(1)),
        a=conv(3, 8),
        b=nn.Linear(count, 2),
    )
    before = {layer.name: layer.input.value for layer in mptify.plan(net, bits="1/1").layers}
    assert (before["b"] == "pooled features") is exempt


def test_the_end_of_a_part_is_not_the_end_of_the_network():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)

        def forward(self, x):
            return x * torch.sigmoid(self.up(self.down(x.mean((2, 3))))[:, :, None, None])

    def forward(self, x):
        x = self.gate(self.a(x))
        return self.head(x.mean((2, 3))) if x.sum() < 1e9 else x

    before = {
        layer.name: layer.input.value
        for layer in mptify.plan(
            Net(forward, a=conv(3, 8), gate=Gate(), head=nn.Linear(8, 2)), bits="1/1"
        ).layers
    }
    assert "pooled" not in before["gate.up"]


# -- state, types, modes -----------------------------------------------------------------------------------------------


def test_state_that_forward_never_uses_is_kept():
    net = Plain()
    net.register_buffer("mean", torch.tensor([0.5]))
    net.features.register_buffer("scale", torch.ones(3))
    net.spare = nn.Linear(4, 5)
    ticketed = mptify.transform(net, bits="1/1")
    assert {"mean", "features.scale", "spare.weight", "spare.bias"} <= set(ticketed.state_dict())
    assert {"mean", "features.scale", "spare.weight"} <= set(copy.deepcopy(ticketed).state_dict())
    assert [left.name for left in ticketed.ticket_plan.left_dense] == ["spare"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_inserted_norms_have_the_models_own_type(dtype):
    ticketed = mptify.transform(Plain().to(dtype), bits="1/1")
    assert ticketed(images().to(dtype)).dtype == dtype


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_scripted_parts_stay_dense_and_are_named():
    part = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    net = nn.Sequential(nn.Linear(6, 8), part, nn.Linear(8, 2))
    ticketed = mptify.transform(net, bits="1/1")
    assert [(left.name, left.count) for left in ticketed.ticket_plan.left_dense] == [("1.0", 64)]
    assert "TorchScript" in ticketed.ticket_plan.left_dense[0].reason
    assert ticketed(vectors()).shape == (4, 2)


def test_what_the_caller_froze_stays_frozen():
    net = Plain()
    net.features[0].requires_grad_(False)
    net.register_parameter("fixed", nn.Parameter(torch.ones(3), requires_grad=False))
    ticketed = mptify.transform(net, exclude="features.0")
    assert not ticketed.features[0].weight.requires_grad
    assert not ticketed.fixed.requires_grad
    assert ticketed.features[3].scores.requires_grad


def test_a_ticket_model_is_not_converted_again():
    with pytest.raises(mptify.CannotConvert, match="already a ticket model"):
        mptify.transform(mptify.transform(Plain()))


def test_activations_kept_in_lists_do_not_stop_the_copy():
    net = Plain()
    net.cache = [net(images())]
    net.table = {"last": (net.cache[0] * 2,)}
    assert mptify.transform(net, bits="1/1")(images()).shape == (4, 10)


def test_adding_in_place_after_a_sign_does_not_disturb_backward():
    def forward(self, x):
        x = self.norm(self.a(x))
        y = torch.relu(x)
        z = self.b(y)
        x = x.add_(z)
        return self.c(torch.relu(x))

    net = Net(forward, a=conv(3, 8), norm=nn.BatchNorm2d(8), b=conv(8, 8), c=conv(8, 4))
    ticketed = mptify.transform(net, bits="1/1")
    ticketed(images()).sum().backward()
    assert unnormalised_quantizers(ticketed) == []


def test_keyword_arguments_of_any_name_pass_through():
    class Open(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)

        def forward(self, x, **options):
            return self.b(torch.relu(self.a(x))) * options.get("scale", 1)

    ticketed = mptify.transform(Open(), bits="1/1").eval()
    torch.testing.assert_close(ticketed(vectors(), scale=3), 3 * ticketed(vectors()))


def test_an_optional_argument_can_be_given():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)

        def forward(self, x, scale=None):
            x = torch.relu(self.a(x))
            return self.b(x if scale is None else x * scale)

    ticketed = mptify.transform(Optional(), bits="1/1").eval()
    assert ticketed(vectors()).shape == (4, 2)
    with pytest.raises(mptify.MptifyError, match=r"'scale'.*its default"):
        ticketed(vectors(), 2.0)


def test_channels_that_hardly_vary_do_not_blow_up_the_gradients():
    """Depthwise filters without survivors behind squeeze-and-excitation gates: a norm before a sign must not divide by nothing."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.expand, self.norm1 = nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32)
            self.depthwise, self.norm2 = conv(32, 32, groups=32, bias=False), nn.BatchNorm2d(32)
            self.squeeze, self.excite = nn.Conv2d(32, 4, 1), nn.Conv2d(4, 32, 1)
            self.mix, self.norm3 = nn.Conv2d(32, 16, 1), nn.BatchNorm2d(16)

        def forward(self, x):
            y = torch.relu(self.norm2(self.depthwise(torch.relu(self.norm1(self.expand(x))))))
            gate = torch.sigmoid(
                self.excite(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True))))
            )
            return x + self.norm3(self.mix(y * gate))

    ticketed = mptify.transform(
        nn.Sequential(conv(3, 16), *[Gated() for _ in range(20)], nn.Conv2d(16, 4, 1)),
        bits="1/1",
        prune=0.75,
    )
    ticketed(images()).mean((2, 3)).square().sum().backward()
    assert (
        max(
            float(layer.scores.grad.abs().max())
            for layer in mptify.ticket_layers(ticketed).values()
        )
        < 1e4
    )


# -- inputs that have defaults -------------------------------------------------------------------------------------------------


class Optional(nn.Module):
    """As Hugging Face's models are called: every argument has a default, and outputs are a dictionary with attributes."""

    def __init__(self):
        super().__init__()
        self.net = Plain()

    def forward(self, pixel_values=None, labels=None, return_dict=None):
        if pixel_values is None:
            raise ValueError("You have to specify pixel_values")
        logits = self.net(pixel_values)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Output(loss=loss, logits=logits) if return_dict is None else (logits,)


@dataclasses.dataclass
class Output(collections.OrderedDict):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        self.update({name: value for name, value in vars(self).items() if value is not None})


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_an_input_with_a_default_is_an_input(bits):
    ticketed = mptify.transform(Optional(), bits=bits, prune=0.5).eval()
    by_name, by_position = ticketed(pixel_values=images()), ticketed(images())
    assert type(by_name) is Output
    assert torch.equal(by_name.logits, by_position.logits)
    assert by_name.logits.std() > 0
    plan = ticketed.ticket_plan
    assert plan.layers[0].input.value == ("pixels" if bits == "1/1" else "real values")
    assert not plan.untraced


def test_other_arguments_than_the_traced_ones_are_refused_in_words():
    ticketed = mptify.transform(Optional(), bits="1/1", prune=0.5).eval()
    with pytest.raises(mptify.MptifyError, match="'labels' at its default, None"):
        ticketed(images(), labels=torch.zeros(2, dtype=torch.long))


# -- parts that are asked for more than their forward ----------------------------------------------------------------------------


def test_a_part_whose_other_methods_are_called_keeps_them():
    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Plain()

        def stages(self, x):
            return [self.net(x), self.net(x + 1)]

        def forward(self, x):
            return self.net(x)

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = Backbone()

        def forward(self, x):
            if x.sum() > 1e9:  # no trace can follow
                return [x]
            return self.backbone.stages(x)

    ticketed = mptify.transform(Wrapper(), bits="1/1", prune=0.5).eval()
    assert len(ticketed(images())) == 2
    assert ticketed.ticket_plan.untraced["backbone"] == "Wrapper calls its stages()"


def test_a_part_that_takes_a_list_or_a_tensor_is_not_traced_as_if_it_were_given_a_tensor():
    class Joining(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act, self.out = nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)

        def forward(self, x):
            x = [x, x] if not isinstance(x, list) else x
            return self.out(self.act(self.conv(torch.cat(x, 1))))

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.joining = Joining()

        def forward(self, x):
            return self.joining([x, -x] if x.sum() < 1e9 else x)

    ticketed = mptify.transform(Wrapper(), bits="1/1", prune=0.5).eval()
    assert ticketed(torch.randn(2, 3, 8, 8)).shape == (2, 2, 4, 4)


def test_a_forward_that_hangs_on_the_instance_is_the_one_that_runs():
    network = Plain()
    network.forward = lambda x: Plain.forward(network, 2 * x)
    ticketed = mptify.transform(network, bits="1/1", prune=0.5).eval()
    assert "" in ticketed.ticket_plan.untraced


class Kernel(nn.Module):
    """A parameter of its own that it hands to a function, and an argument that few callers give."""

    def __init__(self):
        super().__init__()
        self.kernel, self.act = nn.Parameter(torch.randn(4, 4, 3, 3)), nn.ReLU()

    def forward(self, x, scale=None):
        return self.act(F.conv2d(x if scale is None else x * scale, self.kernel))


class Branching(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.first, self.parts, self.last = (
            nn.Conv2d(3, 4, 3),
            nn.ModuleList([Kernel()]),
            nn.Conv2d(4, 2, 3),
        )
        self.call = call

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 1e9:  # no trace can follow
            return x
        if self.call == "star":
            x = self.parts[0](*[x, x])
        return self.last(x)


class ByPosition(Branching):
    def forward(self, x):
        x = self.first(x) if x.sum() < 1e9 else x
        for part in self.parts:
            x = part(x, x)
        return self.last(x)


class ByName(Branching):
    def forward(self, x):
        x = self.first(x) if x.sum() < 1e9 else x
        return self.last(self.parts[0](x, scale=x))


class ByDefault(Branching):
    def forward(self, x):
        x = self.first(x) if x.sum() < 1e9 else x
        return self.last(self.parts[0](x, scale=None))


@pytest.mark.parametrize(
    "net",
    [lambda: Branching("star"), lambda: ByPosition(""), lambda: ByName("")],
    ids=["star", "position", "name"],
)
def test_a_part_that_may_be_given_optional_arguments_keeps_its_code(net):
    ticketed = mptify.transform(net(), bits="1/1", prune=0.5).eval()
    assert ticketed.ticket_plan.untraced["parts.0"].endswith("may pass 'scale' to it")
    assert ticketed(torch.randn(2, 3, 12, 12)).shape == (2, 2, 6, 6)


def test_a_part_that_is_given_defaults_becomes_a_graph_and_its_kernel_a_ticket():
    ticketed = mptify.transform(ByDefault(""), bits="1/1", prune=0.5).eval()
    assert [layer.name for layer in ticketed.ticket_plan.layers] == [
        "first",
        "last",
        "parts.0.kernel",
    ]
    assert ticketed.ticket_plan.left_dense == []
    assert ticketed(torch.randn(2, 3, 12, 12)).shape == (2, 2, 6, 6)


class Blocks(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.stem, self.way = nn.Conv2d(3, 4, 1), way
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3))
        )

    def forward(self, x):
        x = self.stem(x)
        if self.way != "slice" and x.sum() > 1e9:  # no trace can follow
            return x
        if self.way == "for":
            for block in self.blocks:
                x = block(x)
            return x
        return self.blocks[:2](x) if self.way == "slice" else self.blocks[0](x)


@pytest.mark.parametrize("way", ["for", "slice", "item"])
def test_a_sequential_that_code_goes_through_stays_one(way):
    network = Blocks(way)
    ticketed = mptify.transform(network, bits="1/1", prune=0.5).eval()
    x = torch.randn(2, 3, 12, 12)
    assert ticketed(x).shape == network(x).shape
    assert set(ticketed(x).unique().tolist()) == {-1, 1}
    assert (way == "slice") == (not ticketed.ticket_plan.untraced)
