"""I6: torch.compile, torch.export, channels_last, SyncBatchNorm and DistributedDataParallel work on the result."""

import copy

import pytest
import timm
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

import mptify
from mptify.models import registry
from mptify.models.registry import Entry, training_loss
from tests.helpers.outputs import agree, seeded
from tests.nets import OneReluManyTimes, Plain, images
from tests.representatives import ENTRIES, SLOW_TO_COMPILE, build

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)

COMPILED = [
    Entry("torchvision", "resnet18"),
    Entry("torchvision", "swin_t"),
    Entry("timm", "test_vit"),
    Entry("timm", "test_convnext"),
    Entry("timm", "test_efficientnet"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


MODES = [("1/1", entry) for entry in COMPILED] + [("1/32", entry) for entry in COMPILED[:2]]


@pytest.mark.long
@pytest.mark.parametrize(("bits", "entry"), MODES, ids=str)
def test_a_compiled_model_computes_and_trains_the_same(entry, bits):
    model, inputs = build(entry)
    ticketed = mptify.transform(model, bits=bits, prune=0.75).eval()
    expected = ticketed(*inputs)
    training_loss(expected).backward()
    gradients = {
        name: layer.scores.grad.clone() for name, layer in mptify.ticket_layers(ticketed).items()
    }
    ticketed.zero_grad()
    compiled = torch.compile(ticketed, backend="aot_eager")
    output = compiled(*inputs)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    training_loss(output).backward()
    for name, layer in mptify.ticket_layers(ticketed).items():
        torch.testing.assert_close(layer.scores.grad, gradients[name], rtol=1e-3, atol=1e-5)


def _mark(entry, way):
    """Of timm's networks for tests, the compiled ones are always run; others for CI, and what takes torch six seconds and more by hand."""
    quick = way == "compile" and entry.name.startswith("test_")
    return pytest.mark.sweep if entry.name in SLOW_TO_COMPILE else () if quick else pytest.mark.long


EACH_WAY = [
    pytest.param(entry, way, id=f"{entry}-{way}", marks=_mark(entry, way))
    for entry in ENTRIES
    for way in ("compile", "export")
]


@pytest.mark.parametrize(("entry", "way"), EACH_WAY)
def test_every_family_compiles_and_exports(entry, way):
    """In 1/1, where the graph changes most. Detectors can't be exported as they were either, and that is all that is forgiven."""
    model, inputs = build(entry)
    ticketed = mptify.transform(model, bits="1/1", prune=0.75).eval()
    with torch.no_grad():
        expected = seeded(ticketed, inputs)
        if way == "compile":
            agree(seeded(torch.compile(ticketed, backend="eager", dynamic=False), inputs), expected)
            return
        try:
            exported = torch.export.export(ticketed, copy.deepcopy(inputs), strict=False).module()
        except Exception:
            with pytest.raises(Exception):  # noqa: B017, PT011
                torch.export.export(model.eval(), inputs, strict=False)
        else:
            agree(seeded(exported, inputs), expected)


@pytest.mark.parametrize("entry", COMPILED, ids=str)
def test_an_exported_model_of_real_activations_computes_the_same(entry):
    model, inputs = build(entry)
    ticketed = mptify.transform(model, bits="1/32", prune=0.75).eval()
    with torch.no_grad():
        agree(
            seeded(torch.export.export(ticketed, inputs).module(), inputs), seeded(ticketed, inputs)
        )


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_masks_and_outputs_do_not_depend_on_the_memory_format(bits):
    ticketed = mptify.transform(Plain(), bits=bits, prune=0.5).eval()
    expected = ticketed(images())
    masks = {name: layer.mask.clone() for name, layer in mptify.ticket_layers(ticketed).items()}
    ticketed.to(memory_format=torch.channels_last)
    output = ticketed(images().to(memory_format=torch.channels_last))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert all(
        torch.equal(layer.mask, masks[name])
        for name, layer in mptify.ticket_layers(ticketed).items()
    )


def test_sync_batchnorm_takes_over_inserted_norms():
    ticketed = nn.SyncBatchNorm.convert_sync_batchnorm(mptify.transform(Plain(), bits="1/1"))
    norms = [
        module
        for module in ticketed.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    assert norms
    assert all(isinstance(norm, nn.SyncBatchNorm) for norm in norms)
    assert ticketed.eval()(images()).shape == (4, 10)


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_bfloat16_autocast_trains(bits):
    ticketed = mptify.transform(Plain(), bits=bits, prune=0.5).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(ticketed(images()), torch.tensor([1, 2, 3, 4]))
    loss.backward()
    for layer in mptify.ticket_layers(ticketed).values():
        assert layer.scores.grad.dtype == torch.float32
        assert torch.isfinite(layer.scores.grad).all()


KINDS = [
    {"bits": bits, "scope": scope, "prune": 0.5}
    for bits in ("1/32", "1/1")
    for scope in ("layer", "global")
]


@pytest.mark.long
def test_two_processes_hold_the_same_masks(tmp_path):
    """Different data per process; the scores start and stay the same, and so do the masks."""
    mp.spawn(_train_in_parallel, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for kind, ours, theirs in zip(KINDS, first, second, strict=True):
        start = mptify.ticket_layers(mptify.transform(OneReluManyTimes(), **kind))
        assert all(torch.equal(ours[name], theirs[name]) for name in start), kind
        assert any(not torch.equal(ours[name], layer.mask) for name, layer in start.items()), kind


def _train_in_parallel(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    torch.save([_masks_after_three_steps(rank, kind) for kind in KINDS], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _masks_after_three_steps(rank, kind):
    ticketed = mptify.transform(OneReluManyTimes(), **kind)
    parallel = nn.parallel.DistributedDataParallel(ticketed)
    optimizer = torch.optim.SGD((p for p in parallel.parameters() if p.requires_grad), lr=0.5)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x, y = (
            torch.randn(4, 3, 16, 16, generator=generator),
            torch.randint(10, (4,), generator=generator),
        )
        optimizer.zero_grad()
        F.cross_entropy(parallel(x), y).backward()
        optimizer.step()
    return {name: layer.mask for name, layer in mptify.ticket_layers(ticketed).items()}


# -- timm's and torch's tools ------------------------------------------------------------------------------------------------------


def without_norm_scale(model):
    """Norms that have seen images: else the outputs of a fresh deep network are too large to compare."""
    with torch.no_grad():
        for _ in range(20):
            model.train()(torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    return model.eval()


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
@pytest.mark.parametrize("name", ["repvit_m0_9", "repghostnet_050", "repvgg_a0"])
def test_branches_can_be_fused(name, bits, tmp_path):
    from timm.utils import reparameterize_model

    ticketed = without_norm_scale(
        mptify.transform(timm.create_model(name, num_classes=10), bits=bits, prune=0.5)
    )
    fused = reparameterize_model(ticketed)
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = ticketed(x)
        torch.testing.assert_close(
            fused(x), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
        )
    if bits == "1/32":  # in 1/1 there is nothing to fuse: every branch sees signs
        assert len(list(fused.modules())) < len(list(ticketed.modules()))
        with pytest.raises(mptify.MptifyError, match=r"its ticket can.t be saved"):
            mptify.save(fused, tmp_path / "a.ticket")
    loaded = mptify.load(
        saved(ticketed, tmp_path / "b.ticket"), model=timm.create_model(name, num_classes=10)
    )
    with torch.no_grad():
        assert torch.equal(loaded(x), expected)


def saved(ticketed, path):
    mptify.save(ticketed, path)
    return path


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
@pytest.mark.parametrize("name", ["timm:test_resnet", "timm:test_vit", "torchvision:swin_t"])
def test_torchscript_is_refused_with_a_pointer_to_export(name, bits):
    with torch.device("meta"):
        ticketed = mptify.transform(registry.build(registry.resolve(name)), bits=bits)
    with pytest.raises(mptify.MptifyError, match=r"torch\.export\.export"):
        torch.jit.script(ticketed)
