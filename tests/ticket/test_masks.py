"""Masks as bytes and back, and how small they get."""

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mptify.errors import DamagedTicket
from mptify.nn import init
from mptify.nn.topk import kept_count, mask_entropy
from mptify.ticket import masks

SHAPES = [
    (1,),
    (7,),
    (64, 3, 7, 7),
    (10, 64),
    (32, 1, 3, 3),
    (16, 8, 3),
    (8, 4, 3, 3, 3),
    (300, 500),
]


def drawn(shape, density, seed=0):
    mask = np.random.default_rng(seed).random(shape) < density
    mask.reshape(-1)[0] = True
    return mask


def there_and_back(mask, levels=None):
    blob = masks.encode(mask, levels)
    assert np.array_equal(masks.decode(blob, mask.shape, int(mask.sum()), levels), mask)
    return blob


def moved(shape, prune, noise, layer="conv"):
    """The mask of initial scores to which noise was added, and the levels that they began with."""
    count = math.prod(shape)
    scores = init.scores(0, layer, count, 1.0) + noise * np.random.default_rng(0).standard_normal(
        count
    )
    mask = np.zeros(count, bool)
    mask[np.argsort(-np.abs(scores), kind="stable")[: kept_count(count, prune)]] = True
    return mask.reshape(shape), functools.partial(init.score_levels, 0, layer, count)


@given(hnp.arrays(bool, hnp.array_shapes(max_dims=5, max_side=12)))
@settings(deadline=None)
def test_any_mask_comes_back(mask):
    there_and_back(mask)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.2, 0.5, 0.8, 0.999, 1.0])
def test_masks_of_every_density_come_back(shape, density):
    there_and_back(drawn(shape, density))


@pytest.mark.parametrize("density", [0.5, 0.2, 0.05])
def test_a_mask_without_structure_costs_its_entropy(density):
    mask = drawn((512, 512, 3, 3), density)
    assert len(there_and_back(mask)) < 1.001 * mask_entropy(mask.size, int(mask.sum())) / 8 + 16


@pytest.mark.parametrize("prune", [0.5, 0.8, 0.95])
@pytest.mark.parametrize(
    "shape", [(512, 300, 3, 3), (64, 64, 3, 3), (131_072,), (131_073,), (9, 7)]
)
def test_a_mask_that_follows_the_initial_scores_costs_what_is_new(shape, prune):
    mask, levels = moved(shape, prune, 0.05)
    blob, alone = there_and_back(mask, levels), there_and_back(mask)
    assert len(blob) <= len(alone)
    if mask.size > 30_000:
        assert masks.describe(blob).endswith("classes of initial scores")
        assert len(blob) < 0.5 * mask_entropy(mask.size, int(mask.sum())) / 8


def test_what_the_seed_says_already_costs_next_to_nothing():
    mask, levels = moved((512, 512, 3, 3), 0.8, 0.0)
    assert len(there_and_back(mask, levels)) <= mask.size / 256 + 4


def test_a_mask_that_forgot_its_initial_scores_costs_no_more_than_without_them():
    mask, levels = drawn((256, 128, 3, 3), 0.2), moved((256, 128, 3, 3), 0.8, 0.0)[1]
    assert masks.encode(mask, levels) == masks.encode(mask)


def test_a_mask_coded_by_initial_scores_needs_them():
    mask, levels = moved((64, 64, 3, 3), 0.8, 0.05)
    with pytest.raises(DamagedTicket, match="which are not known"):
        masks.decode(masks.encode(mask, levels), mask.shape, int(mask.sum()))


@pytest.mark.parametrize("change", [(1, 0), (1, 8), (1, 200)])
def test_classes_of_initial_scores_that_no_encoder_writes_are_refused(change):
    mask, levels = moved((64, 64, 3, 3), 0.8, 0.05)
    blob = bytearray(masks.encode(mask, levels))
    blob[change[0]] = change[1]
    with pytest.raises(DamagedTicket):
        masks.decode(bytes(blob), mask.shape, int(mask.sum()), levels)


@given(st.integers(1, 65535))
def test_probabilities_are_whole_and_sum_up(density):
    weights = masks.byte_weights(density)
    assert weights.sum() == 2**24 - 256
    assert weights.min() >= 0
    expected = [
        (density / 65536) ** ones * (1 - density / 65536) ** (8 - ones) for ones in (0, 4, 8)
    ]
    for byte, probability in zip((0, 15, 255), expected, strict=True):
        assert weights[byte] / 2**24 == pytest.approx(probability, abs=2e-5)


def test_the_coder_takes_these_probabilities_as_they_are():
    """A byte costs -log2((weight + 1) / 2^24) bits: constriction changes nothing about integers that sum to 2^24 - 256."""
    import constriction

    weights = masks.byte_weights(9000)
    for byte in (1, 3, 37, 255):  # zeros before anything else cost nothing at all
        coder = constriction.stream.stack.AnsCoder()
        coder.encode_reverse(np.full(20_000, byte, np.int32), masks._model(9000))
        bits = -math.log2((weights[byte] + 1) / 2**24)
        assert coder.num_valid_bits() / 20_000 == pytest.approx(bits, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (40, 50), (9,)])
def test_a_changed_byte_is_refused_or_changes_nothing_unseen(shape):
    """Alone, a mask can't know that it was changed; it must decode to something with as many survivors, or be refused."""
    mask = drawn(shape, 0.2)
    blob, kept = masks.encode(mask), int(mask.sum())
    rng = np.random.default_rng(3)
    for _ in range(300):
        changed = bytearray(blob)
        changed[rng.integers(len(blob))] ^= 1 << rng.integers(8)
        try:
            found = masks.decode(bytes(changed), shape, kept)
        except DamagedTicket:
            continue
        assert found.shape == shape
        assert found.sum() == kept


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 50])
def test_a_mask_cut_short_is_refused(cut):
    mask = drawn((64, 64), 0.2)
    with pytest.raises(DamagedTicket):
        masks.decode(masks.encode(mask)[:cut], mask.shape, int(mask.sum()))


def test_a_huge_mask_in_a_few_bytes_is_refused_before_anything_is_allocated():
    with pytest.raises(DamagedTicket, match="can't come from"):
        masks.decode(masks.encode(drawn((64, 64), 0.2)), (1 << 20, 1 << 20), 5)


def test_hardly_any_survivors_in_a_huge_layer_still_come_back():
    mask = np.zeros((4096, 8192), bool)
    mask[17, 400] = True
    assert len(there_and_back(mask)) <= mask.size / 1024 + 4


def test_a_layer_that_keeps_everything_costs_next_to_nothing():
    assert len(there_and_back(np.ones((512, 512, 3, 3), bool))) < 2400
