"""Packed programs against the float path: same logits, for networks of every kind."""

import copy
import weakref

import pytest
import timm
import torch
from torch import nn
from torch.utils._pytree import tree_map

import mptify
from mptify.errors import MptifyError
from mptify.export import export
from mptify.models import registry, resnet18_cifar
from mptify.runtime import compiler, loading, packed_layers
from mptify.runtime.chain import Chain
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernels.bitsliced_conv import BitslicedConv, addition_cost
from mptify.runtime.kernels.concat import Concat
from mptify.runtime.kernels.input_conv import InputConv
from mptify.runtime.kernels.pooled_linear import PooledLinear
from mptify.runtime.kernels.popcount_conv import PopcountConv, count_cost
from mptify.runtime.kernels.popcount_linear import PopcountLinear
from mptify.runtime.kernels.residual_add import ResidualAdd
from mptify.runtime.library import library
from mptify.runtime.thresholds import find_joint_thresholds, find_real_thresholds, find_thresholds
from tests.nets import OneReluManyTimes, Plain, images
from tests.representatives import ENTRIES, build
from tests.surgery.test_zoo import flat

pytestmark = [
    pytest.mark.skipif(library is None, reason="this machine has no C++ compiler"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
# Attention and layer norms see numbers that lie in memory in another order, and are summed up in another.
ROUNDED = {"poolformerv2_s12", "vitamin_small_224"}

THREE_DIMENSIONS = {"r3d_18", "mc3_18", "r2plus1d_18", "s3d"}  # all of their convolutions, which stay float


def shaken_(model):
    """Norms with weights of all kinds: negative, zero, huge and tiny."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            kinds = torch.tensor([1.0, -1.0, 0.0, 1e6, -1e-6])
            module.weight = nn.Parameter(kinds[torch.randint(5, (module.num_features,))] * torch.rand(module.num_features))
            module.bias = nn.Parameter(torch.randn(module.num_features))
            module.running_mean.normal_()
    return model


def exact(x):
    """Numbers whose sums are the same in any order."""
    return (x * 8).round().clamp(-24, 24) / 8


def require_same(ours, theirs, program):
    """Logits of a program are the float path's: to the last bit, but for a classifier that reads averages. That one adds integers and
    divides once, where torch adds what it has divided."""
    if any(isinstance(module, PooledLinear) for module in program.modules()):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
    else:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_logits_are_those_of_the_float_path(entry):
    model, inputs = build(entry)
    ticketed = mptify.transform(model, bits="1/1", prune=0.75)
    with torch.no_grad():
        x = tuple(tree_map(lambda one: exact(one) if torch.is_floating_point(one) else one, inputs))
        ticketed.train()(*x)
        ticketed.eval()
        x = x[:1] if isinstance(x[0], list) else x  # a detector's targets are for training
        program = mptify.pack(ticketed, x)
        for ours, theirs in zip(flat(program(*x)), flat(ticketed(*x)), strict=True):
            if entry.name in ROUNDED:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            else:
                require_same(ours, theirs, program)
    packed = sum(isinstance(module, (BitslicedConv, PopcountLinear, InputConv, PopcountConv)) for module in program.modules())
    assert (packed > 0) == (entry.name not in THREE_DIMENSIONS)


@pytest.mark.parametrize("residual", ["binary", "real"])
def test_norms_of_every_kind(residual):
    """Signs change exactly where the float path's do, whatever the norms; on several sizes, with one program."""
    from mptify.models import resnet18_cifar

    torch.manual_seed(3)
    ticketed = shaken_(mptify.transform(resnet18_cifar(), bits="1/1", prune=0.9, residual=residual)).eval()
    program = mptify.pack(ticketed, torch.randn(1, 3, 32, 32))
    for size in ((32, 32), (40, 24), (33, 65)):
        x = exact(torch.randn(2, 3, *size))
        with torch.no_grad():
            require_same(program(x), ticketed(x), program)


def test_copies_stand_on_their_own():
    torch.manual_seed(4)
    ticketed = mptify.transform(Plain(), bits="1/1", prune=0.5).eval()
    program = mptify.pack(ticketed, images())
    with torch.no_grad():
        expected = program(images())
        copied = copy.deepcopy(program)
        moved = copy.deepcopy(program)._apply(torch.clone)
        del program
        for one in (copied, moved):
            assert torch.equal(one(images()), expected)


@pytest.mark.parametrize("name", ["conv2", "conv6", "resnet18_cifar"])
def test_the_papers_networks_are_packed_whole(name):
    """From the first layer to the last in one chain."""
    from mptify import models

    torch.manual_seed(7)
    ticketed = shaken_(mptify.transform(getattr(models, name)(), bits="1/1", prune=0.9)).eval()
    x = exact(torch.randn(3, 3, 32, 32))
    program = mptify.pack(ticketed, x)
    assert sum(isinstance(module, Chain) for module in program.modules()) == 1
    assert not mptify.ticket_layers(program)
    with torch.no_grad():
        require_same(program(x), ticketed(x), program)


class Averaged(nn.Module):
    """A classifier behind an average pool, in the ways that people write it; with `twice`, something else reads the averages too."""

    def __init__(self, way, twice):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 9, 3), nn.BatchNorm2d(9), nn.ReLU(), nn.Conv2d(9, 11, 3), nn.BatchNorm2d(11), nn.ReLU())
        self.pool, self.drop, self.head = nn.AdaptiveAvgPool2d(1), nn.Dropout(0.2), nn.Linear(11, 5)
        self.way, self.twice = way, twice

    def forward(self, x):
        x = self.body(x)
        if self.way == "module":
            x = torch.flatten(self.pool(x), 1)
        elif self.way == "function":
            x = nn.functional.adaptive_avg_pool2d(x, (1, 1)).flatten(1)
        elif self.way == "mean":
            x = x.mean((-2, -1))
        else:
            x = x.mean((1, 3))  # over other dimensions: no average pool
        y = self.head(self.drop(x))
        return y + x.sum(1, keepdim=True) if self.twice else y


@pytest.mark.parametrize(
    ("way", "twice", "packed"),
    [("module", False, True), ("function", False, True), ("mean", False, True), ("module", True, False), ("other", False, False)],
)
def test_a_classifier_that_reads_averages_is_packed_with_them(way, twice, packed):
    """And where something else reads them too, or where they are other averages, it is not."""
    torch.manual_seed(12)
    ticketed = shaken_(mptify.transform(Averaged(way, twice), bits="1/1", prune=0.4)).eval()
    x = exact(torch.randn(2, 3, 15, 15))
    program = mptify.pack(ticketed, x)
    assert any(isinstance(module, PooledLinear) for module in program.modules()) == packed
    with torch.no_grad():
        require_same(program(x), ticketed(x), program)


@pytest.mark.parametrize("name", ["mptify:conv2", pytest.param("timm:test_vit", marks=pytest.mark.long)])
def test_a_program_can_be_exported_saved_and_compiled(name, tmp_path):
    entry = registry.resolve(name)
    network = registry.build(entry)
    x = exact(registry.example_inputs(entry, network)[0])
    ticketed = mptify.transform(network, bits="1/1", prune=0.9).eval()
    program = mptify.pack(ticketed, x)
    with torch.no_grad():
        expected = ticketed(x)
        with pytest.raises(MptifyError, match="Run the program once"):
            torch.export.export(program, (x,), strict=False)
        program(x)
        exported = torch.export.export(program, (x,), dynamic_shapes=({0: torch.export.Dim("images", min=2, max=64)},), strict=False)
        assert any("mptify.packed" in str(node.target) for node in exported.graph.nodes)
        torch.export.save(exported, tmp_path / "a.pt2")
        again = torch.export.load(tmp_path / "a.pt2").module()
        for some in (x, torch.cat([x, x]), x.to(memory_format=torch.channels_last)):
            assert torch.equal(again(some), ticketed(some))
        torch.testing.assert_close(torch.compile(program, backend="eager")(x), expected, rtol=1e-5, atol=1e-5)


def test_an_image_elsewhere_is_told():
    program = mptify.pack(mptify.transform(Plain(), bits="1/1", prune=0.5).eval(), images())
    with pytest.raises(MptifyError, match="run on CPUs; this image is on meta"):
        program(images().to("meta"))


class Crossing(nn.Module):
    """Signs that are wanted again after a gate, which is torch's work; and a tensor that is changed in place after it was read."""

    def __init__(self):
        super().__init__()
        self.first, self.gated, self.second, self.third = (nn.Conv2d(n, 8, 3, padding=1) for n in (3, 8, 8, 8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        a = torch.relu(self.norms[0](self.first(x)))
        gate = torch.sigmoid(self.gated(a))
        b = torch.relu(self.norms[1](self.second(a) * gate))
        c = torch.relu(self.norms[2](self.third(b) + a))
        gate.neg_()
        return self.head((c * gate).mean((2, 3)))


def test_planes_are_handed_from_chain_to_chain():
    torch.manual_seed(5)
    ticketed = shaken_(mptify.transform(Crossing(), bits="1/1", prune=0.5)).eval()
    program = mptify.pack(ticketed, images())
    chains = [module for module in program.modules() if isinstance(module, Chain)]
    assert len(chains) == 2
    assert any("unpack" in name and "relu" not in name for name in chains[0].kernels), list(chains[0].kernels)
    with torch.no_grad():
        x = exact(images())
        require_same(program(x), ticketed(x), program)


def test_a_program_can_be_called_by_several_threads_at_once():
    from concurrent.futures import ThreadPoolExecutor

    torch.manual_seed(6)
    ticketed = mptify.transform(Plain(), bits="1/1", prune=0.5).eval()
    program = mptify.pack(ticketed, images())
    some = [exact(torch.randn_like(images())) for _ in range(24)]

    def run(x):
        with torch.no_grad():
            return program(x)

    with ThreadPoolExecutor(4) as pool, torch.no_grad():
        for ours, x in zip(pool.map(run, some), some, strict=True):
            assert torch.equal(ours, ticketed(x))


def test_buffers_are_reused_in_large_programs(monkeypatch):
    """A small program has a buffer for each value: cores are slow to write to what another core wrote."""
    torch.manual_seed(0)
    ticketed, x = mptify.transform(resnet18_cifar(), bits="1/1", prune=0.9).eval(), torch.randint(-24, 25, (2, 3, 32, 32)) / 8
    logits, counts = [], []
    for limit in (8 << 20, 0):
        monkeypatch.setattr("mptify.runtime.program._REUSE_FROM", limit)
        program = mptify.pack(ticketed, x)
        with torch.no_grad():
            logits.append(program(x))
        (chain,) = (module for module in program.modules() if isinstance(module, Chain))
        builder, _ = chain.program_for([x])
        counts.append(len(builder.workspace_sizes))
        assert sum(builder.workspace_sizes) <= max(limit, 1 << 18)
    assert torch.equal(*logits)
    assert counts[0] == len(builder.names)  # one is shared, and the last step's result is an output
    assert counts[1] < 8


def test_many_sizes_do_not_pile_up():
    ticketed = mptify.transform(OneReluManyTimes(), bits="1/1", prune=0.5).eval()
    program = mptify.pack(ticketed, images())
    (chain,) = (module for module in program.modules() if isinstance(module, Chain))
    with torch.no_grad():
        for height in range(8, 20):
            x = exact(torch.randn(1, images().shape[1], height, 16))
            require_same(program(x), ticketed(x), program)
    assert len(chain._programs) <= 4


def test_an_image_of_a_known_size_may_lie_in_memory_as_it_likes():
    program, ticketed = packed_pair(OneReluManyTimes())
    x = images()
    forms = [x, x.contiguous(memory_format=torch.channels_last), x.double(), x.transpose(2, 3).contiguous().transpose(2, 3), x[:1], x]
    with torch.no_grad():
        for form in forms:
            require_same(program(form), ticketed(form.float()), program)


class Fire(nn.Module):
    """As SqueezeNet's: two branches, joined channel by channel."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.three, self.last = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 5, 1),
            nn.Conv2d(8, 6, 3, padding=1),
            nn.Conv2d(11, 7, 3),
        )
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.cat([torch.relu(self.one(x)), torch.relu(self.three(x))], 1)
        return self.head(torch.relu(self.last(x)).mean((2, 3)))


def test_channels_are_joined_as_bits():
    torch.manual_seed(8)
    ticketed = shaken_(mptify.transform(Fire(), bits="1/1", prune=0.5)).eval()
    program = mptify.pack(ticketed, images())
    (chain,) = (module for module in program.modules() if isinstance(module, Chain))
    assert sum(isinstance(kernel, Concat) for kernel in chain.kernels.values()) == 1
    with torch.no_grad():
        x = exact(images())
        require_same(program(x), ticketed(x), program)


def packed_pair(network, prune=0.5):
    ticketed = mptify.transform(network, bits="1/1", prune=prune).eval()
    return mptify.pack(ticketed, images()), ticketed


def test_what_torch_does_by_default_changes_nothing():
    program, ticketed = packed_pair(OneReluManyTimes())
    x = exact(images())
    (chain,) = (module for module in program.modules() if isinstance(module, Chain))
    with torch.no_grad():
        expected = ticketed(x)
        try:
            torch.set_default_dtype(torch.bfloat16)
            require_same(program(x), expected, program)
        finally:
            torch.set_default_dtype(torch.float32)
        chain._drop_programs()
        with torch.device("meta"):
            require_same(program(x), expected, program)


def test_a_program_that_was_changed_is_told():
    program, _ = packed_pair(OneReluManyTimes())
    with pytest.raises(MptifyError, match="a: this packed layer was changed"):
        program.half()(images())
    program, _ = packed_pair(OneReluManyTimes())
    with pytest.raises(MptifyError, match="can't be exchanged"):
        program.load_state_dict(program.state_dict())
    layer = BitslicedConv(torch.ones(4, 4, 3, 3, dtype=torch.int8), None, Geometry(8, (8, 8), (3, 3)))
    assert layer.groups == 2
    layer.validate()
    layer.filters = 0
    with pytest.raises(ValueError, match="its sizes"):
        layer.validate()
    layer.filters = 4
    for weights, told in ((0, "its sizes"), (72, "channels that their filters do not see"), (96, "divide into groups")):
        layer.weight_count = weights
        with pytest.raises(ValueError, match=told):
            layer.validate()


class TwoInputs(nn.Module):
    """Its second layer's shortcut is the same for all images."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norms, self.other = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3)), nn.Parameter(torch.randn(1, 8, 16, 16))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        a = torch.relu(self.norms[0](self.first(x)))
        b = torch.relu(self.norms[1](self.second(a) + torch.relu(self.other)))
        return self.head(torch.relu(self.norms[2](self.third(b))).mean((2, 3)))


def test_what_is_there_once_is_there_for_all_images():
    torch.manual_seed(9)
    ticketed = mptify.transform(TwoInputs(), bits="1/1", prune=0.5).eval()
    x = exact(torch.randn(3, 3, 16, 16))
    with torch.no_grad():
        program = mptify.pack(ticketed, x)
        require_same(program(x), ticketed(x), program)
        for chain in (module for module in program.modules() if isinstance(module, Chain) and len(module.inputs) == 2):
            with pytest.raises(MptifyError, match="3 and 2 images at once"):
                chain(torch.zeros(3, 3, 16, 16), torch.zeros(2, 8, 16, 16))


class Tokens(nn.Module):
    """Linear layers on N × H × W × C, then one on all of it."""

    def __init__(self, start=1):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 8), nn.Linear(8, 6), nn.Linear(6 * 20 if start == 1 else 6, 5)
        self.start, self.values = start, nn.Linear(5, 5)

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.first(x))))
        x = x.flatten(1) if self.start == 1 else x.flatten(0, 2)
        return self.values(torch.relu(self.head(x)))


@pytest.mark.parametrize("start", [1, 0])
def test_tokens_keep_their_order_when_they_are_flattened(start):
    torch.manual_seed(10)
    ticketed = shaken_(mptify.transform(Tokens(start), bits="1/1", prune=0.3)).eval()
    x = exact(torch.randn(2, 4, 5, 3))
    with torch.no_grad():
        assert torch.equal(mptify.pack(ticketed, x)(x), ticketed(x))


def test_few_pixels_are_counted_and_many_added():
    few, many = Geometry(512, (4, 4), (3, 3), padding=(1, 1)), Geometry(64, (56, 56), (3, 3), padding=(1, 1))

    def added(geometry, filters, share):
        count = filters * geometry.channels * 9
        weight = torch.arange(count) < count // share
        return addition_cost(weight, geometry)

    assert count_cost(few, 512) < added(few, 512, 4)
    assert count_cost(few, 512) > added(few, 512, 50)  # few survivors are soon added
    assert count_cost(many, 64) > added(many, 64, 4)
    from mptify.models import resnet18_cifar

    program = mptify.pack(mptify.transform(resnet18_cifar(), bits="1/1", prune=0.5).eval(), torch.zeros(1, 3, 32, 32))
    kinds = {name: type(module) for name, module in program.chain_0_0.kernels.items()}
    assert kinds["layer1_0_conv1"] is BitslicedConv
    assert kinds["layer4_1_conv2"] is PopcountConv


def test_a_program_keeps_what_other_code_reads():
    program = mptify.pack(mptify.transform(timm.create_model("test_vit", num_classes=7), bits="1/1", prune=0.9).eval())
    assert (program.num_classes, copy.deepcopy(program).num_classes) == (7, 7)
    assert program.pretrained_cfg["input_size"] == (3, 160, 160)


def test_parts_of_a_network_are_packed_and_the_network_stays_as_it_was():
    entry = next(entry for entry in ENTRIES if entry.name == "retinanet_resnet50_fpn")
    model, inputs = build(entry)
    ticketed = mptify.transform(model, bits="1/1", prune=0.75).eval()
    before = {path: type(module) for path, module in ticketed.named_modules()}
    program = mptify.pack(ticketed, (inputs[0],))
    assert {path: type(module) for path, module in ticketed.named_modules()} == before
    assert any(isinstance(module, Chain) for module in program.modules())
    assert not any(isinstance(module, Chain) for module in ticketed.modules())
    with pytest.raises(MptifyError, match="can't take this input"):
        mptify.pack(ticketed, (3,))


def test_a_detectors_file_becomes_a_program(tmp_path):
    name = "torchvision:ssdlite320_mobilenet_v3_large"
    entry = registry.resolve(name)
    network = registry.build(entry, num_classes=7)
    mptify.save(mptify.transform(network, bits="1/1", prune=0.9).eval(), tmp_path / "a.ticket", name, arguments={"num_classes": 7})
    program = mptify.load(tmp_path / "a.ticket", runtime="packed")
    x = [exact(one) for one in registry.example_inputs(entry, network)[0]]
    with torch.no_grad():
        for ours, theirs in zip(flat(program(x)), flat(mptify.load(tmp_path / "a.ticket")(x)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(MptifyError, match="does not take one image at a time"):
        export(tmp_path / "a.ticket", "packed", tmp_path / "a.packed")


def test_what_cannot_be_packed_is_told():
    ticketed = mptify.transform(Plain(), bits="1/1", prune=0.5)
    with pytest.raises(MptifyError, match=r"call model\.eval\(\) first"):
        mptify.pack(ticketed.train(), images())
    with pytest.raises(MptifyError, match="are for 1/1 tickets"):
        mptify.pack(mptify.transform(Plain(), bits="1/32", prune=0.5).eval(), images())
    with pytest.raises(MptifyError, match="run on CPUs"):
        mptify.pack(ticketed.eval().to("meta"), images())


def test_without_a_compiler_the_float_path_runs(monkeypatch):
    ticketed = mptify.transform(Plain(), bits="1/1", prune=0.5).eval()
    monkeypatch.setattr(compiler, "library", None)
    with pytest.warns(UserWarning, match="without a C\\+\\+ compiler"):
        assert mptify.pack(ticketed, images()) is ticketed


def test_thresholds_are_where_the_answers_change():
    least = torch.tensor([-7.0, 0.0, 3.0, 99.0, -99.0])
    turned = torch.tensor([False, True, False, False, True])

    def epilogue(sums, shortcut):
        reached = sums + 2 * shortcut >= least.view(1, -1, 1, 1)
        return torch.where(reached != turned.view(1, -1, 1, 1), 1.0, -1.0)

    found = find_thresholds(epilogue, 5, 20, shortcut=True)
    assert found.falling.tolist() == [False, True, False, False, False]
    assert found.least.tolist() == [[-5, -1, 5, 21, 21], [-9, 3, 1, 21, 21]]
    assert find_thresholds(lambda sums, _: torch.where(sums.abs() > 3, 1.0, -1.0), 5, 20, shortcut=False) is None


def test_real_thresholds_are_the_very_numbers():
    norm = nn.BatchNorm2d(200).eval()
    shaken_(norm)

    def epilogue(sums, _):
        return torch.where(norm(sums * 0.37) >= 0, 1.0, -1.0)

    with torch.no_grad():
        found = find_real_thresholds(epilogue, 200)
        least = found.least.view(1, -1, 1, 1)
        finite = least.isfinite().view(-1)
        assert (epilogue(least, 0).view(-1) > 0)[finite].all()
        beyond = torch.where(found.falling.view(1, -1, 1, 1), torch.inf, -torch.inf)
        assert (epilogue(torch.nextafter(least, beyond), 0).view(-1) < 0)[finite].all()
        assert finite.sum() > 100
        for x in (-1e30, 0.0, 1e30):
            always = (epilogue(torch.full((1, 200, 1, 1), x), 0) > 0).view(-1)
            assert torch.equal(always[~finite], found.least[~finite] < 0)


def test_thresholds_of_two_layers_are_where_the_answers_change():
    norms = [shaken_(nn.BatchNorm2d(60)).eval() for _ in range(2)]
    most, most_other = 17, 5

    def epilogue(sums, others):
        return torch.where(norms[0](sums * 0.3) + norms[1](others * 0.7) >= 0, 1.0, -1.0)

    with torch.no_grad():
        found = find_joint_thresholds(epilogue, 60, most, most_other)
        for place, other in enumerate(range(-most_other, most_other + 1)):
            for sum_ in range(-most, most + 1):
                grid = torch.full((1, 60, 1, 1), float(sum_))
                expected = epilogue(grid, torch.full((1, 60, 1, 1), float(other))).view(-1) > 0
                turned = torch.where(found.falling, -sum_, sum_)
                assert torch.equal(turned >= found.least[:, place], expected)
    assert found.falling.any()
    assert not found.falling.all()


def test_two_layers_added_are_one_kernel():
    from mptify.models import resnet18_cifar

    ticketed = mptify.transform(resnet18_cifar(), bits="1/1", prune=0.9).eval()
    program = mptify.pack(ticketed, torch.randn(1, 3, 32, 32))
    assert sum(isinstance(module, ResidualAdd) for module in program.modules()) == 3
    assert not any(isinstance(module, nn.BatchNorm2d) for module in program.modules())


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:test_vit", "mptify:conv2"])
def test_a_file_becomes_a_program_layer_by_layer(name, tmp_path, monkeypatch):
    entry = registry.resolve(name)
    ticketed = mptify.transform(registry.build(entry, num_classes=7), bits="1/1", prune=0.9).train()
    x = torch.randn(4, 3, *{"torchvision": (64, 64), "timm": (160, 160), "mptify": (32, 32)}[entry.source])
    with torch.no_grad():
        ticketed(x)
    mptify.save(ticketed.eval(), tmp_path / "a.ticket", name, arguments={"num_classes": 7})
    fetched, alive = [], []

    def watched(*given):
        alive.append(sum(one() is not None for one in fetched))
        weight = effective(*given)
        fetched.append(weakref.ref(weight))
        return weight

    effective = loading._effective
    monkeypatch.setattr(loading, "_effective", watched)
    program = mptify.load(tmp_path / "a.ticket", runtime="packed")
    assert max(alive) <= 1
    assert not any(one() is not None for one in fetched)
    with torch.no_grad():
        x = exact(x)
        require_same(program(x), mptify.load(tmp_path / "a.ticket")(x), program)
    held = sum(parameter.numel() for parameter in program.parameters())
    left = sum(layer.count for layer in mptify.ticket_layers(program).values())
    assert held < left + 30_000  # of what is packed, nothing
    for layer in packed_layers(program):
        most = 2.1 * layer.weight_count if isinstance(layer, (PopcountLinear, PopcountConv)) else 16 * layer.survivor_count
        assert isinstance(layer, InputConv) or 8 * layer.weight_bytes <= most


def test_a_program_is_made_of_a_model_of_ones_own_too(tmp_path):
    ticketed = mptify.transform(Plain(), bits="1/1", prune=0.5).eval()
    mptify.save(ticketed, tmp_path / "a.ticket")
    program = mptify.load(tmp_path / "a.ticket", model=Plain(), runtime="packed", example=images())
    with torch.no_grad():
        x = exact(images())
        require_same(program(x), ticketed(x), program)
    with pytest.raises(MptifyError, match="runtime='fast': there are 'float' and 'packed'"):
        mptify.load(tmp_path / "a.ticket", model=Plain(), runtime="fast")
    with pytest.raises(MptifyError, match="run on CPUs"):
        mptify.load(tmp_path / "a.ticket", model=Plain(), runtime="packed", device="meta")
    with pytest.raises(MptifyError, match=r"mptify\.pack takes a ticket model"):
        mptify.load(tmp_path / "a.ticket", model=ticketed, runtime="packed")


def test_a_size_that_the_network_can_not_take_is_told():
    from mptify.models import conv2

    ticketed = mptify.transform(conv2(), bits="1/1", prune=0.5).eval()
    with pytest.raises(MptifyError, match=r"can't take an input of 1×3×224×224; pass one that it can"):
        mptify.pack(ticketed, torch.zeros(1, 3, 224, 224))


def test_an_example_of_ones_own_network_is_asked_for():
    """Guessing 3×224×224 took 20 GB once."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))  # any size would do
    ticketed = mptify.transform(network, bits="1/1", prune=0.5).eval()
    with pytest.raises(MptifyError, match=r"mptify\.pack\(model, example\)"):
        mptify.pack(ticketed)
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(mptify.pack(ticketed, x)(x), ticketed(x))


def test_of_an_unfit_example_our_sentence_is_all_that_is_seen(capfd):
    from mptify.models import conv2

    ticketed = mptify.transform(conv2(), bits="1/1", prune=0.5).eval()
    with pytest.raises(MptifyError, match="can't take") as raised:
        mptify.pack(ticketed, torch.zeros(1, 3, 40, 40))
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    assert "".join(capfd.readouterr()) == ""
