"""What the plan says about networks whose binary form the paper draws, and about every setting."""

import pytest
import timm
import torch
import torchvision
from timm.models.metaformer import StarReLU
from torch import nn

import mptify
from mptify.surgery.invariants import real_inputs
from mptify.surgery.plans import LayerInput
from tests.nets import OneReluManyTimes, Plain, images
from tests.representatives import ENTRIES, build

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def resnet18():
    with torch.device("meta"):
        return torchvision.models.resnet18()


def sites(model, edits):
    from mptify.surgery.trace import trace

    (region,) = trace(model).regions
    return {node.name: node.meta["site"] for node in region.graphs[False].nodes}


def test_resnet18_has_a_sign_at_every_former_relu_fed_by_its_batchnorm(resnet18):
    (edits,) = mptify.plan(resnet18, bits="1/1", prune=0.75).edits[""].values()
    named = sites(resnet18, edits)
    blocks = [f"layer{stage}.{block}.relu" for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert {named[name] for name in edits.quantizers} == {
        "relu",
        *blocks,
        *(f"{block}#1" for block in blocks),
    }
    assert all(norm is None for norm in edits.quantizers.values())
    assert edits.edges == {}
    assert {named[pool]: named[conv] for pool, conv in edits.pools.items()} == {"maxpool": "conv1"}


def test_resnet18_runs_conv_pool_batchnorm_sign_and_binary_shortcuts(resnet18):
    calls = [node.name for node in mptify.transform(resnet18, bits="1/1").graph.nodes]
    assert calls[1:5] == ["conv1", "maxpool", "bn1", "relu_sign"]
    graph = mptify.transform(resnet18, bits="1/1").graph
    add = next(node for node in graph.nodes if node.name == "add")
    assert [one.name for one in add.all_input_nodes] == ["layer1_0_bn2", "relu_sign"]
    assert [user.name for user in add.users] == ["layer1_0_relu_1_sign"]


def test_only_pixels_and_pooled_features_stay_real_in_resnet18(resnet18):
    plan = mptify.plan(resnet18, bits="1/1", prune=0.75)
    assert {
        layer.name: layer.input.value
        for layer in plan.layers
        if layer.input is not LayerInput.QUANTIZED
    } == {"conv1": "pixels", "fc": "pooled features"}
    assert sum(layer.count for layer in plan.layers) == plan.total == 11_678_912


def test_real_shortcuts_take_signs_on_the_branches_only(resnet18):
    (edits,) = mptify.plan(resnet18, bits="1/1", residual="real").edits[""].values()
    assert len(edits.vanished) == 8
    assert len(edits.quantizers) == 9
    graph = mptify.transform(resnet18, bits="1/1", residual="real").graph
    adds = [node for node in graph.nodes if node.name.startswith("add")]
    for before, add in zip(
        adds[::2], adds[1::2], strict=True
    ):  # a stage's second block adds to the first block's real sum
        assert before in add.all_input_nodes
    for stage, add in enumerate(
        adds[2::2], 2
    ):  # its first block adds to the downsampled sum of the stage before
        assert f"layer{stage}.0.downsample.1" in [node.target for node in add.all_input_nodes]


@pytest.mark.parametrize(
    ("name", "order"),
    [("vgg11", ["0", "2", "1_norm", "1_sign"]), ("vgg11_bn", ["0", "3", "1", "2_sign"])],
)
def test_vgg_runs_conv_pool_batchnorm_sign(name, order):
    with torch.device("meta"):
        graph = mptify.transform(torchvision.models.get_model(name), bits="1/1").graph
    targets = [node.target for node in graph.nodes if node.op == "call_module"]
    assert targets[:4] == [f"features.{one}" for one in order]


def test_each_call_site_of_one_relu_gets_its_own_sign():
    ticketed = mptify.transform(OneReluManyTimes(), bits="1/1")
    signs = [
        node.target
        for node in ticketed.graph.nodes
        if isinstance(node.target, str) and node.target.endswith("sign")
    ]
    assert signs == ["relu_sign", "relu_1_sign", "relu_2_sign"]


def test_layers_that_read_one_value_share_one_sign():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            x = torch.sigmoid(self.stem(x))
            return self.a(x) * self.b(x)

    (edits,) = mptify.plan(Fork(), bits="1/1").edits[""].values()
    assert len(edits.edges) == 1
    assert [len(readers) for readers in edits.readers.values()] == [2]


def test_gates_are_no_activations():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.Sigmoid(),
        nn.Conv2d(4, 4, 1),
        nn.Hardsigmoid(),
        nn.Softmax(1),
        nn.Conv2d(4, 2, 1),
    )
    (edits,) = mptify.plan(net, bits="1/1").edits[""].values()
    assert edits.quantizers == {}
    assert len(edits.edges) == 2


def test_inserted_batchnorms_go_before_each_activation_that_lacks_one_with_the_pool_before_them():
    ticketed = mptify.transform(Plain(), bits="1/32", bn="insert")
    targets = [node.target for node in ticketed.graph.nodes if node.op == "call_module"]
    assert targets[:4] == ["features.0", "features.2", "features.1_norm", "features.1"]
    assert targets[4:8] == [
        "features.3",
        "features.4",
        "features.5",
        "features.6",
    ]  # had its BatchNorm: left alone
    assert "classifier.2_norm" in targets


def test_without_edits_the_model_keeps_its_class():
    assert type(mptify.transform(Plain(), bits="1/32")) is Plain


@pytest.mark.parametrize(
    ("settings", "dense"),
    [
        ({"dense": "first"}, {"a"}),
        ({"dense": ("first", "last")}, {"a", "head"}),
        ({"exclude": "[ab]"}, {"a", "b"}),
        ({"include": ("b", "c")}, {"a", "head"}),
    ],
)
def test_layers_can_be_left_dense_and_are_named(settings, dense):
    plan = mptify.plan(OneReluManyTimes(), **settings)
    assert {left.name for left in plan.left_dense} == dense
    assert all(left.reason.startswith("asked") for left in plan.left_dense)
    ticketed = mptify.transform(OneReluManyTimes(), strict=True, **settings)
    assert all(
        parameter.requires_grad
        for name in dense
        for parameter in ticketed.get_submodule(name).parameters()
    )


def test_depthwise_layers_can_be_left_dense_and_are_warned_of():
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8))
    assert [left.name for left in mptify.plan(net, dense="depthwise").left_dense] == ["2"]
    assert "depthwise" in mptify.plan(net, bits="1/1").warnings[0]
    assert mptify.plan(net, bits="1/32").warnings == []


def test_a_sign_behind_the_last_layer_is_warned_of():
    assert "±1" in mptify.plan(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), bits="1/1").warnings[0]


def test_prune_overrides_win_by_order():
    plan = mptify.plan(OneReluManyTimes(), prune=0.5, prune_overrides={"*": 0.75, "b": 0.0})
    assert {layer.name: layer.kept for layer in plan.layers} == {
        "a": 54,
        "b": 576,
        "c": 144,
        "head": 20,
    }


def test_global_scope_keeps_the_total_and_a_floor_in_every_layer():
    ticketed = mptify.transform(OneReluManyTimes(), prune=0.9, scope="global", floor=0.05)
    layers = mptify.ticket_layers(ticketed).values()
    total = sum(layer.count for layer in layers)
    assert sum(int(layer.mask.sum()) for layer in layers) == total - round(total * 0.9)
    assert all(layer.kept >= 0.05 * layer.count for layer in layers)
    assert len({layer.kept / layer.count for layer in layers}) > 1


@pytest.mark.parametrize(
    ("setting", "kinds"),
    [
        ({}, {"scores"}),
        ({"learn_bn": True}, {"scores", "norm"}),
        ({"bias": "learn"}, {"scores", "bias"}),
    ],
)
def test_only_what_the_spec_names_trains(setting, kinds):
    assert set(mptify.summary(mptify.transform(OneReluManyTimes(), **setting)).trainable) == kinds


def test_other_parameters_are_learned_unless_frozen():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(3, 4)

        def forward(self, x):
            return self.layer(x) * self.scale

    assert mptify.summary(mptify.transform(Scaled())).trainable == {"other": 4, "scores": 12}
    assert mptify.summary(mptify.transform(Scaled(), other="freeze")).trainable == {"scores": 12}


def test_the_seed_alone_decides_the_frozen_weights():
    torch.manual_seed(1)
    first = mptify.transform(Plain(), seed=3)
    torch.manual_seed(2)
    second = mptify.transform(Plain(), seed=3)
    other = mptify.transform(Plain(), seed=4)
    for name, layer in mptify.ticket_layers(first).items():
        assert torch.equal(layer.frozen, mptify.ticket_layers(second)[name].frozen)
        assert torch.equal(layer.scores, mptify.ticket_layers(second)[name].scores)
        assert not torch.equal(layer.frozen, mptify.ticket_layers(other)[name].frozen)


@pytest.mark.parametrize("bits", ["1/1", "32/1"])
def test_dropout_between_a_sign_and_a_layer_keeps_its_input_binary_in_train_mode(bits):
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(8, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    ticketed = mptify.transform(net, bits=bits).train()
    _, real = real_inputs(ticketed, lambda: ticketed(images()))
    assert real == {"0", "6"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prune": 1.5}, "prune=1.5: should be less than 1"),
        ({"prune": -0.1}, "prune=-0.1: should be greater than or equal to 0"),
        ({"bits": "2/2"}, "bits='2/2': should be '1/32', '1/8', '1/4', '1/2', '1/1', '32/32'"),
        ({"prun": 0.5}, "There is no setting 'prun'; did you mean 'prune'?"),
        ({"exclude": "layr*"}, "exclude='layr*' matches no layer of this model"),
        ({"prune_overrides": {"x*": 0.5}}, "prune_overrides='x*' matches no layer"),
        ({"bn": "insert", "bits": "1/1"}, "bn='insert' is for 8- and 32-bit activations"),
        (
            {"scope": "global", "prune_overrides": {"a": 0.5}},
            "prune_overrides are for scope='layer'",
        ),
        ({"seed": -1}, "seed=-1"),
        ({"sign_width": 0}, "sign_width=0"),
        ({"dense": "middle"}, "dense.0='middle'"),
    ],
)
def test_bad_settings_are_told_in_one_sentence(settings, message):
    with pytest.raises(mptify.BadConfig) as caught:
        mptify.transform(OneReluManyTimes(), **settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_left_to_convert_is_an_error():
    with pytest.raises(mptify.NothingToConvert, match="asked: excluded"):
        mptify.transform(nn.Sequential(nn.Linear(3, 4)), exclude="*")


# -- parameters that are no weights of a layer -----------------------------------------------------------------------------------


def around(part, features):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.part, self.head = (
                nn.Conv2d(3, 4, 3, padding=1),
                part,
                nn.Linear(features, 5),
            )

        def forward(self, x):
            result = self.part(self.conv(x).flatten(2).transpose(1, 2))
            return self.head((result[0] if isinstance(result, tuple) else result).mean(1))

    return Around()


RECURRENT = {
    "lstm": nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True),
    "gru": nn.GRU(4, 12, batch_first=True),
    "rnn": nn.RNN(4, 12, batch_first=True),
}


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_weights_are_listed(kind, bits):
    network = around(RECURRENT[kind], 12)
    plan = mptify.plan(network, bits=bits)
    weights = {f"part.{name}" for name, one in network.part.named_parameters() if one.dim() > 1}
    assert {left.name for left in plan.left_dense} == weights
    assert {left.reason for left in plan.left_dense} == {"recurrent layers are not converted"}
    assert plan.total == sum(one.numel() for one in network.parameters() if one.dim() > 1)
    with pytest.raises(mptify.LeftDense, match=r"part\.weight_ih_l0 would stay dense \(recurrent"):
        mptify.plan(network, bits=bits, strict=True)
    assert mptify.plan(network, bits=bits, strict=True, exclude=("part.*",)).layers
    ticketed = mptify.transform(network, bits=bits, prune=0.5)
    assert ticketed(images()).shape[1] == 5
    own = ticketed.get_parameter("part.weight_ih_l0")
    assert own is not network.part.weight_ih_l0
    assert ticketed.get_submodule("part")._flat_weights[0] is own  # which is what it computes with


def test_the_weights_of_recurrent_cells_are_listed():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(4, 12)

        def forward(self, x):
            return self.cell(x.mean(1))[:, None]

    assert {one.name for one in mptify.plan(around(Cell(), 12)).left_dense} == {
        "part.cell.weight_ih",
        "part.cell.weight_hh",
    }


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 1, 4))
        self.unused = nn.Parameter(torch.randn(2, 4))
        self.table = nn.Embedding(3, 4)

    def forward(self, x):
        return x + self.positions + self.table(torch.zeros(1, dtype=torch.long))


class Untraced(Tokens):
    def forward(self, x):
        return x + self.positions if x.sum() < 1e9 else x * self.unused[:1]


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_parameters_that_are_added_or_looked_up_are_listed_as_that(bits):
    plan = mptify.plan(around(Tokens(), 4), bits=bits, strict=True)
    assert dict(plan.tables) == {
        "part.positions": (1, 1, 4),
        "part.unused": (2, 4),
        "part.table.weight": (3, 4),
    }
    report = mptify.summary(mptify.transform(around(Tokens(), 4), bits=bits))
    assert report.tables == plan.tables


def test_parameters_of_code_that_can_not_be_traced_may_be_weights():
    plan = mptify.plan(around(Untraced(), 4))
    assert {one.name: one.reason for one in plan.left_dense} == dict.fromkeys(
        ("part.positions", "part.unused"), "code that can't be traced uses it"
    )
    with pytest.raises(mptify.LeftDense):
        mptify.plan(around(Untraced(), 4), strict=True)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_every_parameter_of_two_dimensions_is_converted_or_listed(entry):
    """Over the zoo."""
    model, _ = build(entry)
    plan = mptify.plan(model)
    named = (
        {layer.name for layer in plan.layers}
        | {left.name for left in plan.left_dense}
        | {name for name, _ in plan.tables}
    )
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() > 1:
                full = f"{path}.{name}" if path else name
                assert full in named or path in named, full


# -- activations with parameters -------------------------------------------------------------------------------------------------


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.full((4,), 0.2))

    def forward(self, x):
        return nn.functional.prelu(x, self.slope)


@pytest.mark.parametrize(
    ("activation", "gone"),
    [
        (nn.PReLU(4), ["1.weight"]),
        (timm.layers.PReLU(), ["1.weight"]),
        (StarReLU(), ["1.bias", "1.scale"]),
        (Functional(), ["1.slope"]),
    ],
    ids=["PReLU", "timm's PReLU", "StarReLU", "F.prelu"],
)
def test_parameters_of_replaced_activations_go(activation, gone, process_group):
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        activation,
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    ticketed = mptify.transform(
        network, bits="1/1", prune=0.5, learn_bn=True, other="learn"
    ).train()
    assert not set(gone) & {name for name, _ in ticketed.named_parameters()}
    assert sorted(mptify.summary(ticketed).dropped) == gone
    parallel = torch.nn.parallel.DistributedDataParallel(ticketed)
    for _ in range(2):  # the second step fails where a parameter got no gradient in the first
        parallel(torch.randn(2, 3, 6, 6)).sum().backward()
    assert all(one.grad is not None for one in ticketed.parameters() if one.requires_grad)
