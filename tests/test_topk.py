"""The maths of a ticket layer against slow and obvious versions, which share no code with mptify."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mptify
from mptify.nn import quantizers, topk
from tests.helpers.weights import gain_of, weight_of

PROPERTY = settings(max_examples=150, deadline=None, database=None)
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    math.inf,
    -math.inf,
    math.nan,
    2.0**-149,
    -(2.0**-149),
    1.5 * 2.0**127,
]  # float32, exactly
one_score = st.one_of(
    st.sampled_from(SPECIAL), st.floats(-2, 2, width=32), st.floats(width=32, allow_nan=False)
)
some_scores = st.lists(one_score, min_size=1, max_size=60)
fractions = st.floats(0, 1, exclude_max=True)


def slow_mask(scores, kept):
    """Rank by |score|, NaN first, then by index; keep the first `kept`."""
    values = [float(score) for score in np.asarray(scores).ravel()]
    ranked = sorted(
        range(len(values)),
        key=lambda i: (0, 0.0, i) if math.isnan(values[i]) else (1, -abs(values[i]), i),
    )
    mask = np.zeros(len(values), bool)
    mask[ranked[:kept]] = True
    return mask.reshape(np.shape(scores))


def slow_gain(weight, mask):
    survivors = [abs(float(w)) for w, m in zip(np.ravel(weight), np.ravel(mask)) if m]
    return math.fsum(survivors) / len(survivors)


def plus_or_minus(value):
    return -1.0 if value < 0 else 1.0


def slow_score_grad(upstream, scores, weight, mask, score_grad):
    gain = slow_gain(weight, mask)
    grads = []
    for g, s, w in zip(np.ravel(upstream), np.ravel(scores), np.ravel(weight)):
        scale = abs(float(w)) if score_grad == "biprop" else gain
        grads.append(float(g) * plus_or_minus(w) * scale * plus_or_minus(s))
    return np.array(grads).reshape(np.shape(scores))


# -- how many survive ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "prune", "kept"),
    [
        (36864, 0.8, 7373),
        (10, 0.0, 10),
        (10, 0.5, 5),
        (10, 0.75, 2),  # round(7.5) is 8
        (10, 0.25, 8),  # round(2.5) is 2: halves go to the even neighbour
        (3, 0.99, 1),
        (1, 0.0, 1),
        (1, 0.999999, 1),
        (1_000_000, 0.999999, 1),
        (2_359_296, 0.9, 235_930),
    ],
)
def test_kept_count_is_what_rounding_the_removed_part_leaves(count, prune, kept):
    assert topk.kept_count(count, prune) == kept


@PROPERTY
@given(count=st.integers(1, 10**8), prune=fractions)
def test_kept_count_is_within_half_a_weight_of_the_fraction_and_never_zero(count, prune):
    kept = topk.kept_count(count, prune)
    assert 1 <= kept <= count
    assert kept == 1 or abs(kept - count * (1 - prune)) <= 0.5 + 1e-6


# -- masks ---------------------------------------------------------------------------------------------------------------


@PROPERTY
@given(scores=some_scores, prune=fractions)
def test_exactly_the_asked_number_survives(scores, prune):
    kept = topk.kept_count(len(scores), prune)
    mask = topk.select_mask(torch.tensor(scores), kept)
    assert mask.dtype == torch.bool
    assert int(mask.sum()) == kept


@PROPERTY
@given(scores=some_scores, data=st.data())
def test_the_mask_is_that_of_a_full_sort(scores, data):
    kept = data.draw(st.integers(1, len(scores)))
    mask = topk.select_mask(torch.tensor(scores), kept)
    assert mask.tolist() == slow_mask(scores, kept).tolist()


@PROPERTY
@given(scores=some_scores, data=st.data())
def test_the_path_for_other_devices_gives_the_same_mask(scores, data):
    kept = data.draw(st.integers(1, len(scores)))
    bits = torch.tensor(scores, dtype=torch.float32).view(torch.int32) & 0x7FFFFFFF
    assert topk._select_on_device(bits, kept).tolist() == slow_mask(scores, kept).tolist()


@PROPERTY
@given(scores=some_scores)
def test_a_smaller_mask_lies_inside_a_larger_one(scores):
    masks = [topk.select_mask(torch.tensor(scores), kept) for kept in range(1, len(scores) + 1)]
    assert all(bool((small <= large).all()) for small, large in pairwise(masks))


@pytest.mark.parametrize("value", [1.0, -3.0, 0.0, -0.0, math.inf, math.nan])
@pytest.mark.parametrize("kept", [1, 7, 11, 12])
def test_among_equal_scores_the_lower_index_wins(value, kept):
    mask = topk.select_mask(torch.full((3, 4), value), kept)
    assert mask.flatten().tolist() == [True] * kept + [False] * (12 - kept)


def test_ties_count_across_signs_and_rows():
    scores = torch.tensor([[0.5, -2.0, 2.0], [2.0, -2.0, -0.5]])
    assert topk.select_mask(scores, 3).tolist() == [[False, True, True], [True, False, False]]
    assert topk.select_mask(scores, 5).tolist() == [[True, True, True], [True, True, False]]


def test_plus_and_minus_zero_are_equals():
    assert topk.select_mask(torch.tensor([-0.0, 0.0, -0.0, 0.0]), 2).tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_infinities_outrank_numbers_and_nan_outranks_infinities():
    scores = torch.tensor([3.4e38, -math.inf, 0.0, math.nan, math.inf, -math.nan])
    picked = [topk.select_mask(scores, kept).nonzero().flatten().tolist() for kept in (2, 4, 5)]
    assert picked == [[3, 5], [1, 3, 4, 5], [0, 1, 3, 4, 5]]


@pytest.mark.parametrize("value", [0.0, 1.0, math.nan])
def test_a_layer_of_one_weight_keeps_it(value):
    assert topk.select_mask(torch.tensor([[value]]), 1).tolist() == [[True]]


@pytest.mark.parametrize("kept", [-1, 0, 5])
def test_an_impossible_number_of_survivors_is_refused(kept):
    with pytest.raises(ValueError, match=f"between 1 and the number of scores, 4; got {kept}"):
        topk.select_mask(torch.ones(4), kept)


@pytest.mark.parametrize("kept", [1, 100, 359])
def test_the_mask_does_not_depend_on_the_memory_format(kept):
    scores = torch.randint(
        -6, 7, (5, 8, 3, 3), generator=torch.Generator().manual_seed(0)
    ).float()  # many ties
    plain = topk.select_mask(scores, kept)
    last = scores.to(memory_format=torch.channels_last)
    assert not last.is_contiguous()
    assert torch.equal(topk.select_mask(last, kept), plain)
    turned = scores.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert torch.equal(topk.select_mask(turned, kept), plain)
    assert plain.tolist() == slow_mask(scores.numpy(), kept).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scores_of_other_widths_are_ranked_alike(dtype):
    scores = torch.randint(-9, 10, (40,), generator=torch.Generator().manual_seed(1)).to(dtype)
    assert topk.select_mask(scores, 13).tolist() == slow_mask(scores.double().numpy(), 13).tolist()


def test_scores_are_left_as_they_are():
    scores = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    mask = topk.select_mask(scores, 1)
    assert scores.tolist() == [1.0, -2.0, 3.0]
    assert scores._version == 0
    assert not mask.requires_grad


# -- survivors: the mask with the frozen signs in it ------------------------------------------------------------------------


def slow_survivors(scores, weight, kept):
    return np.where(slow_mask(scores, kept), np.where(np.asarray(weight) < 0, -1.0, 1.0), 0.0)


@PROPERTY
@given(scores=some_scores, data=st.data())
def test_survivors_are_the_frozen_signs_under_the_mask(scores, data):
    kept = data.draw(st.integers(1, len(scores)))
    weight = data.draw(
        st.lists(
            st.sampled_from([0.5, -0.5, 2.0, -2.0, 0.0]), min_size=len(scores), max_size=len(scores)
        )
    )
    found = topk.select_survivors(torch.tensor(scores), torch.tensor(weight), kept)
    assert found.dtype == torch.float32
    assert found.tolist() == slow_survivors(scores, weight, kept).tolist()
    mask = torch.from_numpy(slow_mask(scores, kept))
    assert topk.survivors(torch.tensor(weight), mask).tolist() == found.tolist()


@pytest.mark.parametrize("special", [math.nan, math.inf, 0.0, 2.0**-149, 1.0])
@pytest.mark.parametrize("kept", [1, 3, 40, 300, 719])
def test_survivors_of_special_scores(special, kept):
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((8, 10, 3, 3)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.1] = special
    weight = rng.standard_normal(scores.shape).astype(np.float32)
    found = topk.select_survivors(torch.from_numpy(scores), torch.from_numpy(weight), kept)
    np.testing.assert_array_equal(found.numpy(), slow_survivors(scores, weight, kept))


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_a_nan_survives_before_scores_that_tie(kept):
    found = topk.select_survivors(torch.tensor([1.0, 1.0, 1.0, 1.0, math.nan]), torch.ones(5), kept)
    assert found.tolist() == [1.0] * (kept - 1) + [0.0] * (5 - kept) + [1.0]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_survivors_of_weight_zero_count_as_plus_one(kept):
    scores, weight = torch.tensor([[3.0, -2.0, 1.0]]), torch.tensor([[-0.0, 0.0, -0.0]])
    expected = [1.0] * kept + [0.0] * (3 - kept)
    assert topk.survivors(weight, topk.select_mask(scores, kept)).tolist() == [expected]
    layer = torch.nn.Linear(3, 1, bias=False)
    layer.weight.data.copy_(weight)
    ticket = mptify.transform(torch.nn.Sequential(layer), init="keep", prune=1 - kept / 3)[0]
    with torch.no_grad():
        ticket.scores.copy_(scores)
    assert ticket.sign.tolist() == [[1.0, 1.0, 1.0]]
    assert topk.select_survivors(ticket.scores, ticket.frozen, kept).tolist() == [expected]


@pytest.mark.parametrize("kept", [1, 100, 359])
def test_survivors_do_not_depend_on_the_memory_format(kept):
    scores = torch.randint(-6, 7, (5, 8, 3, 3), generator=torch.Generator().manual_seed(0)).float()
    weight = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    last = [tensor.to(memory_format=torch.channels_last) for tensor in (scores, weight)]
    expected = slow_survivors(scores.numpy(), weight.numpy(), kept)
    for pair in ((scores, weight), last, (scores, last[1]), (last[0], weight)):
        np.testing.assert_array_equal(topk.select_survivors(*pair, kept).numpy(), expected)


@pytest.mark.parametrize("kept", [0, 5])
def test_an_impossible_number_of_selected_survivors_is_refused(kept):
    with pytest.raises(ValueError, match=f"between 1 and the number of scores, 4; got {kept}"):
        topk.select_survivors(torch.ones(4), torch.ones(4), kept)


# -- masks of large layers --------------------------------------------------------------------------------------------------

SIZES = [1 << 16, (1 << 16) + 1, 150_001]


def _distribution(name, count):
    rng = np.random.default_rng(5)
    stride = count >> 13
    if name.startswith("sampled"):
        values = rng.random(count)
        values[::stride] = {"sampled are largest": 1000.0, "sampled are smallest": 0.0}[name]
        return values.astype(np.float32)
    made = {
        "normal": lambda: rng.standard_normal(count),
        "sorted up": lambda: np.arange(count),
        "sorted down": lambda: np.arange(count)[::-1].copy(),
        "constant": lambda: np.full(count, -0.25),
        "heavy ties": lambda: rng.integers(-3, 4, count),
        "two values": lambda: np.where(rng.random(count) < 0.3, 1.0, -2.0),
        "one outlier": lambda: np.eye(1, count, count // 2)[0],
        "periodic": lambda: np.arange(count) % stride,
        "with nan and inf": lambda: np.where(
            rng.random(count) < 0.1,
            np.nan,
            np.where(rng.random(count) < 0.1, np.inf, rng.random(count)),
        ),
    }
    return made[name]().astype(np.float32)


DISTRIBUTIONS = [
    "normal", "sorted up", "sorted down", "constant", "heavy ties", "two values", "one outlier", "periodic",
    "sampled are largest", "sampled are smallest", "with nan and inf",
]  # fmt: skip


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("count", SIZES)
def test_large_layers_get_the_mask_of_a_full_sort(name, count):
    scores = _distribution(name, count)
    magnitude = np.where(np.isnan(scores), np.inf, np.abs(scores)).astype(np.float64)
    order = np.lexsort((np.arange(count), -magnitude, ~np.isnan(scores)))
    for kept in (1, 2, count // 5, count // 2, count - 1):
        expected = np.zeros(count, bool)
        expected[order[:kept]] = True
        mask = topk.select_mask(torch.from_numpy(scores), kept).numpy()
        assert np.array_equal(mask, expected), kept
        found = topk.select_survivors(
            torch.from_numpy(scores), torch.full((count,), -1.0), kept
        ).numpy()
        assert np.array_equal(found, np.where(expected, -1.0, 0.0)), kept


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_kth_largest_is_that_of_a_full_sort(name):
    count = SIZES[-1]
    bits = np.abs(_distribution(name, count)).view(np.int32)
    ranked = np.sort(bits)[::-1]
    for kept in (1, 17, count // 100, count // 2, count - count // 100):
        threshold, clear = topk._partition(torch.from_numpy(bits.copy()), kept)
        assert threshold == ranked[kept - 1], kept
        finite = not np.isnan(ranked[:1].view(np.float32)).any()
        assert clear == (threshold > 0 and finite and int((bits >= threshold).sum()) == kept)


@pytest.mark.parametrize("name", ["normal", "constant", "heavy ties", "sampled are largest"])
def test_the_path_for_other_devices_agrees_on_large_layers(name):
    scores = torch.from_numpy(_distribution(name, SIZES[1]))
    for kept in (1, scores.numel() // 5, scores.numel() - 1):
        anywhere = topk._select_on_device(scores.abs().view(torch.int32), kept)
        assert torch.equal(anywhere, topk.select_mask(scores, kept))


# -- gains ---------------------------------------------------------------------------------------------------------------

some_weights = st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=40)


@PROPERTY
@given(weight=some_weights, data=st.data())
def test_the_gain_is_the_mean_magnitude_of_the_survivors(weight, data):
    mask = data.draw(
        st.lists(st.booleans(), min_size=len(weight), max_size=len(weight)).filter(any)
    )
    gain = gain_of(torch.tensor(weight), torch.tensor(mask))
    assert gain.dtype == torch.float32
    assert gain.shape == ()
    assert float(gain) == pytest.approx(slow_gain(weight, mask), rel=1e-6, abs=1e-30)


def test_the_gain_of_a_large_layer_hardly_depends_on_the_order_of_summation():
    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.standard_normal(300_000).astype(np.float32))
    mask = torch.from_numpy(rng.random(300_000) < 0.2)
    shuffled = torch.from_numpy(rng.permutation(300_000))
    for gain in (gain_of(weight, mask), gain_of(weight[shuffled], mask[shuffled])):
        assert float(gain) == pytest.approx(slow_gain(weight.numpy(), mask.numpy()), rel=2e-7)


def test_no_gradient_flows_through_the_gain():
    weight = torch.ones(3, requires_grad=True)
    assert not gain_of(weight, torch.ones(3, dtype=torch.bool)).requires_grad


# -- effective weights and the scores' gradient ------------------------------------------------------------------------------


def _layer(zeros=True):
    """Scores, frozen weights, a mask and an upstream gradient, with every kind of zero in each role."""
    rng = np.random.default_rng(3)
    scores, weight, upstream = (
        torch.from_numpy(rng.standard_normal((4, 9)).astype(np.float32)) for _ in range(3)
    )
    if zeros:
        scores[0, :4] = torch.tensor([0.0, -0.0, 0.0, -0.0])
        weight[0, 2:6] = torch.tensor([0.0, -0.0, -0.0, 0.0])
        weight[3] = weight[3].abs()
    mask = topk.select_mask(scores, 30 if zeros else 20)  # some zero scores are kept, some not
    return scores.requires_grad_(), weight, mask, upstream


@pytest.mark.parametrize("weight_bits", [1, 32])
@pytest.mark.parametrize("includes_gain", [True, False])
def test_the_effective_weight_is_gain_times_signs_or_the_weights_themselves(
    weight_bits, includes_gain
):
    scores, weight, mask, _ = _layer()
    gain = gain_of(weight, mask)
    found = weight_of(
        scores, weight, mask, gain, weight_bits=weight_bits, includes_gain=includes_gain
    )
    size = np.float32(slow_gain(weight, mask)) if includes_gain else np.float32(1)
    expected = np.zeros(weight.shape, np.float32)
    for place in zip(*np.nonzero(mask.numpy())):
        expected[place] = (
            float(weight[place]) if weight_bits == 32 else plus_or_minus(weight[place]) * size
        )
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.detach().numpy(), expected)


def test_a_weight_of_zero_counts_as_plus_one():
    weight, mask = torch.tensor([0.0, -0.0, -2.0, 2.0]), torch.tensor([True, True, True, False])
    found = weight_of(torch.ones(4), weight, mask, torch.tensor(0.5))
    assert found.tolist() == [0.5, 0.5, -0.5, 0.0]


@pytest.mark.parametrize("weight_bits", [1, 32])
@pytest.mark.parametrize("score_grad", ["biprop", "alpha"])
def test_the_score_gradient_goes_straight_through_the_mask(weight_bits, score_grad):
    scores, weight, mask, upstream = _layer()
    gain = gain_of(weight, mask)
    found = weight_of(scores, weight, mask, gain, weight_bits=weight_bits, score_grad=score_grad)
    found.backward(upstream)
    expected = slow_score_grad(upstream, scores.detach(), weight, mask, score_grad)
    np.testing.assert_allclose(scores.grad.numpy(), expected, rtol=1e-6, atol=1e-6)
    removed = ~mask & (weight != 0)
    assert bool((scores.grad[removed] != 0).all())  # pruned weights learn too: they can come back


@pytest.mark.parametrize("score_grad", ["biprop", "alpha"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_with_the_gain_outside_the_gradient_is_still_that_of_the_effective_weight(score_grad, size):
    scores, weight, mask, upstream = _layer()
    weight = weight * size
    gain = gain_of(weight, mask)
    found = weight_of(scores, weight, mask, gain, score_grad=score_grad, includes_gain=False)
    (gain * found).backward(upstream)  # what the effective weight gain·M⊙B receives
    expected = slow_score_grad(upstream, scores.detach(), weight, mask, score_grad)
    np.testing.assert_allclose(scores.grad.numpy(), expected, rtol=1e-5, atol=1e-6 * size)


@pytest.mark.parametrize("score", [0.0, -0.0])
@pytest.mark.parametrize("score_grad", ["biprop", "alpha"])
def test_the_sign_of_a_zero_score_is_plus_one(score, score_grad):
    scores, weight = torch.full((2,), score, requires_grad=True), torch.tensor([3.0, -3.0])
    weight_of(
        scores, weight, torch.tensor([True, True]), torch.tensor(3.0), score_grad=score_grad
    ).sum().backward()
    assert scores.grad.tolist() == [3.0, -3.0]


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_the_gradient_at_a_zero_weight_is_zero_for_biprop_and_the_gain_for_alpha(zero):
    grads = {}
    for score_grad in ("biprop", "alpha"):
        scores = torch.tensor([1.0, -1.0, 1.0], requires_grad=True)
        weight, mask = torch.tensor([zero, zero, 1.0]), torch.tensor([True, True, True])
        weight_of(
            scores, weight, mask, gain_of(weight, mask), score_grad=score_grad
        ).sum().backward()
        grads[score_grad] = scores.grad.tolist()
    assert grads["biprop"] == [0.0, 0.0, 1.0]
    assert grads["alpha"] == pytest.approx([1 / 3, -1 / 3, 1 / 3], rel=1e-6)


@PROPERTY
@given(data=st.data(), count=st.integers(1, 20), score_grad=st.sampled_from(["biprop", "alpha"]))
def test_the_score_gradient_agrees_on_any_layer(data, count, score_grad):
    def numbers(bound):
        return data.draw(
            st.lists(st.floats(-bound, bound, width=32), min_size=count, max_size=count)
        )

    scores = torch.tensor(numbers(2), requires_grad=True)
    weight, upstream = torch.tensor(numbers(2)), torch.tensor(numbers(1))
    mask = topk.select_mask(scores, data.draw(st.integers(1, count)))
    weight_of(scores, weight, mask, gain_of(weight, mask), score_grad=score_grad).backward(upstream)
    expected = slow_score_grad(upstream, scores.detach(), weight, mask, score_grad)
    np.testing.assert_allclose(scores.grad.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_nothing_but_the_scores_receives_a_gradient():
    scores, weight, mask, upstream = _layer(zeros=False)
    weight.requires_grad_()
    gain = torch.tensor(0.5, requires_grad=True)
    weight_of(scores, weight, mask, gain).backward(upstream)
    assert weight.grad is None
    assert gain.grad is None
    assert scores.grad is not None


# -- sign and its estimator ------------------------------------------------------------------------------------------------

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", [topk.sign, quantizers.sign])
def test_sign_gives_plus_one_to_both_zeros_and_keeps_the_dtype(dtype, function):
    tiny = torch.finfo(dtype).tiny
    values = torch.tensor([0.0, -0.0, tiny, -tiny, 5.0, -5.0, math.inf, -math.inf], dtype=dtype)
    found = function(values)
    assert found.dtype == dtype
    assert found.tolist() == [1, 1, 1, -1, 1, -1, 1, -1]


@PROPERTY
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_sign_is_minus_one_below_zero_and_plus_one_elsewhere(values):
    assert topk.sign(torch.tensor(values)).tolist() == [
        -1.0 if value < 0 else 1.0 for value in values
    ]


def slow_slope(x, width):
    return max(0.0, 2 / width * (1 - abs(x) / width))


@pytest.mark.parametrize("width", [0.25, 0.5, 1.0, 1.3, 2.0, 10.0])
def test_the_sign_estimator_is_a_triangle_of_the_given_width(width):
    around = [
        0.0,
        -0.0,
        width,
        -width,
        width * 0.999,
        -width * 1.001,
        width / 2,
        -width / 3,
        100.0,
        -100.0,
    ]
    x = torch.tensor(
        [*around, *np.linspace(-2 * width, 2 * width, 41)], dtype=torch.float32, requires_grad=True
    )
    upstream = torch.linspace(-2, 3, x.numel())
    quantizers.sign(x, width=width).backward(upstream)
    expected = [float(g) * slow_slope(float(v), width) for g, v in zip(upstream, x.detach())]
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-6, atol=2e-6 / width)


@pytest.mark.parametrize("width", [0.5, 1.0, 3.0])
def test_the_estimators_slope_has_an_area_of_two(width):
    x = torch.linspace(-2 * width, 2 * width, 40_001, dtype=torch.float64, requires_grad=True)
    quantizers.sign(x, width=width).sum().backward()
    assert float(torch.trapezoid(x.grad, x.detach())) == pytest.approx(
        2, rel=1e-6
    )  # sign climbs from -1 to +1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1.0, 2.0])
def test_the_estimator_works_in_every_float_width(dtype, width):
    x = torch.linspace(-3, 3, 49).to(dtype).requires_grad_()
    quantizers.sign(x, width=width).backward(torch.ones_like(x))
    assert x.grad.dtype == dtype
    expected = [slow_slope(float(v), width) for v in x.detach()]
    tolerance = 4 * torch.finfo(dtype).eps
    np.testing.assert_allclose(x.grad.double().numpy(), expected, rtol=tolerance, atol=tolerance)


def test_the_estimator_leaves_its_input_as_it_was():
    x = torch.linspace(-1, 1, 9, requires_grad=True)
    before = x.detach().clone()
    quantizers.sign(x, width=0.7).sum().backward()
    assert torch.equal(x.detach(), before)
