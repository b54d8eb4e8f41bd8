"""The search itself: what it finds, what it changes, and that it ends the same however often it was interrupted."""

import json
import multiprocessing
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import mptify
from mptify.config import make_search_config
from mptify.errors import BadData, MptifyError, RunExists
from mptify.models import conv2
from mptify.nn import init
from mptify.surgery import ticket_layers
from mptify.surgery.trainable import parameter_kinds
from mptify.training import loop
from mptify.training.checkpoint import optimizer_state, restore_optimizer_
from mptify.training.data import Images, as_pair
from mptify.training.diagnostics import Masks, constant_layers
from mptify.training.evaluation import evaluate
from mptify.training.optim import make_optimizer
from mptify.training.run_folder import Run
from mptify.training.schedule import learning_rate, prune_share
from mptify.training.sources import load_data

FAST = {
    "epochs": 2,
    "batch": 32,
    "optimizer": "sgd",
    "lr": 0.1,
    "ticket": {"bits": "1/32", "prune": 0.6},
}


class Net(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Dropout(drop),
            nn.MaxPool2d(2),
        )
        self.middle = nn.Sequential(nn.Conv2d(12, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.middle(self.features(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def digits():
    """Some of them, to be quick."""
    from mptify.config import DataConfig

    return load_data(DataConfig(train_images=300, val_images=101, crop=1, flip=True))


def settings(**changes):
    ticket = FAST["ticket"] | changes.pop("ticket", {})
    return FAST | changes | {"ticket": ticket}


def search(digits, net=None, **options):
    out, resume, callbacks = (
        options.pop("out", None),
        options.pop("resume", False),
        options.pop("callbacks", ()),
    )
    return mptify.search(
        net or Net(), *digits, settings(**options), out=out, resume=resume, callbacks=callbacks
    )


# -- what it finds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ticket": {"score_grad": "alpha"}},
        {
            "ticket": {"bits": "1/1", "prune": 0.5, "learn_bn": True},
            "optimizer": "adam",
            "lr": 0.01,
        },
        {"ticket": {"scope": "global", "floor": 0.05}},
        {"method": "edgepopup", "nesterov": True},
        {"method": "dense", "lr": 0.05},
        {"method": "dense", "lr": 0.05, "ticket": {"bn": "insert"}},
        {
            "optimizer": "adamw",
            "lr": 0.01,
            "weight_decay": 0.1,
            "warmup": 1,
            "label_smoothing": 0.1,
            "clip": 1.0,
            "prune_ramp": 2,
            "ema": 0.9,
        },
    ],
    ids=[
        "biprop",
        "alpha",
        "1/1",
        "global",
        "edgepopup",
        "dense",
        "dense with norms",
        "everything",
    ],
)
def test_every_method_learns(digits, options):
    plain = [replace(split, crop=0, flip=False) for split in digits]
    result = search(plain, epochs=10, **options)
    assert result.rows[-1]["loss"] < result.rows[0]["loss"]
    assert result.accuracy > 0.25  # chance gives 0.1
    assert result.finished


def test_the_network_passed_in_stays_as_it_is(digits):
    net = Net().eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state = torch.get_rng_state()
    result = search(digits, net)
    assert not net.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert result.model is not net


@pytest.mark.parametrize(
    ("ticket", "kinds"),
    [
        ({}, {"scores"}),
        ({"learn_bn": True}, {"scores", "norm"}),
        ({"bias": "learn"}, {"scores", "bias"}),
        ({"dense": "last"}, {"scores", "dense"}),
    ],
)
def test_only_what_the_spec_names_changes(digits, ticket, kinds):
    ticketed = mptify.transform(Net(), **settings(ticket=ticket)["ticket"])
    before = {name: parameter.detach().clone() for name, parameter in ticketed.named_parameters()}
    result = search(
        digits,
        ticketed,
        ticket=ticket,
        weight_decay=0.01,
        decays=["scores", "norm", "bias", "other", "dense"],
    )
    of = parameter_kinds(result.model)
    changed = {
        name
        for name, parameter in result.model.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    assert {of[name] for name in changed} == kinds
    assert changed == {name for name, kind in of.items() if kind in kinds}
    for name, layer in ticket_layers(result.model).items():
        expected = init.signs(0, name, layer.count).reshape(layer.frozen.shape)
        assert np.array_equal(np.signbit(layer.frozen.detach().numpy()), expected)


def test_decay_is_for_the_kinds_that_the_recipe_names(digits):
    from mptify.training.optim import make_optimizer

    ticketed = mptify.transform(Net(), bits="1/32", prune=0.5, learn_bn=True, bias="learn")
    config = make_search_config({"weight_decay": 0.3, "decays": ["norm"]})
    groups = make_optimizer(ticketed, config).param_groups
    kinds = parameter_kinds(ticketed)
    names = {id(parameter): name for name, parameter in ticketed.named_parameters()}
    found = {
        kinds[names[id(parameter)]]: group["weight_decay"]
        for group in groups
        for parameter in group["params"]
    }
    assert found == {"norm": 0.3, "scores": 0.0, "bias": 0.0}


@pytest.mark.parametrize("relative", [True, False])
def test_steps_of_adam_are_counted_in_first_scores(digits, relative):
    """One step, which Adam makes as long as the learning rate: alike in all layers, or alike to their first scores."""
    ticketed = mptify.transform(Net(), bits="1/32", prune=0.5)
    before = {
        name: layer.scores.detach().clone() for name, layer in ticket_layers(ticketed).items()
    }
    one_step = {
        "epochs": 1,
        "batch": 300,
        "optimizer": "adam",
        "lr": 0.01,
        "schedule": "constant",
        "weight_decay": 0,
        "relative": relative,
    }
    result = mptify.search(ticketed, *digits, one_step)
    for name, layer in ticket_layers(result.model).items():
        step = (layer.scores - before[name]).abs().median().item()
        assert step == pytest.approx(
            0.01 * (before[name].abs().max().item() if relative else 1.0), rel=0.06
        )


def test_the_schedules_begin_and_end_where_they_should():
    config = make_search_config({"epochs": 10, "lr": 0.2, "warmup": 2, "prune_ramp": 4})
    assert [learning_rate(config, time) for time in (1, 2, 6, 10)] == pytest.approx(
        [0.1, 0.2, 0.1, 0.0]
    )
    assert [prune_share(config, time) for time in (0, 2, 4, 9)] == pytest.approx([0, 0.875, 1, 1])
    assert learning_rate(make_search_config({"schedule": "constant", "lr": 0.2}), 7) == 0.2


def test_a_ramp_ends_at_the_asked_fraction(digits):
    result = search(digits, epochs=3, prune_ramp=2)
    assert [row["pruned"] for row in result.rows][1:] == pytest.approx([0.6, 0.6], abs=1e-2)
    assert result.rows[0]["pruned"] < 0.55
    for layer in ticket_layers(result.model).values():
        assert layer.kept == layer.count - round(layer.count * 0.6)


def test_the_best_ticket_is_one_that_is_pruned_as_asked(digits, tmp_path, monkeypatch):
    accuracies = iter([0.9, 0.8, 0.3, 0.2])  # a ticket that loses with every weight it is pruned of
    monkeypatch.setattr(
        loop,
        "evaluate",
        lambda *args, **options: replace(evaluate(*args, **options), top1=next(accuracies)),
    )
    result = search(
        digits, epochs=4, prune_ramp=3, warmup=0, ticket={"prune": 0.97}, out=tmp_path / "run"
    )
    assert result.best == 0.3
    ticket = mptify.read(tmp_path / "run/best.ticket")
    assert 1 - ticket.kept / ticket.count == pytest.approx(0.97, abs=0.005)


def test_a_ramp_reaches_tied_layers_too(digits):
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.again = nn.Conv2d(16, 16, 3, padding=1)
            self.more = nn.Conv2d(16, 16, 3, padding=1)
            self.more.weight = self.again.weight

        def forward(self, x):
            x = self.middle(self.features(x))
            return self.head(self.more(self.again(x)).mean((2, 3)))

    layers = ticket_layers(search(digits, Tied(), prune_ramp=2).model)
    assert (
        layers["again"].kept
        == layers["more"].kept
        == layers["again"].count - round(layers["again"].count * 0.6)
    )


def test_a_ticket_is_cut_from_the_mean_of_scores(digits):
    """By a mean of its own: the scores after each step, averaged as the recipe says."""
    seen = []

    class Look(mptify.Callback):
        def on_step_end(self, search, metrics):
            layers = ticket_layers(search.model).items()
            seen.append({name: layer.scores.detach().clone() for name, layer in layers})

    ticketed = mptify.transform(Net(), **settings()["ticket"])
    first = {name: layer.scores.detach().clone() for name, layer in ticket_layers(ticketed).items()}
    result = search(digits, ticketed, ema=0.8, callbacks=[Look()])
    for name, layer in ticket_layers(result.model).items():
        mean = first[name]
        for done, scores in enumerate(seen):
            decay = min(0.8, (1 + done) / (10 + done))
            mean = decay * mean + (1 - decay) * scores[name]
        assert torch.allclose(layer.scores, mean, atol=1e-6)


def test_gradients_are_clipped_to_the_norm(digits, monkeypatch):
    norms = []
    step = torch.optim.SGD.step

    def look(self, *args, **kwargs):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norms.append(torch.stack([p.grad.norm() for p in parameters]).norm().item())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.SGD, "step", look)
    search(digits, clip=1e-3, epochs=1)
    assert max(norms) == pytest.approx(1e-3, rel=1e-3)


def test_the_launchers_accumulation_changes_nothing(digits, monkeypatch):
    plain = search(digits, epochs=1)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    for one, other in zip(
        ticket_layers(plain.model).values(),
        ticket_layers(search(digits, epochs=1).model).values(),
        strict=True,
    ):
        assert torch.equal(one.scores, other.scores)


def test_validation_images_are_normalized_as_training_images_are(digits):
    rng = np.random.default_rng(0)
    dark, bright = (
        rng.integers(0, 100, (64, 8, 8, 1), dtype=np.uint8),
        rng.integers(150, 255, (32, 8, 8, 1), dtype=np.uint8),
    )
    train, val = as_pair((dark, np.arange(64) % 10), (bright, np.arange(32) % 10))
    assert val.mean == train.mean
    with pytest.raises(BadData, match="those for validation 1×9×8"):
        as_pair((dark, np.arange(64) % 10), (np.zeros((5, 9, 8, 1), np.uint8), np.arange(5)))
    with pytest.raises(BadData, match="has 12 classes"):
        mptify.search(Net(), (dark, np.arange(64) % 10), (bright, np.arange(32) % 12), settings())


def test_accumulated_steps_are_the_same_steps(digits):
    """Without BatchNorm, whose statistics are those of each part."""

    def net():
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))

    whole, parts = (search(digits, net(), accumulate=number, epochs=1) for number in (1, 4))
    for one, other in zip(
        ticket_layers(whole.model).values(), ticket_layers(parts.model).values(), strict=True
    ):
        assert torch.allclose(one.scores, other.scores, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16"])
def test_mixed_precision_searches_too(digits, precision):
    result = search(digits, precision=precision)
    assert np.isfinite(result.rows[-1]["loss"])
    assert search(digits).finished  # and leaves nothing behind that hinders the next


def test_a_tracker_is_logged_to(digits, tmp_path):
    search(digits, trackers=["tensorboard"], out=tmp_path / "run")
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))


def test_a_ticket_model_is_searched_with_its_own_settings(digits, tmp_path):
    ticketed = mptify.transform(Net(), bits="1/1", prune=0.3, seed=7)
    mptify.search(ticketed, *digits, {"epochs": 1, "batch": 32}, out=tmp_path / "run")
    ticket = mptify.read(tmp_path / "run/last.ticket")
    assert (ticket.config.prune, ticket.config.seed) == (0.3, 7)
    assert ticket.notes["recipe"]["ticket"]["prune"] == 0.3
    assert ticket.notes["recipe"]["lr"] == 0.03
    with pytest.raises(MptifyError, match="set method: edgepopup"):
        mptify.search(mptify.transform(Net(), bits="32/32"), *digits, {"epochs": 1})


@pytest.mark.long
def test_a_compiled_search_finds_what_an_eager_one_does(digits):
    eager, compiled = (search(digits, epochs=2, compile=one) for one in (False, True))
    for one, other in zip(eager.rows, compiled.rows, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0.02)


# -- what it says before the first step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)),
            "can't take images of 1×8×8",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 7)),
            "The data has 10 classes, but the network has only 7",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 10, 3), nn.ReLU(), nn.Conv2d(10, 10, 3)),
            "one row of class scores per image",
        ),
    ],
)
def test_a_network_that_does_not_fit_is_told_so_and_no_folder_is_left(digits, net, words, tmp_path):
    with pytest.raises(BadData, match=words):
        search(digits, net, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_loaded_ticket_has_no_scores_to_search_with(digits, tmp_path):
    mptify.save(mptify.transform(Net(), prune=0.5), tmp_path / "a.ticket")
    with pytest.raises(MptifyError, match="`mptify search FILE` continues from a file"):
        search(digits, mptify.load(tmp_path / "a.ticket", model=Net()))


def test_a_ticket_model_is_not_trained_densely(digits):
    with pytest.raises(MptifyError, match="whose weights are frozen"):
        search(digits, mptify.transform(Net(), prune=0.5), method="dense")


def test_half_precision_without_a_device_for_it_is_told(digits):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(MptifyError, match="needs a GPU"):
        search(digits, precision="fp16")


def test_too_few_images_for_a_step_are_told(digits):
    train, val = digits
    some = Images(train.labels[:129], 10, train.pixels[:129], mean=train.mean, std=train.std)
    with pytest.raises(
        BadData, match="too few"
    ):  # in batches of 128, they are two steps of 64 and 65
        mptify.search(Net(), some, val, settings(batch=128, accumulate=60))
    few = Images(train.labels[:3], 10, train.pixels[:3], mean=train.mean, std=train.std)
    with pytest.raises(BadData, match="too few"):
        mptify.search(Net(), few, val, settings(accumulate=2))


def test_a_loss_that_is_no_number_ends_the_search(digits):
    with pytest.raises(MptifyError, match="no longer finite"):
        search(digits, method="dense", lr=1e30, momentum=0.99, epochs=3, ticket={"bn": "keep"})


def test_sharded_scores_are_refused(digits, monkeypatch):
    import accelerate
    from accelerate.utils import DistributedType

    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(MptifyError, match="shards the scores"):
        search(digits)


# -- warnings ----------------------------------------------------------------------------------------------------------------------


def test_a_layer_whose_output_is_constant_is_named(digits):
    class Dead(Net):
        def forward(self, x):
            return super().forward(x) + 0 * self.blind(torch.ones(len(x), 4))

        def __init__(self):
            super().__init__()
            self.blind = nn.Linear(4, 10)

    result = search(digits, Dead())
    assert any(text.startswith("blind: its output is the same") for text in result.warnings)
    assert not any(text.startswith("head") for text in result.warnings)


def test_a_layer_that_stands_still_is_named(digits):
    class Still(Net):
        def __init__(self):
            super().__init__()
            self.unheard = nn.Linear(16, 10)

        def forward(self, x):
            x = self.middle(self.features(x)).mean((2, 3))
            return self.head(x) + 1e-30 * self.unheard(x)

    result = search(digits, Still(), epochs=4, weight_decay=0)
    assert [text for text in result.warnings if "not changed since the first epoch" in text] == [
        "unheard: its survivors have not changed since the first epoch."
    ]


def test_constant_outputs_are_seen_by_eye():
    ticketed = mptify.transform(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)), prune=0.5
    )
    images = torch.randn(4, 1, 8, 8)
    assert constant_layers(ticketed, images) == []
    assert constant_layers(ticketed, images[:1].expand(4, 1, 8, 8)) == ["0", "3"]


# -- the folder ------------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_recipe_metrics_curves_and_tickets(digits, tmp_path):
    result = search(digits, out=tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "recipe.yaml",
        "metrics.jsonl",
        "curves.png",
        "checkpoint.safetensors",
        "best.ticket",
        "last.ticket",
        "summary.json",
    }
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows == result.rows
    assert (tmp_path / "run/curves.png").read_bytes().startswith(b"\x89PNG")
    loaded = mptify.load(tmp_path / "run/last.ticket", model=Net())
    images = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(loaded(images), result.model(images))
    ticket = mptify.read(tmp_path / "run/last.ticket")
    assert ticket.notes["accuracy"] == rows[-1]["val_accuracy"]
    assert ticket.notes["recipe"]["lr"] == 0.1


def test_a_second_search_in_the_folder_refuses_politely(digits, tmp_path):
    search(digits, out=tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(RunExists, match="already holds a finished run; choose another folder"):
        search(digits, out=tmp_path / "run")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_nothing_to_resume_is_told(digits, tmp_path):
    with pytest.raises(MptifyError, match="holds no run to resume"):
        search(digits, out=tmp_path, resume=True)
    with pytest.raises(MptifyError, match="needs the folder"):
        search(digits, resume=True)


def test_a_damaged_checkpoint_is_told(digits, tmp_path):
    search(digits, out=tmp_path / "run")
    path = tmp_path / "run/checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(MptifyError, match="this checkpoint can't be read"):
        search(digits, out=tmp_path / "run", resume=True)


def test_a_run_is_resumed_with_what_it_was_begun_with(digits, tmp_path):
    stopped(digits, tmp_path / "run", 3)
    for changed, name in (
        ({"ticket": {"seed": 5}}, "ticket"),
        ({"lr": 0.3}, "lr"),
        ({"ema": 0.9}, "ema"),
    ):
        with pytest.raises(MptifyError, match=f"was started with another {name}"):
            search(digits, Net(drop=0.2), out=tmp_path / "run", resume=True, **changed)
    with pytest.raises(MptifyError, match="belongs to another network"):
        search(
            digits,
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)),
            out=tmp_path / "run",
            resume=True,
        )


def test_a_run_that_is_running_is_left_alone(digits, tmp_path):
    class Rival(mptify.Callback):
        def on_epoch_end(self, search, row):
            with pytest.raises(RunExists, match="another process is searching there"):
                Run.again(tmp_path / "run").lock()

    search(digits, out=tmp_path / "run", callbacks=[Rival()])
    run = Run.again(tmp_path / "run")
    run.lock()  # nobody is there any more
    run.unlock()


# -- exactness -------------------------------------------------------------------------------------------------------------------


class Interrupt(mptify.Callback):
    """Ctrl-C after so many steps."""

    def __init__(self, steps):
        self.left = steps

    def on_step_end(self, search, metrics):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def stopped(digits, folder, steps, **options):
    return search(
        digits,
        Net(drop=0.2),
        out=folder,
        callbacks=[Interrupt(steps)],
        checkpoint_steps=4,
        **options,
    )


def test_ctrl_c_without_a_folder_is_an_interrupt_like_any_other(digits):
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which a shell's background jobs begin without
    try:
        with pytest.raises(KeyboardInterrupt):
            search(digits, callbacks=[Interrupt(2)])
    finally:
        signal.signal(signal.SIGINT, before)


EVERYTHING = [
    {},
    {"optimizer": "adam", "lr": 0.01, "ema": 0.9, "prune_ramp": 1.5, "accumulate": 2},
    {"ticket": {"bits": "1/1", "scope": "global", "learn_bn": True}},
    {"ticket": {"bits": "1/4", "learn_clip": True, "learn_bn": True}},
    {"ticket": {"bits": "1/8"}},
    {"method": "edgepopup", "clip": 0.5},
    {"method": "dense"},
]


@pytest.mark.parametrize(
    "options", EVERYTHING, ids=["biprop", "adam", "global", "clip", "range", "edgepopup", "dense"]
)
def test_interrupted_and_resumed_ends_in_the_same_bytes(digits, options, tmp_path):
    torch.manual_seed(3)
    net = Net(drop=0.2)
    whole = mptify.search(
        net, *digits, settings(checkpoint_steps=4, **options), out=tmp_path / "whole"
    )
    first = mptify.search(
        net,
        *digits,
        settings(checkpoint_steps=4, **options),
        out=tmp_path / "parts",
        callbacks=[Interrupt(7)],
    )
    assert not first.finished
    second = mptify.search(
        net,
        *digits,
        settings(checkpoint_steps=4, **options),
        out=tmp_path / "parts",
        resume=True,
        callbacks=[Interrupt(6)],
    )
    assert not second.finished
    last = mptify.search(
        net, *digits, settings(checkpoint_steps=4, **options), out=tmp_path / "parts", resume=True
    )
    assert last.finished
    timeless = [
        [
            {
                key: value
                for key, value in row.items()
                if key not in ("seconds", "images_per_second")
            }
            for row in r.rows
        ]
        for r in (whole, last)
    ]
    assert timeless[0] == timeless[1]
    kind = "safetensors" if options.get("method") == "dense" else "ticket"
    for which in ("last", "best"):
        name = f"{which}.{kind}"
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_same_seed_gives_the_same_bytes(digits, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(name))
        search(digits, out=tmp_path / name, seed=seed)
    files = {name: (tmp_path / name / "last.ticket").read_bytes() for name in "abc"}
    assert files["a"] == files["b"]
    assert files["a"] != files["c"]


# -- what else can go wrong -------------------------------------------------------------------------------------------------------


def test_a_run_is_not_resumed_on_other_weights(digits, tmp_path):
    """With `init: keep`, seed and names don't say the weights; of dense training, only names and shapes are fixed."""
    keep = {"ticket": {"init": "keep"}}
    stopped(digits, tmp_path / "run", 3, **keep)
    with pytest.raises(MptifyError, match="belongs to another network"):
        search(digits, Net(drop=0.2), out=tmp_path / "run", resume=True, **keep)
    dense = {"method": "dense", "lr": 0.05}
    stopped(digits, tmp_path / "dense", 3, **dense)
    with pytest.raises(MptifyError, match="belongs to another network"):
        search(
            digits,
            nn.Sequential(Net(), nn.Identity()),
            out=tmp_path / "dense",
            resume=True,
            **dense,
        )


def test_a_living_run_keeps_what_it_is_writing(digits, tmp_path):
    stopped(digits, tmp_path / "run", 3)
    alive = Run.again(tmp_path / "run")
    alive.lock()
    torn = tmp_path / "run/.mptify-abc.part"
    torn.write_bytes(b"half a checkpoint")
    with pytest.raises(RunExists, match="another process is searching there"):
        search(digits, Net(drop=0.2), out=tmp_path / "run", resume=True)
    assert torn.exists()
    alive.unlock()
    search(digits, Net(drop=0.2), out=tmp_path / "run", resume=True)
    assert not torn.exists()


def test_a_child_that_outlives_a_run_does_not_hold_its_lock(digits, tmp_path):
    """As the workers that read images do when the search is killed."""
    stopped(digits, tmp_path / "run", 3)
    run = Run.again(tmp_path / "run")
    run.lock()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(int)  # it lives
        run.unlock()
        run.lock()
    run.unlock()


def test_tied_weights_are_trained_densely_too(digits, tmp_path):
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.again = nn.Conv2d(12, 12, 3, padding=1)
            self.more = nn.Conv2d(12, 12, 3, padding=1)
            self.more.weight = self.again.weight

        def forward(self, x):
            return self.head(self.middle(self.more(self.again(self.features(x)))).mean((2, 3)))

    search(digits, Tied(), method="dense", epochs=1, out=tmp_path / "run")
    Tied().load_state_dict(safetensors.torch.load_file(tmp_path / "run/last.safetensors"))


def test_mixed_precision_records_what_the_ticket_reaches(digits, tmp_path):
    """The network is judged as its file will run: in float32."""
    search(digits, precision="bf16", out=tmp_path / "run", ticket={"bits": "1/1"})
    ticket = mptify.read(tmp_path / "run/last.ticket")
    found = evaluate(mptify.load(tmp_path / "run/last.ticket", Net()), digits[1], 64, "cpu")
    assert found.top1 == ticket.notes["accuracy"]


def test_the_launchers_precision_is_not_overruled_in_silence(digits, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(
        MptifyError,
        match="The launcher asks for bf16, the search for precision='no'; set precision=bf16 there too",
    ):
        search(digits)


def test_going_on_with_other_threads_is_told(digits, tmp_path):
    class Notes(mptify.Callback):
        def __init__(self):
            self.warnings = []

        def on_warning(self, search, text):
            self.warnings.append(text)

    stopped(digits, tmp_path / "run", 3)
    threads, notes = torch.get_num_threads(), Notes()
    torch.set_num_threads(threads + 1)
    try:
        search(digits, Net(drop=0.2), out=tmp_path / "run", resume=True, callbacks=[notes])
    finally:
        torch.set_num_threads(threads)
    said = f"threads: {threads} when the run was stopped, {threads + 1} now; what it ends in may differ in the last bits."
    assert notes.warnings[0] == said


def test_a_layer_that_only_shrinks_has_not_stood_still():
    net = mptify.transform(Net(), prune=0.0)
    masks = Masks(net)
    for prune in (0.3, 0.6, 0.8):
        for layer in ticket_layers(net).values():
            layer.set_prune_(prune)
        assert masks.update() == 0
    assert masks.stuck(3) == []


def test_biases_of_dense_layers_decay_only_if_the_recipe_says_so():
    for decays, decay in ((("dense",), 0.0), (("dense", "bias"), 0.1)):
        config = make_search_config({"method": "dense", "weight_decay": 0.1, "decays": decays})
        net = Net()
        optimizer = make_optimizer(net, config)
        of = {
            id(parameter): group["weight_decay"]
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        assert of[id(net.head.bias)] == decay
        assert of[id(net.head.weight)] == 0.1


def test_an_optimizers_state_of_a_scalar_goes_to_its_device():
    scalar = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.Adam([scalar])
    scalar.grad = torch.tensor(1.0)
    optimizer.step()
    tensors, plain = optimizer_state(optimizer)
    elsewhere = nn.Parameter(torch.tensor(1.0, device="meta"))
    other = torch.optim.Adam([elsewhere])
    restore_optimizer_(other, tensors, plain)
    assert {key: value.device.type for key, value in other.state[elsewhere].items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


# -- what search is called with ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"model": "resnet18"},
            "model: a network (torch.nn.Module) is needed, not 'resnet18'; `mptify search resnet18` takes names.",
        ),
        ({"model": None}, "model: a network (torch.nn.Module) is needed, not None."),
        (
            {"model": Net},
            "model: a network (torch.nn.Module) is needed, not its class Net; write Net().",
        ),
        ({"architecture": "resnet81"}, "There is no model 'resnet81'"),
        (
            {"architecture": "timm:resnet18"},
            "architecture='timm:resnet18': that network, built for",
        ),
        ({"architecture": 3}, "architecture=3: a name is needed, such as 'timm:resnet18'."),
        ({"config": "fast"}, "config: settings are needed, such as {'epochs': 5}, not 'fast'."),
        (
            {"config": {"learning_rate": 1}},
            "There is no setting 'learning_rate'; did you mean 'lr'?",
        ),
        ({"workers": -1}, "workers=-1: a number from 0 is needed."),
        ({"callbacks": print}, "callbacks: a list of mptify.Callback is needed, not "),
        ({"out": 3}, "out=3: the path of a folder is needed."),
    ],
)
def test_a_bad_argument_is_told_in_one_sentence(given, words, digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {
        "model": Net(),
        "train": digits[0],
        "val": digits[1],
        "config": settings(),
        "out": "run",
    } | given
    with pytest.raises(MptifyError) as caught:
        mptify.search(**arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_name_of_the_architecture_lets_the_ticket_be_loaded(digits, tmp_path):
    network = conv2(in_chans=1, input_size=8, num_classes=12)
    mptify.search(
        network, *digits, settings(epochs=1), out=tmp_path / "run", architecture="mptify:conv2"
    )
    assert str(mptify.read(tmp_path / "run/last.ticket").architecture) == "mptify:conv2"
    assert mptify.load(tmp_path / "run/last.ticket")(torch.zeros(1, 1, 8, 8)).shape == (1, 12)
    ticketed = mptify.transform(network, prune=0.6)
    mptify.search(
        ticketed, *digits, settings(epochs=1), out=tmp_path / "again", architecture="conv2"
    )
    assert str(mptify.read(tmp_path / "again/last.ticket").architecture) == "mptify:conv2"
