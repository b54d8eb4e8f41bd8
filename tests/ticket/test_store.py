"""From a model to a file and back."""

import copy
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import nn

import mptify
from mptify.errors import BadConfig, DamagedTicket, MptifyError, TicketMismatch
from mptify.models import conv2, registry
from mptify.models.registry import Architecture
from mptify.nn import init
from mptify.runtime.library import library
from mptify.ticket import state
from mptify.ticket.fit import require_fit
from tests.nets import Attention, OneReluManyTimes, Plain, TiedWeights, images


def lived_in(net, **settings):
    """A ticket model that is no longer what its seed made it: other scores, other statistics."""
    ticketed = mptify.transform(net, **settings).train()
    ticketed(images())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in ticketed.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return ticketed.eval()


SETTINGS = [
    {"bits": "1/32", "prune": 0.8},
    {"bits": "1/1", "prune": 0.75},
    {"bits": "32/32", "prune": 0.5},
    {"bits": "32/1", "prune": 0.5, "init": "signed_constant"},
    {"bits": "1/1", "init": "keep", "bias": "learn", "learn_bn": True},
    {"bits": "32/32", "init": "keep", "bias": "learn"},
    {"bits": "1/32", "scope": "global", "prune": 0.9},
    {"bits": "1/32", "dense": ("first", "last"), "seed": 2**40 + 1},
    {"bits": "1/1", "prune_overrides": {"*": 0.9}, "residual": "real"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda given: ",".join(map(str, given.values())))
@pytest.mark.parametrize(
    "net", [Plain, OneReluManyTimes, TiedWeights], ids=lambda net: net.__name__
)
def test_a_loaded_ticket_computes_the_same_to_the_bit(net, settings, tmp_path):
    ticketed = lived_in(net(), **settings)
    path = tmp_path / "a.ticket"
    ticket = mptify.save(ticketed, path)
    loaded = mptify.load(path, model=net())
    assert torch.equal(loaded(images()), ticketed(images()))
    assert mptify.ticket_of(loaded) == ticket
    for name, layer in mptify.ticket_layers(ticketed).items():
        other = mptify.ticket_layers(loaded)[name]
        assert torch.equal(other.mask, layer.mask)
        assert torch.equal(other.gain, layer.gain)
        assert torch.equal(other.ticket_weight(), layer.ticket_weight())
    again = mptify.load(path, model=loaded)
    assert again is loaded
    assert torch.equal(again(images()), ticketed(images()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_type_that_a_model_computes_in_comes_back(dtype, tmp_path):
    ticketed = lived_in(Plain(), bits="1/1").to(dtype)
    x = images().to(dtype)
    mptify.save(ticketed, tmp_path / "a.ticket")
    loaded = mptify.load(tmp_path / "a.ticket", model=Plain())
    assert torch.equal(loaded(x), ticketed(x))


def test_float16_halves_the_floats_and_only_them(tmp_path):
    ticketed = lived_in(Plain(), bits="1/1", learn_bn=True)
    full, half = (
        mptify.save(ticketed, tmp_path / str(small), float16=small) for small in (False, True)
    )
    saved = (tmp_path / "False").stat().st_size - (tmp_path / "True").stat().st_size
    assert saved == pytest.approx(2 * full.stored_floats, abs=16)
    torch.testing.assert_close(
        mptify.load(tmp_path / "True", model=Plain())(images()),
        ticketed(images()),
        rtol=0.1,
        atol=0.1,
    )
    assert all(
        np.array_equal(full.layers[name].mask, half.layers[name].mask) for name in full.layers
    )


def test_a_standalone_ticket_needs_no_generator(tmp_path, monkeypatch):
    ticketed = lived_in(Plain(), bits="1/1")
    mptify.save(ticketed, tmp_path / "a.ticket", standalone=True)

    def no_words(*_):
        raise AssertionError("drawn")

    monkeypatch.setattr(init, "_words", no_words)
    assert torch.equal(
        mptify.load(tmp_path / "a.ticket", model=Plain())(images()), ticketed(images())
    )


def test_loading_draws_no_magnitudes_and_no_scores(tmp_path, monkeypatch):
    ticketed = lived_in(Plain(), bits="1/32")
    mptify.save(ticketed, tmp_path / "a.ticket")
    words = init._words
    purposes = []
    monkeypatch.setattr(init, "_words", lambda *given: purposes.append(given[2]) or words(*given))
    mptify.load(tmp_path / "a.ticket", model=Plain())
    assert set(purposes) == {"signs"}


@pytest.mark.parametrize("bits", ["1/32", "1/1", "32/32"])
def test_a_loaded_network_holds_its_weights_once(bits, tmp_path):
    ticketed = lived_in(Plain(), bits=bits)
    loaded = saved_and_loaded(ticketed, tmp_path / "a.ticket")
    numbers = {
        tensor.data_ptr(): tensor.numel() for tensor in (*loaded.parameters(), *loaded.buffers())
    }
    floats = sum(value.size for value in mptify.read(tmp_path / "a.ticket").floats.values())
    layers = mptify.ticket_layers(loaded).values()
    counters = sum(buffer.numel() for buffer in loaded.buffers() if not buffer.is_floating_point())
    assert sum(numbers.values()) == sum(layer.count + 1 for layer in layers) + floats + counters
    for name, layer in mptify.ticket_layers(loaded).items():
        searched = mptify.ticket_layers(ticketed)[name]
        assert layer.weight.data_ptr() == layer.fixed_weight.data_ptr()
        assert torch.equal(layer.weight, searched.weight)
        assert torch.equal(layer.mask, searched.mask)
        assert torch.equal(layer.ticket_weight(), searched.ticket_weight())
        assert not any(
            isinstance(value, torch.Tensor) and value.numel() > 1 for value in vars(layer).values()
        )
    assert mptify.ticket_of(loaded) == mptify.ticket_of(ticketed)
    with pytest.raises(mptify.BadConfig, match="loaded from a file, without the scores"):
        layer.set_prune_(0.5)


def test_survivors_that_are_zero_are_told_from_pruned_weights(tmp_path):
    network = Plain()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter[..., ::2] = 0.0
    ticketed = mptify.transform(network, bits="32/32", prune=0.3, init="keep").eval()
    mptify.save(ticketed, tmp_path / "a.ticket")
    loaded = mptify.load(tmp_path / "a.ticket", model=Plain())
    for same in (loaded, copy.deepcopy(loaded)):
        assert mptify.ticket_of(same) == mptify.ticket_of(ticketed)


def test_a_copy_of_a_loaded_model_is_the_same_to_the_bit(tmp_path):
    ticketed = lived_in(OneReluManyTimes(), bits="1/1", prune=0.9)
    mptify.save(ticketed, tmp_path / "a.ticket")
    loaded = mptify.load(tmp_path / "a.ticket", model=OneReluManyTimes())
    for same in (copy.deepcopy(loaded), loaded.double().float(), loaded.train().eval()):
        assert torch.equal(same(images()), ticketed(images()))


@pytest.mark.parametrize(
    ("name", "bits"), [("torchvision:resnet18", "1/1"), ("timm:test_vit", "1/32")]
)
def test_a_named_network_comes_back_in_a_new_process_whatever_the_defaults(name, bits, tmp_path):
    from mptify.models import registry

    network = registry.build(registry.resolve(name), num_classes=7)
    x = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(1))
    ticketed = mptify.transform(network, bits=bits, prune=0.8).train()
    ticketed(x)
    mptify.save(ticketed.eval(), tmp_path / "a.ticket", name, arguments={"num_classes": 7})
    with torch.no_grad():
        torch.save((x, ticketed(x)), tmp_path / "expected.pt")
    script = (
        "import sys, torch, mptify; torch.set_num_threads(1); torch.set_default_dtype(torch.float64); torch.manual_seed(99);"
        "x, y = torch.load(sys.argv[2]); model = mptify.load(sys.argv[1]);"
        "assert torch.get_default_dtype() is torch.float64;"
        "assert torch.equal(model(x), y); print('same')"
    )
    command = [
        sys.executable,
        "-c",
        script,
        str(tmp_path / "a.ticket"),
        str(tmp_path / "expected.pt"),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "same\n", result.stderr


# -- what doesn't fit ----------------------------------------------------------------------------------------------------------


class Wider(Plain):
    def __init__(self):
        super().__init__()
        name, layer = next((n, m) for n, m in self.named_modules() if isinstance(m, nn.Conv2d))
        self.set_submodule(
            name,
            nn.Conv2d(
                layer.in_channels, layer.out_channels, 5, padding=2, bias=layer.bias is not None
            ),
        )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Wider, r"shape .* this model's has"),
        (Attention, "none of that name"),
        (OneReluManyTimes, "none of that name"),
    ],
)
def test_a_ticket_that_fits_another_model_says_where_it_does_not(model, words, tmp_path):
    mptify.save(lived_in(Plain(), bits="1/1"), tmp_path / "a.ticket")
    with pytest.raises(TicketMismatch, match=words):
        mptify.load(tmp_path / "a.ticket", model=model())


def test_a_refused_swap_changes_nothing():
    ticketed, other = (
        lived_in(Plain(), bits="1/1"),
        mptify.ticket_of(lived_in(Plain(), bits="1/32")),
    )
    before = ticketed(images())
    with pytest.raises(TicketMismatch, match="bits"):
        mptify.swap_(ticketed, other)
    assert torch.equal(ticketed(images()), before)


def test_a_ticket_without_an_architecture_asks_for_the_model(tmp_path):
    mptify.save(lived_in(Plain(), bits="1/1"), tmp_path / "a.ticket")
    with pytest.raises(TicketMismatch, match="model="):
        mptify.load(tmp_path / "a.ticket")


def test_an_unknown_architecture_is_refused_when_saving(tmp_path):
    with pytest.raises(MptifyError, match="resnet18"):
        mptify.save(lived_in(Plain()), tmp_path / "a.ticket", "torchvision:resnet1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "hf-hub:somebody/model",
        "local-dir:/tmp",
        "os.system",
        "__import__",
        "mptify.cli",
        "torch.hub.load",
    ],
)
def test_no_name_in_a_file_makes_anything_run(name, tmp_path, monkeypatch):
    """Even where a file is signed: names are looked up in lists, and nowhere else."""
    ticket = mptify.ticket_of(lived_in(Plain()))
    monkeypatch.setattr(registry, "build", lambda *_, **__: pytest.fail("something was built"))
    for source in ("timm", "torchvision", "mptify"):
        changed = mptify.Ticket(
            ticket.config, ticket.layers, ticket.floats, state.Architecture(source, name)
        )
        with pytest.raises(MptifyError):  # by the writer, or else by the reader
            _there_and_back(changed, tmp_path / "a.ticket")


def _there_and_back(ticket, path):
    state.write(ticket, path)
    return mptify.load(path)


# -- swapping -------------------------------------------------------------------------------------------------------------------


def test_tickets_are_swapped_in_place_without_new_memory():
    one, two = lived_in(Plain(), bits="1/1"), lived_in(Plain(), bits="1/1", seed=4, prune=0.9)
    expected = two(images())
    places = {name: tensor.data_ptr() for name, tensor in one.state_dict().items()}
    mptify.swap_(one, mptify.ticket_of(two))
    assert torch.equal(one(images()), expected)
    assert {name: tensor.data_ptr() for name, tensor in one.state_dict().items()} == places


def test_files_are_dealt_and_swapped_in_by_their_paths(tmp_path):
    for seed in (0, 1):
        mptify.save(lived_in(Plain(), seed=seed), tmp_path / f"{seed}.ticket")
    model = mptify.load(tmp_path / "0.ticket", model=Plain())
    mptify.swap_(model, tmp_path / "1.ticket")
    assert mptify.ticket_of(model) == mptify.read(tmp_path / "1.ticket")
    assert len(mptify.Ensemble(model, [tmp_path / "0.ticket", str(tmp_path / "1.ticket")])) == 2


def test_a_deck_refuses_a_card_of_another_game(tmp_path):
    with pytest.raises(TicketMismatch, match="bits"):
        mptify.Ensemble(
            lived_in(Plain(), bits="1/32"), [mptify.ticket_of(lived_in(Plain(), bits="1/1"))]
        )


def test_a_ticket_is_shown_in_a_line():
    ticket = mptify.ticket_of(lived_in(Plain()))
    assert "weights)" in repr(ticket)
    assert len(repr(ticket)) < 120
    assert len(repr(next(iter(ticket.layers.values())))) < 120


def test_what_is_no_module_is_told_so(tmp_path):
    mptify.save(lived_in(Plain()), tmp_path / "a.ticket")
    with pytest.raises(MptifyError, match="into a module"):
        mptify.load(tmp_path / "a.ticket", model=Plain)
    with pytest.raises(MptifyError, match=r"an nn\.Module"):
        mptify.transform(["resnet18"])


def test_a_deck_averages_its_members_chances():
    models = [lived_in(Plain(), bits="1/1", seed=seed) for seed in range(3)]
    tickets = [mptify.ticket_of(model) for model in models]
    expected = torch.stack([model(images()).softmax(-1) for model in models]).mean(0)
    deck = mptify.Ensemble(models[0], tickets).eval()
    torch.testing.assert_close(deck(images()).exp(), expected)
    torch.testing.assert_close(deck(images()).exp(), expected)  # whatever was dealt last
    assert deck.size == sum(len(state.to_bytes(ticket)) for ticket in tickets)
    with pytest.raises(BadConfig, match="at least one"):
        mptify.Ensemble(models[0], [])


# -- states that a seed does not say ---------------------------------------------------------------------------------------------


def saved_and_loaded(model, path, net=Plain):
    mptify.save(model, path)
    return mptify.load(path, model=net())


@pytest.mark.parametrize(
    "settings",
    [{"bits": "1/1"}, {"bits": "32/32"}, {"bits": "1/32", "init": "keep"}],
    ids=lambda one: str(one),
)
def test_a_swapped_model_can_be_saved_again(settings, tmp_path):
    one, two = (lived_in(Plain(), seed=seed, prune=0.5 + seed / 4, **settings) for seed in (0, 1))
    mptify.swap_(one, mptify.ticket_of(two))
    again = saved_and_loaded(one, tmp_path / "a.ticket")
    assert torch.equal(again(images()), two(images()))
    assert mptify.ticket_of(one) == mptify.ticket_of(two)


@pytest.mark.parametrize("bits", ["1/1", "32/32"])
def test_weights_that_the_seed_does_not_say_are_stored(bits, tmp_path):
    one, two = (lived_in(Plain(), bits=bits, seed=seed) for seed in (0, 1))
    one.load_state_dict(two.state_dict())
    assert torch.equal(saved_and_loaded(one, tmp_path / "a.ticket")(images()), two(images()))


class TiedOddly(nn.Module):
    """A conv and a transposed one share a weight, of which different numbers meet in one output."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(3, 8, 4, stride=2, bias=False),
            nn.ConvTranspose2d(8, 3, 4, stride=2, bias=False),
        )
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x)).mean((2, 3))


def test_tied_weights_of_32_bits_come_back(tmp_path):
    ticketed = lived_in(TiedOddly(), bits="32/32", prune_overrides={"b": 0.9})
    assert torch.equal(
        saved_and_loaded(ticketed, tmp_path / "a.ticket", TiedOddly)(images()), ticketed(images())
    )


def test_the_order_of_overrides_comes_back(tmp_path):
    ticketed = lived_in(
        Plain(), bits="32/32", prune_overrides={"features.3": 0.1, "*": 0.2, "classifier*": 0.8}
    )
    mptify.save(ticketed, tmp_path / "a.ticket")
    assert list(mptify.read(tmp_path / "a.ticket").config.prune_overrides) == [
        "features.3",
        "*",
        "classifier*",
    ]


def test_float64_statistics_come_back_whole(tmp_path):
    ticketed = mptify.transform(Plain().double(), bits="1/1").train()
    ticketed(images().double())
    loaded = saved_and_loaded(ticketed.eval(), tmp_path / "a.ticket")
    assert torch.equal(loaded(images().double()), ticketed(images().double()))


def test_mixed_types_are_refused_when_saving(tmp_path):
    ticketed = lived_in(Plain(), bits="1/1").half()
    next(
        module
        for module in ticketed.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ).float()
    with pytest.raises(BadConfig, match=r"one dtype.*float32"):
        mptify.save(ticketed, tmp_path / "a.ticket")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.half(),
        lambda model: lived_in(OneReluManyTimes(), bits="1/1", residual="real"),
    ],
)
def test_a_ticket_of_another_type_or_structure_is_not_swapped_in(change):
    ticketed = lived_in(OneReluManyTimes(), bits="1/1")
    other = mptify.ticket_of(change(lived_in(OneReluManyTimes(), bits="1/1")))
    with pytest.raises(TicketMismatch, match=r"float16|residual"):
        mptify.swap_(ticketed, other)


def test_float16_refuses_what_it_can_not_hold(tmp_path):
    ticketed = lived_in(Plain(), bits="1/1")
    norm = next(
        module
        for module in ticketed.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    )
    norm.running_var.fill_(1e6)
    with pytest.raises(BadConfig, match="running_var"):
        mptify.save(ticketed, tmp_path / "a.ticket", float16=True)


@pytest.mark.parametrize(
    "notes",
    [
        {"accuracy": float("nan")},
        {"a": np.float32(1)},
        {"a": {1}},
        {1: 2, "a": 3},
        {"a": "\ud800"},
        {"a": "x" * (1 << 25)},
    ],
)
def test_notes_that_can_not_be_read_back_are_not_written(notes, tmp_path):
    with pytest.raises(BadConfig):
        mptify.save(lived_in(Plain()), tmp_path / "a.ticket", notes=notes)
    assert list(tmp_path.iterdir()) == []


def test_arguments_that_no_reader_takes_are_not_written(tmp_path):
    with pytest.raises(BadConfig, match="arguments"):
        mptify.save(
            lived_in(Plain()),
            tmp_path / "a.ticket",
            "timm:resnet18",
            arguments={"zero_init_last": 1},
        )


def test_a_single_layer_is_a_model_too(tmp_path):
    ticketed = mptify.transform(nn.Linear(8, 4), bits="1/32").eval()
    loaded = saved_and_loaded(ticketed, tmp_path / "a.ticket", lambda: nn.Linear(8, 4))
    assert torch.equal(loaded(torch.ones(2, 8)), ticketed(torch.ones(2, 8)))


class Counting(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("zeros", torch.zeros(1200, 1000))


def test_counters_and_large_constants_do_not_stop_a_ticket(tmp_path):
    ticketed = lived_in(Counting())
    ticketed.steps += 3
    assert torch.equal(
        saved_and_loaded(ticketed, tmp_path / "a.ticket", Counting)(images()), ticketed(images())
    )


def test_inference_mode_is_no_obstacle(tmp_path):
    ticketed = lived_in(Plain(), bits="1/1")
    expected = ticketed(images())
    with torch.inference_mode():
        loaded = saved_and_loaded(ticketed, tmp_path / "a.ticket")
        assert torch.equal(loaded(images()), expected)
        mptify.swap_(loaded, mptify.ticket_of(ticketed))
    x = images().requires_grad_()
    loaded.train()(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_the_model_passed_in_stays_as_it_is(tmp_path):
    mptify.save(lived_in(Plain()), tmp_path / "a.ticket")
    mine = Plain().eval()
    before = {name: tensor.clone() for name, tensor in mine.state_dict().items()}
    mptify.load(tmp_path / "a.ticket", model=mine)
    assert not mine.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in mine.state_dict().items())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("torchvision:vit_b_16", {"input_size": 100}), ("torchvision:raft_small", {"num_classes": 7})],
)
def test_a_builder_that_fails_is_told_in_one_sentence(name, arguments, tmp_path):
    source, _, model = name.partition(":")
    ticket = mptify.ticket_of(
        lived_in(Plain()), architecture=state.Architecture(source, model, arguments)
    )
    state.write(ticket, tmp_path / "a.ticket")
    with pytest.raises(MptifyError):
        mptify.load(tmp_path / "a.ticket")


def test_a_small_ticket_that_names_a_huge_network_is_refused_before_it_is_built(
    tmp_path, monkeypatch
):
    ticket = mptify.ticket_of(
        lived_in(Plain()),
        architecture=state.Architecture("timm", "vit_base_patch16_224", {"num_classes": 1 << 17}),
    )
    state.write(ticket, tmp_path / "a.ticket")
    devices = []
    build = registry.build
    monkeypatch.setattr(
        registry,
        "build",
        lambda *args, **kwargs: (
            devices.append(torch.get_default_device()) or build(*args, **kwargs)
        ),
    )
    with pytest.raises(TicketMismatch, match="not made from"):
        mptify.load(tmp_path / "a.ticket")
    assert devices == [torch.device("meta")]


# -- files ----------------------------------------------------------------------------------------------------------------------


def test_what_can_not_be_read_or_written_is_told_in_one_sentence(tmp_path):
    ticketed = lived_in(Plain())
    with pytest.raises(MptifyError, match="can't be read"):
        mptify.load(tmp_path / "missing")
    with pytest.raises(MptifyError, match="does not exist"):
        mptify.save(ticketed, tmp_path / "no" / "such" / "folder")
    (tmp_path / "other").write_text("hello")
    with pytest.raises(DamagedTicket, match="other"):
        mptify.load(tmp_path / "other")


def test_links_are_followed_and_what_is_no_file_is_left_alone(tmp_path):
    mptify.save(lived_in(Plain()), tmp_path / "a.ticket")
    (tmp_path / "link").symlink_to(tmp_path / "a.ticket")
    mptify.save(lived_in(Plain(), seed=1), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert mptify.read(tmp_path / "a.ticket").config.seed == 1
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MptifyError, match="not a regular file"):
        mptify.save(lived_in(Plain()), tmp_path / "pipe")
    mptify.save(lived_in(Plain()), tmp_path / ("a" * 250))


FILLER = """
import resource, signal, sys
from mptify.errors import MptifyError
from mptify.ticket import state
from tests.helpers.tickets import small
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    state.write(small(notes={"other": "x" * 200_000}), sys.argv[1])
except MptifyError as error:
    print(error)
"""


def test_a_file_that_the_system_cuts_short_leaves_the_old_one(tmp_path):
    path = tmp_path / "a.ticket"
    mptify.save(lived_in(Plain()), path)
    old = path.read_bytes()
    result = subprocess.run(
        [sys.executable, "-c", FILLER, str(path)], capture_output=True, text=True
    )
    assert "can't write there" in result.stdout, result.stderr
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_is_full_at_the_last_moment_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.ticket"
    mptify.save(lived_in(Plain()), path)
    old = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MptifyError, match="No space left"):
        mptify.save(lived_in(Plain(), seed=1), path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


SAVER = """
import sys, torch, mptify
from mptify.ticket import state
from tests.helpers.tickets import small
tickets = [small(), small(notes={"other": "x" * 200_000})]
state.write(tickets[0], sys.argv[1])
print("ready", flush=True)
while True:
    for ticket in tickets:
        state.write(ticket, sys.argv[1])
"""


def test_a_saver_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    path = tmp_path / "a.ticket"
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, cwd=os.getcwd()
        )
        process.stdout.readline()
        for _ in range(8):
            time.sleep(rng.random() / 50)
            seen.add(state.read(path).digest)  # while it is being replaced
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        seen.add(state.read(path).digest)
    assert len(seen) == 2


# -- what is no whole ticket, and what wraps one ---------------------------------------------------------------------------------


@pytest.mark.skipif(library is None, reason="needs the compiled library")
@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_a_packed_program_is_not_saved_as_a_ticket(name, tmp_path):
    ticketed = mptify.transform(timm.create_model(name), bits="1/1", prune=0.5).eval()
    packed = mptify.pack(ticketed, torch.randn(1, 3, 160, 160))
    with pytest.raises(MptifyError, match=r"ticket can.t be saved|not a ticket model"):
        mptify.save(packed, tmp_path / "a.ticket")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_lost_layers_is_not_saved(tmp_path):
    ticketed = lived_in(Plain())
    name = next(iter(mptify.ticket_layers(ticketed)))
    parent, _, last = name.rpartition(".")
    setattr(ticketed.get_submodule(parent), last, nn.Identity())
    with pytest.raises(MptifyError, match=f"The model has lost the ticket layer {name}, so"):
        mptify.save(ticketed, tmp_path / "a.ticket")
    assert list(tmp_path.iterdir()) == []


class LightningModule(nn.Module):
    """A user's training module, which holds the network under a name of its own and a metric beside it."""

    def __init__(self, network):
        super().__init__()
        self.network, self.metric = network, nn.Identity()


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        nn.parallel.DistributedDataParallel,
        LightningModule,
        lambda one: nn.DataParallel(LightningModule(one)),
    ],
)
@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_wrapped_models_are_saved_as_what_they_wrap(wrap, bits, tmp_path, process_group):
    ticketed = lived_in(Plain(), bits=bits)
    wrapped = wrap(ticketed)
    assert mptify.save(wrapped, tmp_path / "a.ticket") == mptify.ticket_of(ticketed)
    assert torch.equal(
        mptify.load(tmp_path / "a.ticket", model=Plain())(images()), ticketed(images())
    )


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("timm:test_vit", {}, "missing"),
        ("torchvision:resnet18", {}, r"is not the model"),
        ("timm:test_resnet", {}, r"its fc is 1000×\d+, the model's 10×\d+"),
        ("timm:test_resnet", {"num_classes": 7}, r"num_classes=7, .* its fc is 7×"),
        ("timm:test_resnet", {"num_classes": 10, "in_chans": 1}, r"its conv1\S* is \d+×1×3×3"),
    ],
)
def test_a_name_that_does_not_fit_the_model_is_refused(name, arguments, words, bits, tmp_path):
    ticketed = mptify.transform(timm.create_model("test_resnet", num_classes=10), bits=bits)
    with pytest.raises(TicketMismatch, match=words):
        mptify.save(ticketed, tmp_path / "a.ticket", name, arguments=arguments)
    assert list(tmp_path.iterdir()) == []
    mptify.save(ticketed, tmp_path / "b.ticket", "timm:test_resnet", arguments={"num_classes": 10})
    assert mptify.load(tmp_path / "b.ticket").num_classes == 10


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
def test_a_deeper_network_is_another_one(bits, tmp_path):
    """All weights of a ResNet-18 have the names and shapes of a ResNet-34's."""
    with torch.device("meta"):
        ticketed = mptify.transform(torchvision.models.resnet18(), bits=bits)
    with pytest.raises(TicketMismatch, match=r"torchvision:resnet34'.*the model's missing"):
        require_fit(ticketed, Architecture("torchvision", "resnet34", {}))
    require_fit(ticketed, Architecture("torchvision", "resnet18", {}))
    with pytest.raises(TicketMismatch):
        require_fit(ticketed, Architecture("timm", "resnet18", {}))


@pytest.mark.parametrize("bits", ["1/32", "1/1"])
@pytest.mark.parametrize(
    "name",
    [
        "timm:test_nfnet",
        "timm:beit_base_patch16_224",
        "torchvision:swin_t",
        "torchvision:fcn_resnet50",
        "mptify:conv4",
    ],
)
def test_a_name_fits_the_network_that_it_builds(name, bits):
    entry = registry.resolve(name)
    with torch.device("meta"):
        ticketed = mptify.transform(registry.build(entry), bits=bits)
    require_fit(ticketed, Architecture(entry.source, entry.name, {}))


def test_a_swapped_ticket_brings_its_settings_to_layers_and_quantizers():
    theirs = {"score_grad": "alpha", "sign_width": 0.3}
    ours = mptify.transform(conv2(), bits="1/1", prune=0.5)
    other = mptify.transform(conv2(), bits="1/1", prune=0.5, seed=3, **theirs)
    mptify.swap_(ours, mptify.ticket_of(other))
    assert {layer.score_grad for layer in mptify.ticket_layers(ours).values()} == {"alpha"}
    assert {part.width for part in ours.modules() if isinstance(part, mptify.Sign)} == {0.3}
    assert ours.ticket_plan.config.sign_width == 0.3
