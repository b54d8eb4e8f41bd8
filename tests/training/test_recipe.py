"""Recipes: what they may say, and what they are told when they say something else."""

import pytest

from mptify.config import TicketConfig, baseline_of, make_config, make_recipe
from mptify.errors import BadConfig
from mptify.recipe_files import find_recipe, recipe_names, to_yaml, with_settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lrr": 0.1}, "my.yaml: There is no setting 'lrr'; did you mean 'lr'?"),
        (
            {"ticket": {"prun": 0.8}},
            "my.yaml: There is no setting 'ticket.prun'; did you mean 'ticket.prune'?",
        ),
        ({"data": {"sorce": "digits"}}, "did you mean 'data.source'?"),
        ({"ticket": {"prune": 2}}, "my.yaml: ticket.prune=2: should be less than 1."),
        ({"lr": "fast"}, "my.yaml: lr='fast': should be a valid number"),
        ({"epochs": 0}, "epochs=0: should be greater than or equal to 1"),
        ({"epochs": 2.5}, "epochs=2.5: should be a valid integer"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"optimizer": "lion"}, "optimizer='lion': should be 'sgd', 'adam' or 'adamw'"),
        ({"decays": ["score"]}, "decays.0='score': should be 'scores'"),
        ({"ticket": {"bits": "32/32"}}, "32-bit weights are edge-popup; set method: edgepopup"),
        (
            {"ticket": {"bits": "1/1", "bn": "insert"}},
            "bn='insert' is for 8- and 32-bit activations",
        ),
        ({"nesterov": True, "optimizer": "adam"}, "Nesterov's momentum is for optimizer: sgd"),
        ({"warmup": 11}, "warmup=11.0: the search has only 10 epochs"),
        ({"prune_ramp": 20}, "prune_ramp=20.0: the search has only 10 epochs"),
        ({"accumulate": 100}, "accumulate=100: a batch of 64"),
        ({"baseline": {"lrr": 1}}, "my.yaml: baseline: There is no setting 'lrr'"),
        (
            {"baseline": {"method": "biprop"}},
            "baseline.method: a baseline shares this with its search",
        ),
        (
            {"warmup": 3, "baseline": {"epochs": 2}},
            "my.yaml: baseline: warmup=3.0: the search has only 2 epochs",
        ),
        ({"ticket": 3}, "ticket=3"),
    ],
)
def test_a_wrong_setting_is_told_in_one_sentence_that_names_file_and_key(settings, words):
    with pytest.raises(BadConfig) as caught:
        make_recipe(settings, "my.yaml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_right_and_comes_back_from_its_yaml(name, tmp_path):
    recipe = make_recipe(*find_recipe(name))
    (tmp_path / "again.yaml").write_text(to_yaml(recipe))
    assert make_recipe(*find_recipe(str(tmp_path / "again.yaml"))) == recipe


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("digit", None, "There is no recipe 'digit'; did you mean 'digits'?"),
        ("none.yaml", None, "none.yaml: there is no such file"),
        ("a.yaml", "lr: [1", "this is not YAML (line"),
        ("a.yaml", "- lr\n", "a recipe is a list of `key: value` lines"),
        ("a.yaml", "\x80", "this is not YAML"),
        (
            "a.yaml",
            "lr: 1\nepochs: 3\nlr: 2\n",
            "a.yaml: lr is set twice, the second time in line 3",
        ),
    ],
)
def test_a_file_that_is_no_recipe_is_told_so(name, content, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(BadConfig) as caught:
        find_recipe(name)
    assert words in str(caught.value)


def test_settings_reach_into_sections_and_know_numbers():
    settings = with_settings(
        {"ticket": {"prune": 0.5}},
        ["lr=1e-3", "ticket.prune=0.9", "ticket.bits=1/1", "decays=[scores]", "data.flip=true"],
    )
    recipe = make_recipe(settings)
    assert (
        recipe.lr,
        recipe.ticket.prune,
        recipe.ticket.bits,
        recipe.decays,
        recipe.data.flip,
    ) == (1e-3, 0.9, "1/1", ("scores",), True)


@pytest.mark.parametrize("change", ["lr", "=3", "lr.x=3"])
def test_a_change_that_is_none_is_told_so(change):
    with pytest.raises(BadConfig, match="--set"):
        with_settings({"lr": 0.1}, [change])


@pytest.mark.parametrize(
    ("key", "right"), [("prune", "ticket.prune"), ("flip", "data.flip"), ("lrr", "lr")]
)
def test_a_setting_of_a_section_is_found_there(key, right):
    with pytest.raises(BadConfig, match=f"no setting '{key}'; did you mean '{right}'"):
        make_recipe({key: 1})


def test_sections_keep_their_other_settings():
    assert (
        make_recipe({"ticket": {"bits": "1/1"}}).ticket.prune == make_recipe({}).ticket.prune == 0.8
    )
    assert make_recipe({"data": "arrays:a.npz"}).data.source == "arrays:a.npz"
    assert make_recipe(with_settings({"data": "digits"}, ["data.crop=1"])).data.crop == 1
    assert make_recipe({"baseline": True}).baseline == {}
    assert make_recipe({"baseline": False}).baseline is None


def test_edge_popup_keeps_the_weights_bits():
    recipe = make_recipe({"method": "edgepopup", "ticket": {"bits": "1/1"}})
    assert recipe.ticket.bits == "32/1"


@pytest.mark.parametrize(
    ("settings", "lr"),
    [
        ({}, 0.01),
        ({"ticket": {"bits": "1/1"}}, 0.03),
        ({"ticket": TicketConfig(bits="1/1")}, 0.03),
        ({"ticket": {"bits": "1/1"}, "optimizer": "sgd"}, 0.1),
        ({"optimizer": "sgd"}, 0.1),
        ({"method": "dense"}, 0.001),
        ({"method": "dense", "optimizer": "sgd"}, 0.05),
        ({"lr": 3}, 3),
    ],
)
def test_a_learning_rate_suits_what_it_moves(settings, lr):
    assert make_recipe(settings).lr == lr


def test_a_baseline_has_a_learning_rate_of_its_own():
    assert baseline_of(make_recipe({"lr": 0.07, "baseline": {}})).lr == 0.001


def test_a_baseline_differs_by_what_it_says():
    recipe = make_recipe({"lr": 0.1, "epochs": 3, "baseline": {"lr": 0.02}})
    dense = baseline_of(recipe)
    assert (dense.method, dense.lr, dense.epochs, dense.baseline) == ("dense", 0.02, 3, None)


def test_a_layers_name_may_have_dots():
    changed = with_settings({}, ["ticket.prune_overrides.layer1.0.conv1=0.5", "ticket.prune=0.7"])
    assert changed == {"ticket": {"prune_overrides": {"layer1.0.conv1": 0.5}, "prune": 0.7}}


@pytest.mark.parametrize(
    "text",
    ["precision: no", "precision: No", "precision: off", "precision: 'no'", "precision: false"],
)
def test_no_precision_is_the_word_though_yaml_reads_false(text, tmp_path):
    (tmp_path / "a.yaml").write_text(f"model: mptify:conv2\ndata: digits\n{text}\n")
    assert make_recipe(*find_recipe(str(tmp_path / "a.yaml"))).precision == "no"
    settings = with_settings({"precision": "bf16"}, [text.replace(": ", "=")])
    assert make_recipe(settings).precision == "no"


def test_yes_is_no_precision():
    with pytest.raises(BadConfig, match="precision=True: should be 'no', 'bf16' or 'fp16'"):
        make_recipe({"precision": True})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("learning_rate", "lr"), ("learning-rate", "lr"), ("batch_size", "batch"), ("batch-size", "batch"), ("num_epochs", "epochs"),
        ("max_epochs", "epochs"), ("weight-decay", "weight_decay"), ("wd", "weight_decay"), ("prune_rate", "ticket.prune"),
        ("sparsity", "ticket.prune"), ("prune", "ticket.prune"), ("optim", "optimizer"), ("scheduler", "schedule"),
        ("num_workers", "data.workers"), ("image_size", "data.size"), ("mixed_precision", "precision"), ("dataset", "data"),
        ("ticket.sparsity", "ticket.prune"), ("data.num_workers", "data.workers"), ("random_seed", "seed"), ("LR", "lr"),
    ],
)  # fmt: skip
def test_what_other_programs_call_a_setting_is_understood(given, meant):
    with pytest.raises(BadConfig) as caught:
        make_recipe(with_settings({}, [f"{given}=1"]))
    assert str(caught.value) == f"There is no setting {given!r}; did you mean {meant!r}?"


def test_the_settings_of_a_ticket_are_found_by_other_names_too():
    with pytest.raises(BadConfig, match="There is no setting 'prune_rate'; did you mean 'prune'"):
        make_config({"prune_rate": 0.5})


def test_the_names_of_settings_are_words():
    with pytest.raises(BadConfig, match="The names of settings are strings, and 3 is not"):
        make_recipe({3: 4})
