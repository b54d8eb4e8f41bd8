"""The paper's theorem as a program: widths as printed, masks as proved, and a check that can fail."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from mptify.cli.theory import theory as command
from mptify.errors import BadConfig, CannotConvert
from mptify.tools import theory
from mptify.tools.theory import checking, construction

PROPERTY = settings(max_examples=25, deadline=None, database=None)
errors = st.floats(0.05, 0.9)
chances = st.floats(0.001, 0.9)
sizes = st.integers(1, 6)
seeds = st.integers(0, 10**6)


def cube(inputs):
    """Every point with coordinates -1, 0 and 1."""
    return np.array(list(itertools.product([-1.0, 0.0, 1.0], repeat=inputs)))


def just_below_multiples(gain, sparsity, outputs=1):
    """Weights that lose almost a whole gain each, all positive: the worst that rounding down can do."""
    multiple = math.floor(1 / math.sqrt(sparsity) / gain * (1 + 1e-12))
    return np.full((outputs, sparsity), multiple * gain * (1 - 1e-6))


# The bounds


@PROPERTY
@given(errors, chances, sizes, sizes, sizes)
def test_the_widths_and_counts_are_those_that_the_paper_prints(epsilon, delta, s, n, depth):
    def close(bound, width, nonzeros):
        assert bound.width == pytest.approx(
            width, abs=n * s
        )  # a ceiling may fall on either side of a whole number
        assert bound.nonzeros == pytest.approx(nonzeros)

    close(
        theory.lemma1(epsilon, delta, s),
        math.ceil(16 / (epsilon * s**0.5) + 16 * math.log(2 / delta)),
        2 / (epsilon * s**0.5),
    )
    close(
        theory.lemma2(epsilon, delta, s),
        s * math.ceil(16 * s**0.5 / epsilon + 16 * math.log(2 * s / delta)),
        2 * s**1.5 / epsilon,
    )
    each = math.ceil(16 * (n * s) ** 0.5 / epsilon + 16 * math.log(2 * n * s / delta))
    close(theory.lemma3(epsilon, delta, s, n), n * s * each, 2 * (n * s) ** 1.5 / epsilon)
    each = math.ceil(
        32 * depth * (n * s) ** 0.5 / epsilon + 16 * math.log(2 * n * s * depth / delta)
    )
    close(
        theory.theorem(epsilon, delta, s, n, depth),
        n * s * each,
        4 * (n * s) ** 1.5 * depth**2 / epsilon,
    )


def test_the_gain_is_the_share_of_epsilon_that_arrives_at_lemma_1():
    gains = [
        theory.lemma1(0.1, 0.1, 4),
        theory.lemma2(0.1, 0.1, 4),
        theory.lemma3(0.1, 0.1, 4, 9),
        theory.theorem(0.1, 0.1, 4, 9, 5),
    ]
    assert [bound.gain for bound in gains] == pytest.approx(
        [0.1, 0.1 / 4, 0.1 / (4 * 3), 0.1 / (4 * 3 * 10)]
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.lemma1(0, 0.1, 4), "epsilon=0: the allowed error should be above 0."),
        (lambda: theory.lemma2(math.nan, 0.1, 4), "epsilon=nan"),
        (
            lambda: theory.lemma3(0.1, 1, 4, 4),
            "delta=1: the allowed probability of failure should be above 0 and below 1.",
        ),
        (lambda: theory.lemma3(0.1, 0.1, 4, 0), "outputs=0: at least 1 is needed."),
        (
            lambda: theory.theorem(1, 0.1, 4, 4, 2),
            "epsilon=1: the theorem needs an error above 0 and below 1.",
        ),
        (lambda: theory.theorem(0.1, 0.1, 4, 4, 0), "depth=0: at least 1 is needed."),
    ],
)
def test_bounds_of_nothing_are_refused(call, message):
    with pytest.raises(BadConfig, match=message):
        call()


# The lemmas, on the whole cube


@PROPERTY
@given(errors, chances, sizes, st.floats(-1, 1), seeds)
def test_lemma_1_one_weight_is_met_within_epsilon(epsilon, delta, s, share, seed):
    weight = np.zeros((1, 3))
    weight[0, seed % 3] = share / math.sqrt(s)
    bound = theory.lemma1(epsilon, delta, s)
    masks = theory.find_masks(weight, bound.gain, 1, bound.width, theory.RandomNetwork(seed), "one")
    if masks is not None:  # the exact chance is tested below
        assert np.abs(masks(cube(3)) - cube(3) @ weight.T).max() <= epsilon * (1 + 1e-9)
        assert masks.nonzeros <= bound.nonzeros * (1 + 1e-9)


@PROPERTY
@given(errors, sizes, sizes, seeds)
def test_lemmas_2_and_3_hold_at_every_corner_and_their_error_is_known(epsilon, s, n, seed):
    rng = np.random.default_rng(seed)
    weight = rng.uniform(-1, 1, (n, 6)) / math.sqrt(s)
    weight[np.argsort(rng.random((n, 6))) >= s] = 0
    bound = theory.lemma3(epsilon, 1e-6, s, n)
    masks = theory.find_masks(
        weight, bound.gain, s, bound.width, theory.RandomNetwork(seed), "layer"
    )
    lost = np.abs(masks(cube(6)) - cube(6) @ weight.T)
    kept = bound.gain * np.floor(np.abs(weight) / bound.gain) * np.sign(weight)
    assert lost.max(axis=0) == pytest.approx(
        np.abs(weight - kept).sum(axis=1)
    )  # the worst corner, in closed form
    assert lost.max() <= epsilon / math.sqrt(n) * (1 + 1e-9)
    assert np.linalg.norm(lost, axis=1).max() <= epsilon * (1 + 1e-9)
    assert (
        masks.nonzeros
        == 2 * np.floor(np.abs(weight) / bound.gain).sum()
        <= bound.nonzeros * (1 + 1e-9)
    )


@pytest.mark.parametrize(("s", "n"), [(4, 1), (9, 1), (4, 4), (6, 3)])
def test_no_larger_gain_would_do(s, n):
    epsilon = 0.2
    bound = theory.lemma3(epsilon, 0.01, s, n)
    for gain, least, most in ((bound.gain, 0.99, 1), (1.25 * bound.gain, 1.2, 1.3)):
        weight = just_below_multiples(gain, s, n)
        masks = theory.find_masks(weight, gain, s, bound.width, theory.RandomNetwork(0), "layer")
        corner = np.ones((1, s))
        assert (
            least * epsilon
            < np.linalg.norm(masks(corner) - corner @ weight.T)
            <= most * epsilon * (1 + 1e-9)
        )


def test_with_the_gain_that_the_paper_prints_the_masks_miss():
    epsilon, s = 0.1, 16
    target = theory.as_target([np.full((1, s), 0.0999)])
    bound = theory.theorem(epsilon, 0.01, s, 1, 1)
    printed = theory.find_masks(
        target.weights[0], epsilon, s, bound.width, theory.RandomNetwork(0), "layer"
    )
    worst = np.full((1, s), 1 / math.sqrt(s))
    assert printed.nonzeros == 0
    assert abs(printed(worst) - target(worst)).item() == pytest.approx(3.996 * epsilon)
    assert (
        theory.check(target, epsilon, 0.01, seeds=2, points=50, fractions=()).worst_error <= epsilon
    )


@PROPERTY
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), min_size=6, max_size=6))
def test_lemma_2_as_printed_is_false_for_six_weights(neurons):
    """One entry per row and gain ε: coordinate i gives ε(a σ(x) + b σ(-x)), a and b whole. The target is ε/2 in each coordinate."""
    up, down = np.array(neurons).T
    points = cube(6)
    given_out = np.maximum(points, 0) @ up + np.maximum(-points, 0) @ down
    assert np.abs(given_out - points.sum(axis=1) / 2).max() >= 6 / 4  # in units of ε


# The random network


@PROPERTY
@given(errors, sizes, st.integers(1, 4), st.integers(1, 5), st.integers(0, 40), seeds)
def test_masks_on_the_whole_random_network_compute_the_same(epsilon, s, n, d, more, seed):
    rng = np.random.default_rng(seed)
    weight = rng.uniform(-1, 1, (n, d)) / math.sqrt(s)
    weight[:, s:] = 0
    bound = theory.lemma3(epsilon, 1e-6, min(s, d), n)
    width, network = bound.width + more, theory.RandomNetwork(seed)
    masks = theory.find_masks(weight, bound.gain, s, width, network, "layer")
    mask, outer_mask = masks.dense(width)
    inner, outer = theory.RandomNetwork(seed).whole("layer", (n, d), s, width)
    assert inner.shape == (width, d)
    assert outer.shape == (width, n)
    assert mask.sum() == outer_mask.sum() == masks.nonzeros
    assert mask.sum(axis=1).max() <= 1
    assert (mask.any(axis=1) == outer_mask.any(axis=1)).all()
    points = rng.uniform(-1, 1, (50, d))
    dense = np.maximum(bound.gain * points @ (mask * inner).T, 0) @ (outer_mask * outer)
    np.testing.assert_allclose(masks(points), dense, atol=1e-12)


def test_the_random_network_is_fair_and_a_function_of_its_seed():
    inner, outer = theory.RandomNetwork(3).whole("layer", (3, 5), 4, 20_000)
    signs = np.concatenate([inner, outer], axis=1).astype(float)
    assert set(np.unique(signs)) == {-1.0, 1.0}
    covariance = signs.T @ signs / len(signs) - np.eye(8)
    assert np.abs(signs.mean(axis=0)).max() < 0.03
    assert np.abs(covariance).max() < 0.03
    again = theory.RandomNetwork(3).whole("layer", (3, 5), 4, 20_000)
    assert (again[0] == inner).all()
    assert (again[1] == outer).all()
    other = theory.RandomNetwork(4).whole("layer", (3, 5), 4, 20_000)
    assert (other[0] != inner).any()


# How often it fails


@PROPERTY
@given(st.integers(1, 60), st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_the_chance_of_failure_is_exact(trials, counts):
    chance = 1.0
    for count in counts:
        chance *= (
            1
            - sum(
                math.comb(trials, hits) * 3 ** (trials - hits)
                for hits in range(min(count, trials + 1))
            )
            / 4**trials
        )
    assert math.exp(checking._log_success(trials, np.array(counts))) == pytest.approx(
        chance, rel=1e-9, abs=1e-12
    )


@settings(max_examples=200, deadline=None, database=None)
@given(st.floats(1, 300), st.floats(1e-6, 0.999), st.integers(0, 1))
def test_at_the_width_of_lemma_1_it_fails_at_most_with_delta_odd_widths_too(largest, delta, more):
    """`largest` is 1/(ε√s), the most that c can be."""
    width = theory.lemma1(1 / largest, delta, 1).width + more
    count = np.array([math.floor(largest)])
    success = checking._log_success(width // 2, count) + checking._log_success(
        width - width // 2, count
    )
    assert -math.expm1(success) <= delta


def test_draws_fail_as_often_as_they_should():
    target, epsilon, delta, draws = theory.random_target(2, 4), 0.5, 0.1, 300
    neurons = theory.theorem(epsilon, delta, 4, 4, 2).width
    networks = [theory.RandomNetwork(seed) for seed in range(draws)]
    for width in (neurons // 2, neurons * 7 // 16):
        expected = theory.failure_probability(target, epsilon, delta, width)
        failed = sum(
            theory.construct(target, epsilon, delta, network, width) is None for network in networks
        )
        assert 0.2 < expected < 0.9
        assert abs(failed / draws - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


def test_the_least_width_is_where_the_chance_falls_to_delta():
    target = theory.random_target(2, 4)
    least = theory.least_width(target, 0.5, 0.1)
    assert (
        theory.failure_probability(target, 0.5, 0.1, least)
        <= 0.1
        < theory.failure_probability(target, 0.5, 0.1, least - 1)
    )


def test_one_missing_neuron_is_a_failure():
    weight, network = np.array([[0.5]]), theory.RandomNetwork(0)
    inner, outer = network.whole("layer", (1, 1), 1, 200)
    rising = np.flatnonzero((inner == 1) & (outer == 1))
    rising = int((rising < 100).sum())
    sinking = int(((inner == -1) & (outer == -1))[100:].sum())
    enough = min(rising, sinking)
    assert theory.find_masks(weight, 0.5 / enough, 1, 200, network, "layer").nonzeros == 2 * enough
    assert theory.find_masks(weight, 0.5 / (enough + 1), 1, 200, network, "layer") is None


# The theorem


@pytest.mark.parametrize("make", [theory.random_target, theory.extreme_target])
@pytest.mark.parametrize(
    ("depth", "width", "sparsity", "inputs"),
    [(1, 4, 4, 4), (2, 4, 2, 8), (3, 4, 4, 4), (2, 2, 8, 8)],
)
def test_every_promise_is_kept(make, depth, width, sparsity, inputs):
    target = make(depth, width, sparsity, inputs)
    found = theory.check(target, 0.5, 0.1, seeds=10, points=200)
    assert found.holds
    assert found.failed == 0
    assert found.worst_error <= found.certified_error * (1 + 1e-9) + 1e-12
    assert found.certified_error <= math.expm1(
        0.5 / 2
    )  # what the proof's induction gives when it is not rounded up to ε
    assert found.fractions[0].failed <= found.fractions[-1].failed > 0
    bounds = theory.layer_bounds(target, 0.5, 0.1)
    assert (
        found.nonzeros
        <= sum(bound.nonzeros for bound in bounds)
        <= found.nonzeros_allowed * (1 + 1e-9)
    )
    assert (
        found.neurons
        == max(bound.width for bound in bounds)
        <= theory.theorem(0.5, 0.1, sparsity, target.width, depth).width
    )


@pytest.mark.parametrize("depth", [2, 3])
def test_the_width_drawn_is_the_theorems(depth):
    found = theory.check(
        theory.random_target(depth, 4, 3), 0.5, 0.1, seeds=1, points=1, fractions=()
    )
    assert found.neurons == theory.theorem(0.5, 0.1, 3, 4, depth).width
    assert found.gains == pytest.approx(
        [0.5 / (2 * depth * 3 * 2)] * (depth - 1) + [0.5 / (2 * depth * 3)]
    )


def test_weights_at_the_bound_take_all_the_neurons_that_are_allowed():
    found = theory.check(theory.extreme_target(1, 4), 0.1, 0.1, seeds=1, points=1)
    assert found.nonzeros == found.nonzeros_allowed == 320


def test_the_worst_error_of_a_single_layer_is_found():
    target = theory.random_target(1, 12)
    found = theory.check(target, 0.3, 0.1, seeds=1, points=20, fractions=())
    assert found.worst_error == pytest.approx(found.certified_error, rel=1e-6)


def test_climbing_finds_more_than_many_random_points():
    target = theory.random_target(3, 6)
    found = theory.construct(target, 0.5, 0.1, theory.RandomNetwork(0))
    many = theory.ball_points(6, 20_000, seed=1)
    most = np.linalg.norm(found(many) - target(many), axis=1).max()
    assert (
        most
        <= checking._worst_error(target, found, theory.ball_points(6, 500))
        <= theory.certified_error(target, found)
    )


@pytest.mark.parametrize("inputs", [1, 3, 14])
def test_points_lie_in_the_ball_and_hold_its_corners(inputs):
    points = theory.ball_points(inputs, 50)
    assert np.linalg.norm(points, axis=1).max() <= 1 + 1e-12
    assert len(points) == 2 * inputs + min(2**inputs, 4096) + 100
    assert {tuple(row) for row in np.eye(inputs)} <= {tuple(row) for row in points}
    inside = points[-50:]
    assert 0 < np.linalg.norm(inside, axis=1).min() < np.linalg.norm(inside, axis=1).max() < 1


def test_the_check_can_fail(monkeypatch):
    target = theory.as_target([np.full((1, 16), 0.0999)])
    right = construction.layer_bounds

    def printed(target, epsilon, delta):
        return [replace(bound, gain=epsilon) for bound in right(target, epsilon, delta)]

    monkeypatch.setattr(construction, "layer_bounds", printed)
    found = theory.check(target, 0.1, 0.01, seeds=3, points=10, fractions=())
    assert found.worst_error == pytest.approx(0.3996)
    assert found.failed == 3
    assert not found.holds
    monkeypatch.undo()
    found = theory.check(target, 0.1, 0.01, seeds=3, points=10, fractions=())
    assert found.holds
    assert not replace(found, nonzeros=int(found.nonzeros_allowed) + 1).holds
    assert not replace(found, failed=1).holds


def test_too_large_a_network_is_refused_before_it_is_drawn():
    with pytest.raises(
        BadConfig, match=r"epsilon=1e-07: the random network would have .* take a larger ε"
    ):
        theory.check(theory.random_target(2, 4), 1e-7, 0.1)


# Targets


@PROPERTY
@given(st.integers(1, 4), sizes, sizes, st.data())
def test_random_targets_meet_the_hypotheses_as_printed(depth, width, inputs, data):
    sparsity = data.draw(st.integers(1, inputs if depth == 1 else max(inputs, width)))
    target = theory.random_target(depth, width, sparsity, inputs, seed=data.draw(seeds))
    for number, weight in enumerate(target.weights):
        assert np.linalg.norm(weight, 2) <= 1 + 1e-12
        assert (np.count_nonzero(weight, axis=1) == min(sparsity, weight.shape[1])).all()
        assert np.abs(weight).max() <= 1 / math.sqrt(width if number else sparsity)
    assert target(np.zeros((2, inputs))).shape == (2, 1)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_extreme_targets_meet_them_with_equality(depth):
    for weight in theory.extreme_target(depth, 8, seed=5).weights:
        assert np.abs(weight) == pytest.approx(1 / math.sqrt(8))
        assert weight @ weight.T == pytest.approx(np.eye(len(weight)), abs=1e-12)


def test_a_sequential_and_its_matrices_are_one_target():
    model = nn.Sequential(
        nn.Linear(6, 4, bias=False),
        nn.ReLU(),
        nn.Linear(4, 4, bias=False),
        nn.ReLU(),
        nn.Linear(4, 3, bias=False),
    )
    for layer in (model[0], model[2], model[4]):
        nn.init.uniform_(layer.weight, -0.2, 0.2)
    target = theory.as_target(model)
    assert target.sparsity == 6
    points = theory.ball_points(6, 100)
    np.testing.assert_allclose(
        target(points), model(torch.tensor(points, dtype=torch.float32)).detach().numpy(), atol=1e-6
    )
    listed = theory.as_target(
        [model[0].weight, model[2].weight.detach().numpy(), model[4].weight.tolist()]
    )
    assert all((one == other).all() for one, other in zip(target.weights, listed.weights))
    assert theory.check(
        model, 0.5, 0.1, seeds=2, points=100
    ).holds  # three outputs: the error is that of the vector


def test_scaling_brings_a_network_into_the_hypotheses_and_keeps_what_it_computes():
    weights = [np.random.default_rng(0).normal(size=shape) for shape in ((5, 3), (4, 5), (1, 4))]
    with pytest.raises(CannotConvert):
        theory.as_target(weights)
    target, factor = theory.scaled(weights)
    points = theory.ball_points(3, 50)
    np.testing.assert_allclose(factor * target(points), theory.Target(tuple(weights), 5)(points))
    small, one = theory.scaled(target.weights)
    assert one == pytest.approx(1)
    assert all(np.allclose(a, b) for a, b in zip(small.weights, target.weights))


def linear(*sizes_, **options):
    layers = [nn.Linear(a, b, **{"bias": False} | options) for a, b in itertools.pairwise(sizes_)]
    return nn.Sequential(*[one for layer in layers for one in (layer, nn.ReLU())][:-1])


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ([], "The network has no layer"),
        (
            [np.ones(3)],
            r"layer 1: a matrix of outputs × inputs is needed, but this one has the shape \(3,\); pass a single layer as",
        ),
        ([["a"]], "layer 1: a matrix of numbers is needed"),
        ([np.full((1, 2), np.nan)], "layer 1: its weights should be finite, but 2 are not."),
        (
            [np.eye(2), np.eye(3)],
            "layer 2: it takes 3 inputs, but the layer before it has 2 outputs; transpose",
        ),
        (
            [np.eye(2) / 2, np.full((1, 2), 0.8)],
            r"layer 2: its largest weight is 0.8, but at most 1/√2 = 0.707107 is allowed; divide the layer by 1.1",
        ),
        (
            [np.full((3, 4), 0.5)],
            r"layer 1: its spectral norm is 1.73205, but at most 1 is allowed; divide the layer by 1.73205",
        ),
        (
            linear(3, 2, bias=True),
            "layer '0': the theorem's networks have no biases; build it with bias=False.",
        ),
        (
            nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh()),
            "layer '1': should be ReLU, not Tanh",
        ),
        (nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU()), "The network ends with ReLU"),
        (nn.Linear(2, 2), "Linear: an nn.Sequential of Linear"),
    ],
)
def test_a_network_outside_the_hypotheses_is_told_where_and_what_to_do(network, message):
    with pytest.raises(CannotConvert, match=message) as caught:
        theory.as_target(network)
    assert "\n" not in str(caught.value)


def test_a_sparsity_that_is_too_small_names_the_row():
    weight = np.array([[0.1, 0, 0], [0.1, 0.1, 0]])
    with pytest.raises(
        CannotConvert, match="layer 1: row 1 has 2 weights, but sparsity=1 allows 1; raise it to 2"
    ):
        theory.as_target([weight], sparsity=1)
    assert theory.as_target(theory.as_target([weight]), sparsity=3).sparsity == 3


# The command


def run(*arguments):
    app = typer.Typer()
    app.command("theory")(command)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})


def test_the_table_covers_depths_widths_errors_and_chances():
    result = run("--seeds", "1", "--points", "100")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if "→" in line]
    assert len(rows) == 2 * 18
    assert {row[0].count("→") for row in rows} == {1, 2, 3}
    assert len({row[0] for row in rows}) == 9
    assert {(row[2], row[3]) for row in rows} == {("0.5", "0.1"), ("0.1", "0.01")}
    assert max(map(len, result.output.splitlines())) <= 90
    assert "all kept" in result.output


def test_one_network_shows_the_bounds_and_speaks_json():
    arguments = [
        "--depth",
        "2",
        "--width",
        "4",
        "--epsilon",
        "0.5",
        "--delta",
        "0.1",
        "--seeds",
        "3",
        "--target",
        "extreme",
    ]
    result = run(*arguments)
    assert "theorem       9,856" in result.output
    report = json.loads(run(*arguments, "--json").stdout)
    assert report["bounds"]["theorem"]["width"] == 9856
    (found,) = report["findings"]
    assert found["shape"] == [4, 4, 1]
    assert found["holds"]
    assert [one["fraction"] for one in found["fractions"]] == list(theory.FRACTIONS)


@pytest.mark.parametrize("network", [[], ["--width", "100", "--epsilon", "0.001"]])
def test_no_seeds_print_the_bounds_alone(network):
    result = run(*network, "--seeds", "0")
    assert result.exit_code == 0
    assert "lemma 3" in result.output
    assert "→" not in result.output


def test_a_broken_promise_is_an_exit_code(monkeypatch):
    monkeypatch.setattr(checking, "construct", lambda *_: None)
    result = run("--width", "2", "--seeds", "2")
    assert result.exit_code == 1
    assert "not kept: 2→2→1" in result.output
    assert "–" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--depth", "0"], "depth=0: at least 1 is needed."),
        (["--epsilon", "1.5"], "epsilon=1.5: the theorem needs an error above 0 and below 1."),
        (["--delta", "0"], "delta=0: the allowed probability of failure"),
        (
            ["--width", "4", "--sparsity", "5"],
            "sparsity=5: no row of this network has more than 4 weights.",
        ),
        (
            ["--width", "6", "--target", "extreme"],
            "6 weights in a row: the extreme target consists of Hadamard matrices",
        ),
        (["--target", "hard"], "target='hard': should be random or extreme."),
        (["--seeds", "-1"], "seeds=-1, points=2000: at least 1 of each is needed."),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, message):
    result = run(*arguments)
    assert isinstance(result.exception, BadConfig)
    assert str(result.exception).startswith(message)
    assert "\n" not in str(result.exception)
