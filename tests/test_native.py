"""The C++ passes against slow, obvious NumPy, and the install without a compiler."""

import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mptify
from mptify.errors import MptifyError
from mptify.nn import build, native, quantizers, topk
from mptify.runtime import library as packed
from tests.helpers.weights import gain_of
from tests.nets import Plain, images

compiled = pytest.mark.skipif(
    native.library is None, reason="no C++ compiler was there when mptify was installed"
)


def slow_choice(scores, weight, kept):
    """Indices of the survivors: by falling magnitude, then by rising index; a NaN is larger than infinity, too."""
    magnitudes = (
        torch.as_tensor(scores, dtype=torch.float32).view(torch.int32) & 0x7FFFFFFF
    )  # whose order is that of the floats
    return sorted(range(len(scores)), key=lambda i: (-int(magnitudes[i]), i))[:kept]


def choice(scores, weight, kept, kind=native.Effective.SIGNS, hint=native.NO_HINT):
    out = torch.full(scores.shape, 7.0)
    bits = native.bits_for(scores.numel())
    gain, after = native.select(scores, weight, out, bits, kept, kind, hint)
    return out, gain, after


@pytest.mark.parametrize("library", [native.library, packed.library], ids=["ticket", "packed"])
def test_the_libraries_were_built_where_there_is_a_compiler(library):
    assert (library is not None) or not any(
        shutil.which(name) for name in ("c++", "g++", "clang++")
    )


numbers = st.floats(width=32, allow_nan=True, allow_infinity=True) | st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 0.5]
)


@compiled
@settings(deadline=None, max_examples=200)
@given(st.lists(numbers, min_size=1, max_size=200), st.data())
def test_any_scores_give_the_mask_of_a_sort(values, data):
    scores = torch.tensor(values)
    weight = (
        torch.tensor(
            data.draw(
                st.lists(st.floats(-4, 4, width=32), min_size=len(values), max_size=len(values))
            )
        )
        + 0.0
    )
    kept = data.draw(st.integers(1, len(values)))
    hint = native.Hint(data.draw(st.integers(0, 2**31 - 1)), data.draw(st.integers(0, 2**20)))
    out, gain, _ = choice(scores, weight, kept, hint=hint)
    chosen = slow_choice(values, weight, kept)
    expected = np.zeros(len(values), np.float32)
    expected[chosen] = np.where(weight.numpy()[chosen] < 0, -1, 1)
    np.testing.assert_array_equal(out.numpy(), expected)
    assert gain == pytest.approx(
        float(np.abs(weight.numpy()[chosen].astype(np.float64)).mean()), rel=1e-7, abs=1e-30
    )


@compiled
@pytest.mark.parametrize("count", [1, 63, 64, 4095, 4097, 70_000, 300_001])
@pytest.mark.parametrize("steps", [None, 1.0, 0.25])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_layers_agree_with_torch(count, steps, threads):
    generator = torch.Generator().manual_seed(count)
    scores, weight = (
        torch.randn(count, generator=generator),
        torch.randn(count, generator=generator),
    )
    if steps:
        scores = (scores / steps).round() * steps  # ties by the thousand, zeros among them
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for kept in {1, max(1, count // 5), max(1, count - 1), count}:
            mask = topk.select_mask(scores, kept)
            signs, gain, hint = choice(scores, weight, kept)
            assert torch.equal(signs, topk.survivors(weight, mask))
            assert gain == pytest.approx(float(gain_of(weight, mask)), rel=3e-7)
            again, same, _ = choice(scores, weight, kept, native.Effective.SCALED_SIGNS, hint)
            assert same == gain
            assert torch.equal(again, signs * gain)
            assert torch.equal(
                choice(scores, weight, kept, native.Effective.WEIGHTS, hint)[0], weight * mask
            )
    finally:
        torch.set_num_threads(before)


@compiled
def test_the_gain_does_not_depend_on_the_number_of_threads():
    scores, weight = torch.randn(400_000), torch.randn(400_000)
    before, gains = torch.get_num_threads(), set()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        gains.add(choice(scores, weight, 90_000)[1])
    torch.set_num_threads(before)
    assert len(gains) == 1


@compiled
@pytest.mark.parametrize("signs", [False, True])
def test_the_gradient_goes_by_weight_and_sign_of_the_score(signs):
    grad, weight, scores = torch.randn(3, 70_001).unbind()
    scores[:3] = torch.tensor([0.0, -0.0, math.nan])
    pulled = native.score_gradient(grad.clone(), weight.clone(), scores.clone(), 0.5, signs)
    size = torch.sign(weight) if signs else weight
    torch.testing.assert_close(pulled, grad * size * 0.5 * torch.where(scores < 0, -1.0, 1.0))


@compiled
def test_the_gradient_of_a_conv_on_channels_last_images_goes_through_the_library(monkeypatch):
    layer = mptify.transform(torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3, bias=False)), prune=0.5)[
        0
    ]
    images = torch.randn(4, 8, 12, 12)

    def pulled(order):
        layer.scores.grad = None
        layer(images.to(memory_format=order)).square().sum().backward()
        return layer.scores.grad

    plain, calls, pull = pulled(torch.contiguous_format), [], native.score_gradient
    monkeypatch.setattr(
        native, "score_gradient", lambda *arguments: calls.append(1) or pull(*arguments)
    )
    turned = pulled(torch.channels_last)
    assert calls
    assert turned.is_contiguous()
    torch.testing.assert_close(turned, plain)


@compiled
@pytest.mark.parametrize("width", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_signs_and_their_gradients_agree_with_torch(monkeypatch, width, order):
    def both(x):
        x = x.clone(memory_format=order).requires_grad_()
        y = quantizers.sign(x, width=width)
        (y * 3).sum().backward()
        return y.detach(), x.grad

    values = torch.randn(4, 17, 33, 40)
    values.view(-1)[:4] = torch.tensor([0.0, -0.0, 1.0, -1.0])
    signs, slopes = both(values)
    monkeypatch.setattr(native, "library", None)
    assert torch.equal(signs, both(values)[0])
    torch.testing.assert_close(slopes, both(values)[1])


@compiled
@pytest.mark.parametrize("module", [native, packed])
def test_a_library_of_other_sources_is_refused(monkeypatch, module):
    monkeypatch.setattr(build, "source_digest", lambda source: "0")
    with pytest.raises(MptifyError, match=r"was built from other sources .* Install mptify again"):
        module._load()


@pytest.mark.parametrize("source", build.SOURCES)
def test_the_digest_of_a_library_follows_every_header_that_it_includes(tmp_path, source):
    package = tmp_path / "mptify"
    for folder in ("nn/csrc", "runtime/csrc"):
        shutil.copytree(Path(build.__file__).parents[1] / folder, package / folder)
    command = ["g++", "-std=c++17", "-MM", str(package / source)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    included = {Path(name).resolve() for name in listed.replace("\\", " ").split()[1:]}
    assert package / source in included
    for path in included & set(package.rglob("*")):
        before = build.source_digest(package / source)
        path.write_bytes(path.read_bytes() + b"\n")
        assert build.source_digest(package / source) != before, path


def test_without_a_library_torch_does_the_work(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_SOURCE", tmp_path / "none.cpp")
    assert native._load() is None


@compiled
@pytest.mark.parametrize("bits", ["1/32", "1/1", "32/32"])
@pytest.mark.parametrize("score_grad", ["biprop", "alpha"])
def test_a_search_step_is_the_same_without_the_library(monkeypatch, bits, score_grad):
    def step():
        torch.manual_seed(0)
        ticketed = mptify.transform(Plain(), bits=bits, prune=0.7, score_grad=score_grad)
        ticketed(images()).square().sum().backward()
        return {
            name: (layer.scores.grad, layer.mask, layer.gain)
            for name, layer in mptify.ticket_layers(ticketed).items()
        }

    quick = step()
    monkeypatch.setattr(native, "library", None)
    for name, (grad, mask, gain) in step().items():
        torch.testing.assert_close(quick[name][0], grad, rtol=1e-3, atol=1e-4)
        assert torch.equal(quick[name][1], mask)
        torch.testing.assert_close(quick[name][2], gain, rtol=3e-7, atol=0)


def test_without_a_compiler_nothing_is_built_and_nothing_breaks(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    source = tmp_path / "mptify/nn/csrc/ticket.cpp"
    source.parent.mkdir(parents=True)
    source.write_text("this is no C++")
    assert build.build(source) is None
    monkeypatch.delenv("CXX")
    assert build.build(source) is None
    assert [path.name for path in source.parent.iterdir()] == ["ticket.cpp"]


@pytest.mark.parametrize("bits", ["1/32", "1/1", "32/32"])
@pytest.mark.parametrize("without", [False, True])
def test_torchs_default_type_plays_no_part(bits, without, monkeypatch):
    """The passes write float32: into memory that was made as anything else, they would write nonsense."""
    if without:
        monkeypatch.setattr(native, "library", None)
    network, x = Plain(), images()

    def trained():
        ticketed = mptify.transform(network, bits=bits, prune=0.5)
        ticketed(x).square().sum().backward()
        return [
            layer.scores.grad for layer in mptify.ticket_layers(ticketed).values()
        ], ticketed.eval()(x)

    gradients, outputs = trained()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        ours, theirs = trained()
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(outputs, theirs)
    assert all(torch.equal(one, other) for one, other in zip(gradients, ours, strict=True))
