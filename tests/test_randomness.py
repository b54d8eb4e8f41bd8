"""Frozen randomness: the values are part of the ticket format, so they are pinned to the bit."""

import hashlib
import math
import random
from itertools import combinations
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mptify.nn import init

PROPERTY = settings(max_examples=60, deadline=None, database=None)
LONG = 10_007  # a prime: no whole number of words in any stream
KINDS = {
    "signs": init.signs,
    "magnitudes": init.magnitudes,
    "scores": lambda seed, layer, count: init.scores(seed, layer, count, 0.5),
}

# fmt: off
GOLDEN = {
    (0, "conv1"): {
        "signs": [False, False, False, True, True, False, False, False],
        "magnitudes": [0.04952285438776016, 0.32142722606658936, 0.7851503491401672, 0.1963874101638794,
                       1.5221036672592163, 0.7164695262908936, 0.42262446880340576, 0.7480252981185913],
        "scores": [0.3464109003543854, 0.43807706236839294, 0.32563433051109314, -0.1714593470096588,
                   -0.05074241757392883, 0.34021857380867004, 0.3073212802410126, 0.20683959126472473],
    },
    (2**40 + 7, "layer4.1.conv2"): {
        "signs": [True, True, True, True, False, False, False, True],
        "magnitudes": [1.7731127738952637, 0.7952896952629089, 0.8607397079467773, 1.163965106010437,
                       0.8258624076843262, 0.5624651908874512, 0.15344910323619843, 1.797585368156433],
        "scores": [-0.40268537402153015, -0.277436763048172, 0.22010508179664612, 0.371353417634964,
                   -0.21968427300453186, -0.445821613073349, -0.31317803263664246, -0.010624915361404419],
    },
}
# fmt: on
DIGESTS = {
    (0, "conv1", "signs"): "e5f55435411955076757131e178512921cb8f0eb90b3bf6c7299b8609f0b1c41",
    (0, "conv1", "magnitudes"): "08de5ffd5a246c3d470ebff1b08f6e03e380c4eb491717ce6c02e487b6458ba2",
    (0, "conv1", "scores"): "79a1fd946f8492e477a27e6e6b01520b963861bab48636e54a2fda7dccfef9d9",
    (
        2**40 + 7,
        "layer4.1.conv2",
        "signs",
    ): "afe92f1061f0921c8663137199e5a793c4f021f2c60605597c6bc25f051a59d4",
    (
        2**40 + 7,
        "layer4.1.conv2",
        "magnitudes",
    ): "4aa66acb417844aaa2e3cb8358ba5fec48c2e72882169e6b91066554692349b1",
    (
        2**40 + 7,
        "layer4.1.conv2",
        "scores",
    ): "47d2fc761b2547cc56f81dc3a75f608ab8d863204ca886c662bd667540ef4446",
}
TABLE_DIGEST = "f592bfa4a4bdf855bcb19c0c3cd289b6740cdff1af7c24dc819f74ff7474d819"


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def philox(key, count):
    """Philox4x64-10 (Salmon et al., 2011) in plain integers; the counter of the first block is 1."""
    low = (1 << 64) - 1
    words = []
    for block in range(1, -(-count // 4) + 1):
        counter, keys = [block, 0, 0, 0], [key & low, key >> 64]
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
            counter = [
                (second >> 64) ^ counter[1] ^ keys[0],
                second & low,
                (first >> 64) ^ counter[3] ^ keys[1],
                first & low,
            ]
            keys = [(keys[0] + 0x9E3779B97F4A7C15) & low, (keys[1] + 0xBB67AE8584CAA73B) & low]
        words += counter
    return words[:count]


def slow_words(seed, layer, purpose, count):
    label = hashlib.sha256(f"mptify 1\n{seed}\n{layer}\n{purpose}".encode())
    return philox(int.from_bytes(label.digest()[:16], "little"), count)


# -- the streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seed", "layer"), GOLDEN)
def test_the_first_values_never_change(seed, layer, kind):
    assert KINDS[kind](seed, layer, 8).tolist() == GOLDEN[seed, layer][kind]


@pytest.mark.parametrize(("seed", "layer", "kind"), DIGESTS)
def test_long_streams_never_change(seed, layer, kind):
    assert digest(KINDS[kind](seed, layer, LONG)) == DIGESTS[seed, layer, kind]


@pytest.mark.parametrize(("seed", "layer"), [*GOLDEN, (2**63 - 1, "blöcke.0"), (5, "")])
def test_a_second_implementation_from_the_description_agrees(seed, layer):
    signs = [
        bool(word >> bit & 1) for word in slow_words(seed, layer, "signs", 3) for bit in range(64)
    ]
    assert init.signs(seed, layer, 192).tolist() == signs
    half = NormalDist()
    indices = [
        word >> shift & 0xFFFF
        for word in slow_words(seed, layer, "magnitudes", 6)
        for shift in (0, 16, 32, 48)
    ]
    expected = [half.inv_cdf(0.5 + (index + 0.5) / 131072) for index in indices]
    np.testing.assert_allclose(init.magnitudes(seed, layer, 24), expected, rtol=1e-6)
    steps = [
        (word >> shift & 0xFFFFFFFF) >> 8
        for word in slow_words(seed, layer, "scores", 6)
        for shift in (0, 32)
    ]
    expected = [(step + 0.5) / 2**23 * 0.25 - 0.25 for step in steps]
    np.testing.assert_allclose(init.scores(seed, layer, 12, 0.25), expected, rtol=1e-6)


@PROPERTY
@given(
    seed=st.integers(0, 2**63 - 1),
    layer=st.text(max_size=8),
    short=st.integers(0, 200),
    more=st.integers(0, 200),
)
@pytest.mark.parametrize("kind", KINDS)
def test_fewer_values_are_a_prefix_of_more(kind, seed, layer, short, more):
    few, many = KINDS[kind](seed, layer, short), KINDS[kind](seed, layer, short + more)
    assert len(few) == short
    assert len(many) == short + more
    assert np.array_equal(few, many[:short])


@pytest.mark.parametrize("kind", KINDS)
def test_each_seed_and_layer_has_a_stream_of_its_own(kind):
    places = [
        (0, "a"),
        (1, "a"),
        (0, "b"),
        (0, "a.0"),
        (10, "a"),
        (0, "A"),
        (2**32, "a"),
        (2**62, "a"),
    ]
    streams = [KINDS[kind](seed, layer, 20_000).astype(np.float64) for seed, layer in places]
    for one, other in combinations(streams, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.035  # five standard errors


def test_signs_magnitudes_and_scores_of_a_layer_know_nothing_of_each_other():
    streams = [draw(3, "layer", 20_000).astype(np.float64) for draw in KINDS.values()]
    streams.append(np.abs(streams[-1]))
    for one, other in combinations(streams[:3], 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.035
    assert abs(np.corrcoef(streams[1], streams[3])[0, 1]) < 0.035


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_within_a_stream_are_uncorrelated(kind):
    values = KINDS[kind](9, "layer", 40_000).astype(np.float64)
    for lag in (1, 2, 4, 64):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 0.025


@pytest.mark.parametrize("kind", KINDS)
def test_global_generators_neither_matter_nor_move(kind):
    first = KINDS[kind](1, "a", 500)
    random.seed(123)
    np.random.seed(123)
    torch.manual_seed(123)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    again = KINDS[kind](1, "a", 500)
    assert np.array_equal(first, again)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_caller_does_with_the_values_changes_no_later_draw(kind):
    first = KINDS[kind](1, "a", 100)
    kept = first.copy()
    first[:] = 0
    assert np.array_equal(KINDS[kind](1, "a", 100), kept)


# -- their statistics ------------------------------------------------------------------------------------------------------


def test_signs_are_fair():
    negative = init.signs(0, "layer", 200_000)
    assert negative.dtype == bool
    assert abs(negative.mean() - 0.5) < 5 * 0.5 / math.sqrt(200_000)


def test_magnitudes_are_half_normal():
    values = init.magnitudes(0, "layer", 200_000)
    assert values.dtype == np.float32
    assert values.min() > 0
    assert values.mean() == pytest.approx(math.sqrt(2 / math.pi), abs=0.007)
    assert np.mean(values.astype(np.float64) ** 2) == pytest.approx(1, abs=0.016)
    for share in (0.01, 0.25, 0.5, 0.75, 0.99):
        assert np.quantile(values, share) == pytest.approx(
            NormalDist().inv_cdf(0.5 + share / 2), abs=0.03
        )


@pytest.mark.parametrize("bound", [1.0, 1 / math.sqrt(27), 1e-3])
def test_scores_are_uniform_within_the_bound_and_never_zero(bound):
    values = init.scores(0, "layer", 200_000, bound) / bound
    assert values.dtype == np.float32
    assert np.abs(values).max() <= 1
    assert np.abs(values).min() > 0
    assert values.mean() == pytest.approx(0, abs=0.0065)
    assert values.std() == pytest.approx(1 / math.sqrt(3), abs=0.004)
    for share in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert np.quantile(values, share) == pytest.approx(2 * share - 1, abs=0.012)


def test_scores_scale_with_the_bound():
    np.testing.assert_allclose(
        init.scores(0, "a", 1000, 0.1) * 10, init.scores(0, "a", 1000, 1.0), rtol=1e-6
    )


# -- the table of half-normal quantiles --------------------------------------------------------------------------------------


def test_the_table_never_changes():
    assert digest(init._half_normal_table()) == TABLE_DIGEST


def test_the_table_holds_the_quantiles_of_the_normal_distribution():
    normal = NormalDist()
    expected = [normal.inv_cdf(0.5 + (index + 0.5) / 131072) for index in range(65536)]
    table = init._half_normal_table()
    np.testing.assert_allclose(table, expected, rtol=1e-6, atol=0)
    assert bool((np.diff(table) > 0).all())


def test_the_table_can_not_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        init._half_normal_table()[0] = 1


# -- frozen weights ----------------------------------------------------------------------------------------------------------

SHAPE = (6, 5, 3, 3)


def test_kaiming_normal_is_sign_times_magnitude_times_deviation():
    weight = init.frozen_weight(4, "conv", SHAPE, "kaiming_normal", 0.125)
    sign = np.where(init.signs(4, "conv", weight.size), -1, 1)
    expected = sign * init.magnitudes(4, "conv", weight.size).astype(np.float64) * 0.125
    assert weight.dtype == np.float32
    assert weight.shape == SHAPE
    np.testing.assert_array_equal(weight.ravel(), expected.astype(np.float32))


def test_signed_constant_is_sign_times_deviation():
    weight = init.frozen_weight(4, "conv", SHAPE, "signed_constant", 0.3)
    sign = np.where(init.signs(4, "conv", weight.size), -1, 1)
    assert weight.dtype == np.float32
    np.testing.assert_array_equal(weight.ravel(), (sign * np.float32(0.3)).astype(np.float32))


def test_both_schemes_share_their_signs():
    normal, constant = (
        init.frozen_weight(0, "a", (64,), scheme, 1.0)
        for scheme in ("kaiming_normal", "signed_constant")
    )
    assert np.array_equal(normal < 0, constant < 0)


def test_the_shape_only_arranges_the_values():
    flat = init.frozen_weight(7, "a", (270,), "kaiming_normal", 1.0)
    assert np.array_equal(init.frozen_weight(7, "a", SHAPE, "kaiming_normal", 1.0).ravel(), flat)


def test_frozen_weights_never_change():
    weight = init.frozen_weight(3, "a", (4, 5, 3, 3), "kaiming_normal", 0.1)
    assert digest(weight) == "cee6d27b9f39c7a7a815a969bf6e7841f844f88790643d7a56bff71b5e8ab23c"


# -- their deviation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fan_in", "prune", "expected"),
    [
        (200, 0.0, 0.1),
        (200, 0.75, 0.2),
        (50, 0.0, 0.2),
        (576, 0.8, math.sqrt(2 / 115.2)),
        (1, 0.0, math.sqrt(2)),
    ],
)
def test_the_deviation_is_that_of_the_fan_in_that_survives(fan_in, prune, expected):
    assert init.standard_deviation(fan_in, prune) == pytest.approx(expected, rel=1e-12)


def test_less_than_one_survivor_counts_as_one():
    assert init.standard_deviation(4, 0.9) == pytest.approx(math.sqrt(2))


def test_the_gain_of_the_nonlinearity_can_be_chosen():
    assert init.standard_deviation(100, 0.0, gain=1.0) == pytest.approx(0.1)


@pytest.mark.parametrize("prune", [0.0, 0.5, 0.9])
def test_a_pruned_layer_keeps_the_variance_of_what_passes_through(prune):
    fan_in, outputs = 1000, 200
    deviation = init.standard_deviation(fan_in, prune, gain=1.0)
    weight = init.frozen_weight(0, "a", (outputs, fan_in), "kaiming_normal", deviation).astype(
        np.float64
    )
    kept = np.random.default_rng(0).random(weight.shape) >= prune
    passed = (weight * kept) @ np.random.default_rng(1).standard_normal((fan_in, 50))
    assert passed.var() == pytest.approx(1, abs=0.1)
