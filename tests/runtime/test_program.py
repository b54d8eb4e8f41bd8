"""Packed programs against the float path: same logits, for networks of every kind."""

import copy

import pytest
import timm
import torch
from torch.utils._pytree import tree_map

import mptify
from mptify.errors import MptifyError
from mptify.models import registry, resnet18_cifar
from mptify.runtime.chain import Chain
from mptify.runtime.kernels.bitsliced_conv import BitslicedConv
from mptify.runtime.kernels.input_conv import InputConv
from mptify.runtime.kernels.popcount_conv import PopcountConv
from mptify.runtime.kernels.popcount_linear import PopcountLinear
from mptify.runtime.library import library
from tests.helpers.outputs import exact, flat, require_same
from tests.helpers.packed import THREE_DIMENSIONS, packed_pair, shaken_
from tests.nets import OneReluManyTimes, Plain, images
from tests.representatives import ENTRIES, SOME_QUICK, build

pytestmark = [
    pytest.mark.skipif(library is None, reason="this machine has no C++ compiler"),
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
]
# Attention and layer norms add numbers in the order in which they lie in memory.
ROUNDED = {"poolformerv2_s12", "vitamin_small_224"}


@pytest.mark.parametrize("entry", SOME_QUICK)
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
    packed = sum(
        isinstance(module, (BitslicedConv, PopcountLinear, InputConv, PopcountConv))
        for module in program.modules()
    )
    assert (packed > 0) == (entry.name not in THREE_DIMENSIONS)


@pytest.mark.parametrize("residual", ["binary", "real"])
def test_norms_of_every_kind(residual):
    """Signs change exactly where the float path's do, on several sizes."""
    from mptify.models import resnet18_cifar

    torch.manual_seed(3)
    ticketed = shaken_(
        mptify.transform(resnet18_cifar(), bits="1/1", prune=0.9, residual=residual)
    ).eval()
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


@pytest.mark.parametrize(
    "name", ["mptify:conv2", pytest.param("timm:test_vit", marks=pytest.mark.long)]
)
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
        exported = torch.export.export(
            program,
            (x,),
            dynamic_shapes=({0: torch.export.Dim("images", min=2, max=64)},),
            strict=False,
        )
        assert any("mptify.packed" in str(node.target) for node in exported.graph.nodes)
        torch.export.save(exported, tmp_path / "a.pt2")
        again = torch.export.load(tmp_path / "a.pt2").module()
        for some in (x, torch.cat([x, x]), x.to(memory_format=torch.channels_last)):
            assert torch.equal(again(some), ticketed(some))
        torch.testing.assert_close(
            torch.compile(program, backend="eager")(x), expected, rtol=1e-5, atol=1e-5
        )


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
    """A small program has a buffer for each value."""
    torch.manual_seed(0)
    ticketed, x = (
        mptify.transform(resnet18_cifar(), bits="1/1", prune=0.9).eval(),
        torch.randint(-24, 25, (2, 3, 32, 32)) / 8,
    )
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
    forms = [
        x,
        x.contiguous(memory_format=torch.channels_last),
        x.double(),
        x.transpose(2, 3).contiguous().transpose(2, 3),
        x[:1],
        x,
    ]
    with torch.no_grad():
        for form in forms:
            require_same(program(form), ticketed(form.float()), program)


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


def test_a_program_keeps_what_other_code_reads():
    program = mptify.pack(
        mptify.transform(timm.create_model("test_vit", num_classes=7), bits="1/1", prune=0.9).eval()
    )
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
