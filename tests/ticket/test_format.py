"""A ticket and its bytes."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from mptify.config import TicketConfig, make_config
from mptify.errors import BadConfig, DamagedTicket
from mptify.models.registry import Architecture
from mptify.ticket import codec
from mptify.ticket.codec import coded_masks, from_bytes, to_bytes
from tests.helpers.tickets import TICKETS, layer, searched, small, with_survivors
from tests.ticket import reader


@pytest.mark.parametrize("ticket", TICKETS.values(), ids=TICKETS)
def test_a_ticket_comes_back_equal_and_to_the_same_bytes(ticket):
    data = to_bytes(ticket)
    found = from_bytes(data)
    assert found == ticket
    assert to_bytes(found) == data
    assert found.config == ticket.config
    assert found.architecture == ticket.architecture
    assert found.notes == ticket.notes
    for name, one in ticket.layers.items():
        assert np.array_equal(found.layers[name].mask, one.mask)
        assert np.float32(found.layers[name].gain) == np.float32(one.gain)
        assert np.array_equal(
            found.layers[name].weights(found.config), np.asarray(one.weights(ticket.config))
        )
    for name, value in ticket.floats.items():
        assert found.floats[name].tobytes() == value.tobytes()
        assert found.floats[name].shape == value.shape


@pytest.mark.parametrize("ticket", TICKETS.values(), ids=TICKETS)
def test_a_second_reader_finds_the_same(ticket):
    theirs = reader.read(to_bytes(ticket))
    for name, one in ticket.layers.items():
        assert np.array_equal(theirs["masks"][name], one.mask)
        assert np.array_equal(theirs["weights"][name], one.weights(ticket.config) * one.mask)
    for name, value in ticket.floats.items():
        assert theirs["floats"][name].tobytes() == value.tobytes()


def test_a_standalone_ticket_does_not_depend_on_initial_scores():
    """What stores its signs can be read without a generator: masks too."""
    seeded, alone = searched(), with_survivors(searched(), signs=True)
    ways = [
        {blob[0] for blob in coded_masks(to_bytes(ticket)).values()} for ticket in (seeded, alone)
    ]
    assert 2 in ways[0]
    assert 2 not in ways[1]
    kept = dataclasses.replace(
        alone, config=make_config({"bits": "1/1", "prune": 0.8, "seed": 7, "init": "keep"})
    )
    assert 2 in {blob[0] for blob in coded_masks(to_bytes(kept)).values()}


def test_any_safetensors_reader_opens_it(tmp_path):
    from safetensors import safe_open

    path = tmp_path / "a.safetensors"
    path.write_bytes(to_bytes(small()))
    with safe_open(path, "np") as file:
        assert set(file.keys()) == {"floats", "gains", "masks"}
        assert json.loads(file.metadata()["mptify"])["version"] == 2


@pytest.mark.parametrize(
    "change",
    [
        {"config": make_config({"bits": "1/1", "prune": 0.8, "seed": 8})},
        {"config": make_config({"bits": "1/32", "prune": 0.8, "seed": 7})},
        {"floats": small().floats | {"scalar": np.array(2.25, "f4")}},
        {"floats": small().floats | {"minus": np.zeros(3, "f4")}},
        {"architecture": Architecture("timm", "resnet18", {"num_classes": 11})},
        {"constants": "0" * 64},
        {"notes": {}},
        {"layers": small().layers | {"conv": layer("conv", (16, 3, 3, 3), 0.2, gain=0.25)}},
        {
            "layers": small().layers
            | {"conv": layer("conv", (16, 3, 3, 3), 0.2, seed=1, gain=0.125)}
        },
    ],
    ids=lambda change: next(iter(change)),
)
def test_tickets_differ_if_anything_in_them_does(change):
    assert small(**change) != small()
    assert small() == small()


def described(change):
    """The bytes of the small ticket with its description changed by hand."""
    data = to_bytes(small())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    description = json.loads(header["__metadata__"]["mptify"])
    change(description)
    header["__metadata__"]["mptify"] = json.dumps(description)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def set_(*path):
    def change(description):
        *way, last, value = path
        for step in way:
            description = description[step]
        description[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_("version", 3), "a newer mptify"),
        (set_("version", 1), "search or convert it again"),
        (set_("version", True), "lacks or adds"),
        (set_("extra", 1), "extra"),
        (lambda d: d.pop("notes"), "notes"),
        (set_("config", "prune", 7), "prune"),
        (set_("config", "bits", "1/32"), "SHA-256"),
        (set_("config", "prune_overrides", [["a", 0.5], ["a", 0.6]]), "canonical form"),
        (set_("config", "prune_overrides", {"a": 0.5}), "settings"),
        (set_("layers", []), "layers"),
        (set_("layers", 0, 0, "rows"), "a new name"),
        (set_("layers", 0, 0, "../../etc"), "SHA-256"),
        (set_("layers", 0, 1, [1 << 40]), "size"),
        (set_("layers", 0, 1, [1 << 30, 1 << 30]), "number of values"),
        (set_("layers", 0, 1, [1 << 20, 1 << 10]), "so small a file"),
        (set_("layers", 0, 1, [1 << 22]), "can't come from"),
        (set_("layers", 0, 1, [-3]), "size"),
        (set_("floats", 6, 1, [0, *[2**31 - 1] * 7]), "number of values"),
        (set_("layers", 0, 0, "a\x1b[31m"), "a new name"),
        (set_("layers", 0, 2, 0), "survivors"),
        (set_("layers", 0, 2, 10**9), "survivors"),
        (set_("layers", 0, 2, 5), "survive where 5"),
        (set_("layers", 0, 3, "nowhere"), "origin"),
        (set_("layers", 0, 3, "signs"), "ends before"),
        (set_("layers", 0, 3, "values"), "an origin"),
        (set_("config", "init", "keep"), "an origin"),
        (set_("config", "strict", 0), "canonical form"),
        (set_("config", "seed", 7.0), "canonical form"),
        (set_("layers", 0, 4, 10**9), "ends before"),
        (set_("layers", 0, 4, 1), "conv"),
        (set_("floats", 0, 1, [17]), "ends before"),
        (set_("floats", 0, 1, [15]), "more than it describes|SHA-256"),
        (set_("floats", 1, 1, [1 << 30]), "more equal numbers"),
        (set_("floats", 1, 2, "1"), "a number"),
        (set_("float_bytes", 8), "another type"),
        (set_("dtype", "int8"), "type of floats"),
        (set_("constants", "zz"), "digest"),
        (set_("architecture", "source", "pickle"), "source of models"),
        (set_("architecture", "name", "hf-hub:evil/model"), "model's name"),
        (set_("architecture", "name", "os.system"), "SHA-256"),
        (set_("architecture", "arguments", {"pretrained": 1}), "arguments"),
        (set_("architecture", "arguments", {"num_classes": 0}), "a number"),
        (set_("sha256", "0" * 64), "SHA-256"),
    ],
)
def test_a_description_that_was_changed_is_refused_with_a_reason(change, words):
    with pytest.raises(DamagedTicket, match=words):
        from_bytes(described(change))


def test_a_setting_that_came_after_the_format_is_written_only_if_it_is_set():
    """So files of before, which lack it, keep their bytes and their digests."""
    config = make_config({"bits": "1/4", "prune": 0.8, "learn_clip": True})
    assert "learn_clip" not in codec.config_as_json(small().config)
    assert codec.config_as_json(config)["learn_clip"] is True
    assert set(codec._LATER_SETTINGS) < set(TicketConfig.model_fields)
    assert from_bytes(to_bytes(small(config=config))).config == config


@pytest.mark.parametrize("gain", [np.nan, np.inf, -1.0])
def test_a_gain_that_is_no_scale_is_neither_written_nor_read(gain):
    with pytest.raises(BadConfig, match="gain"):
        to_bytes(small(layers={"a": layer("a", (4, 4), 0.5, gain=gain)}))
    data = to_bytes(small(layers={"a": layer("a", (4, 4), 0.5, gain=0.123)}))
    changed = data.replace(np.float32(0.123).tobytes(), np.float32(gain).tobytes())
    assert changed != data
    with pytest.raises(DamagedTicket, match="gain"):
        from_bytes(changed)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 100,
        b"\x10\0\0\0\0\0\0\0{}",
        (2).to_bytes(8, "little") + b"{}",
        b"PK\x03\x04" * 9,
    ],
)
def test_what_is_no_ticket_is_refused(data):
    with pytest.raises(DamagedTicket):
        from_bytes(data)


# -- golden files: later versions must read them, this one writes them ---------------------------------------------------------

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["seed", "searched", "signs", "values", "float16"])
def test_golden_files_are_written_byte_for_byte(name):
    assert to_bytes(TICKETS[name]) == (GOLDEN / f"v2_{name}.ticket").read_bytes()


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.name)
def test_golden_files_of_every_version_are_read(path):
    version, _, name = path.stem.partition("_")
    assert version == "v2"
    assert from_bytes(path.read_bytes()) == TICKETS[name]


def test_the_digest_of_a_ticket_is_the_same_everywhere():
    assert small().digest == "f0fa8a5603f0343d9facd9c7f195736fd6cd87090dec9d4c278c22a08fc7e8cc"
