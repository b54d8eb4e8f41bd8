"""Encode tickets as bytes, and decode them. docs/format.md specifies the format.

This module never handles an `nn.Module`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import safetensors.numpy

from mptify.config import TicketConfig, make_config
from mptify.errors import BadConfig, DamagedTicket
from mptify.models.registry import Architecture
from mptify.nn import init
from mptify.ticket import masks

__all__ = ["Ticket", "TicketLayer", "as_json", "coded_masks", "from_bytes", "to_bytes"]

KEY, VERSION = "mptify", 2
MOST_HEADER = 1 << 24  # bytes of JSON, a hundred times what the largest network needs
# A file may describe tensors filled with one number: one has at most so many numbers, and all
# together have at most so many.
MOST_CONSTANT, MOST_DESCRIBED = 1 << 20, 1 << 24
# A file may describe at most so many weights, plus so many for each of its bytes.
MOST_WEIGHTS, WEIGHTS_PER_BYTE = 1 << 26, 256
# Settings that came after format 2. At their default they are not written, so that older files and
# their digests stay what they are.
_LATER_SETTINGS = ("learn_clip",)
_MOST_ARGUMENT = {"num_classes": 1 << 17, "in_chans": 1 << 10, "input_size": 1 << 12}
MOST_DIMENSIONS, MOST_SIZE, MOST_NAME = 8, 1 << 31, 512
SECTIONS = {
    "masks": ("uint8",),
    "gains": ("float32",),
    "floats": ("float16", "float32", "float64"),
    "signs": ("uint8",),
    "values": ("float32",),
}
_KEYS = {
    "version",
    "config",
    "architecture",
    "dtype",
    "layers",
    "floats",
    "float_bytes",
    "constants",
    "notes",
    "sha256",
}
_DTYPES = ("float16", "bfloat16", "float32", "float64")


class _Bits:
    """A field of booleans that takes one bit each in memory; reading it unpacks a new array."""

    def __get__(self, layer: Any, owner: Any = None) -> np.ndarray:
        if layer is None:
            raise AttributeError("a field without a default")
        return (
            np.unpackbits(layer.bits, count=layer.size, bitorder="little")
            .view(bool)
            .reshape(layer.shape)
        )

    def __set__(self, layer: Any, mask: np.ndarray) -> None:
        kept = int(np.count_nonzero(mask))
        vars(layer).update(
            bits=np.packbits(mask, bitorder="little"), shape=mask.shape, size=mask.size, kept=kept
        )


@dataclass(frozen=True, eq=False)
class TicketLayer:
    """The survivors of one layer.

    Attributes:
        name: The layer's name.
        mask: Which weights survive. It is stored as bits, and unpacked whenever it is read.
        gain: The scale of 1-bit weights; for 32-bit weights drawn from the seed, their standard
            deviation.
        signs: For the survivors in flat order, True where negative; None if the seed determines
            them.
        values: The survivors' 32-bit weights in flat order; None if the seed determines them.
    """

    name: str
    mask: np.ndarray = _Bits()  # type: ignore[assignment]
    gain: float = 1.0
    signs: np.ndarray | None = None
    values: np.ndarray | None = None

    if TYPE_CHECKING:  # set with the mask
        bits: ClassVar[np.ndarray]
        shape: ClassVar[tuple[int, ...]]
        size: ClassVar[int]
        kept: ClassVar[int]

    def __repr__(self) -> str:
        return f"TicketLayer({self.name!r}, {self.shape}, kept={self.kept:,}, gain={self.gain:.4g})"

    def weights(self, config: TicketConfig) -> np.ndarray:
        """Frozen weights that give the ticket's effective weight; pruned ones are arbitrary."""
        if self.values is not None:
            full = np.zeros(self.shape, np.float32)
            full[self.mask] = self.values
            return full
        if config.weight_bits == 32:
            return init.frozen_weight(config.seed, self.name, self.shape, config.init, self.gain)
        return np.array([self.gain, -self.gain], np.float32).take(
            self.negative(config.seed).view(np.uint8)
        )

    def negative(self, seed: int) -> np.ndarray:
        """Where the frozen weight is negative; arbitrary for pruned weights."""
        if self.signs is None and self.values is None:
            return init.signs(seed, self.name, self.size).reshape(self.shape)
        full = np.zeros(self.shape, bool)
        full[self.mask] = self.signs if self.signs is not None else np.signbit(self.values)  # type: ignore[arg-type]
        return full


@dataclass(frozen=True, eq=False)
class Ticket:
    """A ticket as plain data: masks, gains, learned floats, and how to rebuild the rest.

    Two tickets are equal if all of their content is.
    """

    config: TicketConfig
    layers: dict[str, TicketLayer]
    floats: dict[str, np.ndarray] = field(default_factory=dict)
    architecture: Architecture | None = None
    dtype: str = "float32"
    constants: str = (
        ""  # SHA-256 of the network's integer buffers, which are part of the architecture
    )
    # Further information: recipe, accuracy, data.
    notes: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        made = f"{self.architecture or 'a module'}, {self.config.bits}"
        return f"Ticket({made}, {len(self.layers)} layers, {self.kept:,} of {self.count:,} weights)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ticket) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal."""
        return _digest(_description(self), self)

    @property
    def count(self) -> int:
        return sum(layer.size for layer in self.layers.values())

    @property
    def kept(self) -> int:
        return sum(layer.kept for layer in self.layers.values())

    @property
    def stored_floats(self) -> int:
        """How many numbers the file stores; filled tensors are described instead."""
        return sum(value.size for value in self.floats.values() if _constant(value) is None)


# -- to bytes --------------------------------------------------------------------------------------


def to_bytes(ticket: Ticket) -> bytes:
    """The bytes of the ticket's file; equal tickets give equal bytes."""
    _check_arrays(ticket)
    blobs = [
        masks.encode(layer.mask, _levels(layer, ticket.config)) for layer in ticket.layers.values()
    ]
    sections = {
        "masks": np.frombuffer(b"".join(blobs), np.uint8),
        "gains": np.array([layer.gain for layer in ticket.layers.values()], "<f4"),
        "floats": _joined(
            [value.reshape(-1) for value in ticket.floats.values() if _constant(value) is None],
            ticket,
        ),
        "signs": _joined_signs(ticket),
        "values": np.concatenate(
            [
                np.zeros(0, "<f4"),
                *(one.values for one in ticket.layers.values() if one.values is not None),
            ]
        ),
    }
    description = _description(ticket)
    digest = _digest(description, ticket)
    layers = [[*row, len(blob)] for row, blob in zip(description["layers"], blobs, strict=True)]
    description |= {"layers": layers, "sha256": digest}
    data = safetensors.numpy.save(
        {name: value for name, value in sections.items() if value.size}, {KEY: as_json(description)}
    )
    try:
        found, _ = _parse(data)
    except DamagedTicket as error:
        raise BadConfig(
            f"This ticket can't be written, since no reader would accept it: {error}"
        ) from None
    assert all(
        np.array_equal(found.layers[name].bits, layer.bits) for name, layer in ticket.layers.items()
    )
    return data


def _levels(layer: TicketLayer, config: TicketConfig) -> masks.Levels | None:
    """The levels of the initial scores, unless the file must be readable without a generator."""
    if config.init != "keep" and _origin(layer) != "seed":
        return None
    return functools.partial(init.score_levels, config.seed, layer.name, layer.size)


def _check_arrays(ticket: Ticket) -> None:
    for layer in ticket.layers.values():
        if not (math.isfinite(layer.gain) and layer.gain >= 0):
            raise BadConfig(
                f"{layer.name}: its gain is {layer.gain}, and a ticket's gains are finite."
            )
        for survivors in (layer.signs, layer.values):
            if survivors is not None and survivors.size != layer.kept:
                raise BadConfig(
                    f"{layer.name}: {survivors.size} signs or values for {layer.kept} survivors."
                )


def _joined(values: list[np.ndarray], ticket: Ticket) -> np.ndarray:
    kinds = {value.dtype for value in ticket.floats.values()}
    if len(kinds) > 1:
        raise BadConfig(
            "A ticket's floats are all of one type, and these are "
            f"{sorted(str(kind) for kind in kinds)}."
        )
    return np.concatenate(values) if values else np.zeros(0, "<f4")


def _joined_signs(ticket: Ticket) -> np.ndarray:
    packed = [
        np.packbits(one.signs, bitorder="little")
        for one in ticket.layers.values()
        if one.signs is not None
    ]
    return np.concatenate(packed) if packed else np.zeros(0, np.uint8)


def _constant(value: np.ndarray) -> float | None:
    """The number that a tensor is filled with, if it is."""
    if not 0 < value.size <= MOST_CONSTANT or (
        value.tobytes() != value.reshape(-1)[:1].tobytes() * value.size
    ):
        return None
    number = float(value.reshape(-1)[0])
    return number if math.isfinite(number) else None


def _description(ticket: Ticket) -> dict[str, Any]:
    """The description without lengths and digest."""
    floats: list[list[Any]] = []
    for name, value in ticket.floats.items():
        constant = _constant(value)
        floats.append([name, list(value.shape)] + ([] if constant is None else [constant]))
    kinds = {value.dtype.itemsize for value in ticket.floats.values()} or {4}
    built = ticket.architecture
    return {
        "version": VERSION,
        "config": config_as_json(ticket.config),
        "architecture": None
        if built is None
        else {"source": built.source, "name": built.name, "arguments": built.arguments},
        "dtype": ticket.dtype,
        "layers": [
            [layer.name, list(layer.shape), layer.kept, _origin(layer)]
            for layer in ticket.layers.values()
        ],
        "floats": floats,
        "float_bytes": kinds.pop(),
        "constants": ticket.constants,
        "notes": ticket.notes,
    }


def config_as_json(config: TicketConfig) -> dict[str, Any]:
    """The settings as the description holds them."""
    plain = json.loads(config.model_dump_json())
    for name in _LATER_SETTINGS:
        if plain[name] == TicketConfig.model_fields[name].default:
            del plain[name]
    # Their order matters, which a JSON object does not keep.
    return plain | {"prune_overrides": [list(pair) for pair in plain["prune_overrides"].items()]}


def _origin(layer: TicketLayer) -> str:
    return (
        "seed"
        if layer.signs is None and layer.values is None
        else "signs"
        if layer.values is None
        else "values"
    )


def as_json(value: Any) -> str:
    """The canonical JSON of a value.

    Raises:
        TypeError, ValueError: JSON cannot represent it.
    """
    return json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
    )


def _digest(description: Mapping[str, Any], ticket: Ticket) -> str:
    """The digest: of the description, then of each layer, then of the floats."""
    whole = hashlib.sha256(as_json(description).encode())
    for layer in ticket.layers.values():
        mask = layer.mask.reshape(-1)
        whole.update(layer.bits.tobytes())
        whole.update(
            np.packbits(
                layer.negative(ticket.config.seed).reshape(-1)[mask], bitorder="little"
            ).tobytes()
        )
        whole.update(np.array(layer.gain, "<f4").tobytes())
        if layer.values is not None:
            whole.update(layer.values.astype("<f4").tobytes())
    for value in ticket.floats.values():
        whole.update(value.astype(value.dtype.newbyteorder("<")).tobytes())
    return whole.hexdigest()


# -- and back --------------------------------------------------------------------------------------


def from_bytes(data: bytes) -> Ticket:
    """The ticket in a file.

    Raises:
        DamagedTicket: It is not a valid ticket.
    """
    ticket, description = _parse(data)
    if description["sha256"] != _digest(_without_lengths(description), ticket):
        raise DamagedTicket(
            "The file is damaged: its content is not what was written (its SHA-256 differs)."
        )
    return ticket


def _parse(data: bytes) -> tuple[Ticket, dict[str, Any]]:
    """The ticket and description of a file; the digest is not checked yet."""
    description = _read_description(data)
    sections = _read_sections(data)
    config = read_config(description["config"])
    ticket = Ticket(
        config=config,
        layers=_read_layers(
            description["layers"], sections, config, MOST_WEIGHTS + WEIGHTS_PER_BYTE * len(data)
        ),
        floats=_read_floats(description["floats"], description["float_bytes"], sections),
        architecture=read_architecture(description["architecture"]),
        dtype=_expect(
            description["dtype"], str, lambda dtype: dtype in _DTYPES, "a type of floats"
        ),
        constants=_expect(
            description["constants"],
            str,
            lambda text: re.fullmatch("([0-9a-f]{64})?", text),
            "a digest",
        ),
        notes=_expect(description["notes"], dict, lambda notes: True, "notes"),
    )
    if any(sections.values()):
        raise DamagedTicket("The file holds more than it describes.")
    if as_json(_without_lengths(description)) != as_json(_description(ticket)):
        raise DamagedTicket("The file's description is not in canonical form.")
    return ticket, description


def coded_masks(data: bytes) -> dict[str, bytes]:
    """The coded mask of each layer of a valid file."""
    section = _read_sections(data)["masks"]
    return {row[0]: bytes(section.take(row[-1])) for row in _read_description(data)["layers"]}


def _without_lengths(description: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in description.items() if key != "sha256"}
    return plain | {"layers": [row[:-1] for row in description["layers"]]}


def read_metadata(data: bytes) -> dict[str, dict[str, Any]]:
    """The metadata of a safetensors file, by key; `data` is the file or its beginning."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, MOST_HEADER):
        raise DamagedTicket("This is not a ticket, or a truncated one (not a safetensors file).")
    metadata = _parsed(data[8 : 8 + length]).get("__metadata__")
    texts = metadata.items() if isinstance(metadata, dict) else ()
    return {
        key: _parsed(text.encode())
        for key, text in texts
        if key.startswith("mptify") and isinstance(text, str)
    }


def _read_description(data: bytes) -> dict[str, Any]:
    found = read_metadata(data)
    if KEY not in found:
        raise DamagedTicket(
            "This is a packed file, not a ticket: `mptify predict` and mptify.load run it."
            if found
            else "This is a safetensors file, but not a ticket."
        )
    description = found[KEY]
    version = description.get("version")
    if type(version) is int and version > VERSION:
        raise DamagedTicket(
            f"This ticket has format version {version}, and this mptify reads up to {VERSION}; a "
            "newer mptify will read it."
        )
    if type(version) is int and version < VERSION:
        raise DamagedTicket(
            f"This ticket has format version {version}, from before the first release, and this "
            f"mptify reads version {VERSION}; "
            "search or convert it again."
        )
    if set(description) != _KEYS or type(version) is not int:
        raise DamagedTicket(
            f"The file's description lacks or adds something: {sorted(set(description) ^ _KEYS)}."
        )
    return description


def _parsed(text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        parsed = json.loads(text.decode(), object_pairs_hook=once, parse_constant=no_constant)
        as_json(parsed).encode()  # json reads 1e999 and lone surrogates, but cannot write them
    except (ValueError, RecursionError) as error:
        raise DamagedTicket(f"The file's description can't be read: {error}.") from None
    if not isinstance(parsed, dict):
        raise DamagedTicket("The file's description is not a JSON object.")
    return parsed


class _Section:
    """Bytes that are read from front to back; true while some are left."""

    def __init__(self, values: np.ndarray):
        self.data, self.dtype, self.at = memoryview(values.tobytes()), values.dtype, 0

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise DamagedTicket("The file ends before what it describes does.")
        self.at += count
        return self.data[self.at - count : self.at]

    def __bool__(self) -> bool:
        return self.at < len(self.data)


def _read_sections(data: bytes) -> dict[str, _Section]:
    try:
        found = safetensors.numpy.load(data)
    except (
        safetensors.SafetensorError,
        ValueError,
        KeyError,
        TypeError,
    ) as error:  # the last two for types that NumPy lacks
        raise DamagedTicket(f"This is not a complete safetensors file: {error}.") from None
    for name, values in found.items():
        if str(values.dtype) not in SECTIONS.get(name, ()) or values.ndim != 1:
            raise DamagedTicket(
                f"The file holds {name[:60]!r}, which is not part of a ticket, or has the wrong "
                "type."
            )
    return {name: _Section(found.get(name, np.zeros(0, np.uint8))) for name in SECTIONS}


def _expect(value: Any, kind: type, holds: Any, what: str) -> Any:
    if type(value) is not kind or not holds(value):
        raise DamagedTicket(
            f"The file's description has {str(value)[:60]!r} where {what} should be."
        )
    return value


def read_config(value: Any) -> TicketConfig:
    _expect(value, dict, lambda value: isinstance(value.get("prune_overrides"), list), "settings")
    pairs = [
        _expect(pair, list, lambda pair: len(pair) == 2 and isinstance(pair[0], str), "a pattern")
        for pair in value["prune_overrides"]
    ]
    try:
        return make_config(value | {"prune_overrides": dict(pairs)})
    except BadConfig as error:
        raise DamagedTicket(f"The file's settings are invalid: {error}") from None


def _read_name(value: Any, taken: Mapping[str, Any]) -> str:
    return _expect(
        value,
        str,
        lambda name: len(name) <= MOST_NAME and name.isprintable() and name not in taken,
        "a new name",
    )


def _read_shape(value: Any) -> tuple[int, ...]:
    _expect(value, list, lambda shape: len(shape) <= MOST_DIMENSIONS, "a shape")
    shape = tuple(
        _expect(size, int, lambda size: 0 <= size < MOST_SIZE, "a size") for size in value
    )
    _expect(
        math.prod(max(size, 1) for size in shape),
        int,
        lambda count: count < 1 << 40,
        "a number of values",
    )
    return shape


def _read_layers(
    rows: Any, sections: dict[str, _Section], config: TicketConfig, most: int
) -> dict[str, TicketLayer]:
    layers: dict[str, TicketLayer] = {}
    origins = {"values" if config.weight_bits == 32 else "signs"} | (
        set() if config.init == "keep" else {"seed"}
    )
    for row in _expect(rows, list, lambda rows: len(rows) > 0, "a list of layers"):
        _expect(row, list, lambda row: len(row) == 5, "a layer")
    if sum(math.prod(_read_shape(row[1])) for row in rows) > most:
        raise DamagedTicket("So many weights can't come from so small a file.")
    for name, shape, kept, origin, length in rows:
        name, shape = _read_name(name, layers), _read_shape(shape)
        _expect(kept, int, lambda kept: 1 <= kept <= math.prod(shape), "a number of survivors")  # noqa: B023
        blob = bytes(
            sections["masks"].take(_expect(length, int, lambda length: length > 0, "a length"))
        )
        gain = float(np.frombuffer(sections["gains"].take(4), "<f4")[0])
        _expect(gain, float, lambda gain: math.isfinite(gain) and gain >= 0, "a gain")
        _expect(origin, str, lambda origin: origin in origins, "an origin of weights")
        signs = _read_signs(sections["signs"], kept) if origin == "signs" else None
        values = (
            np.frombuffer(sections["values"].take(4 * kept), "<f4") if origin == "values" else None
        )
        try:
            levels = functools.partial(init.score_levels, config.seed, name, math.prod(shape))
            layers[name] = TicketLayer(
                name, masks.decode(blob, shape, kept, levels), gain, signs, values
            )
        except DamagedTicket as error:
            raise DamagedTicket(f"{name}: {error}.") from None
    return layers


def _read_signs(section: _Section, kept: int) -> np.ndarray:
    return masks.unpack(np.frombuffer(section.take(-(-kept // 8)), np.uint8), kept)


def _read_floats(rows: Any, itemsize: Any, sections: dict[str, _Section]) -> dict[str, np.ndarray]:
    section = sections["floats"]
    kind = np.dtype(
        {2: "<f2", 4: "<f4", 8: "<f8"}[
            _expect(itemsize, int, lambda size: size in (2, 4, 8), "bytes per float")
        ]
    )
    if section and section.dtype != kind:
        raise DamagedTicket("The file's floats have another type than described.")
    floats: dict[str, np.ndarray] = {}
    described = 0
    for row in _expect(rows, list, lambda rows: True, "a list of floats"):
        _expect(row, list, lambda row: len(row) in (2, 3), "a tensor's name and shape")
        name, shape = _read_name(row[0], floats), _read_shape(row[1])
        if len(row) == 3:
            _expect(row[2], float, math.isfinite, "a number")
            described += math.prod(shape)
            if described > MOST_DESCRIBED:
                raise DamagedTicket(
                    f"{name}: the file describes more equal numbers than any network has."
                )
            with np.errstate(over="ignore"):
                floats[name] = np.full(shape, row[2], kind)
        else:
            floats[name] = np.frombuffer(
                section.take(kind.itemsize * math.prod(shape)), kind
            ).reshape(shape)
    return floats


def read_architecture(value: Any) -> Architecture | None:
    if value is None:
        return None
    _expect(
        value, dict, lambda value: set(value) == {"source", "name", "arguments"}, "an architecture"
    )
    source = _expect(
        value["source"],
        str,
        lambda source: source in ("timm", "torchvision", "mptify"),
        "a source of models",
    )
    name = _expect(
        value["name"],
        str,
        lambda name: re.fullmatch(r"\w[\w.]{0,200}", name, re.ASCII),
        "a model's name",
    )
    arguments = _expect(
        value["arguments"], dict, lambda given: set(given) <= set(_MOST_ARGUMENT), "arguments"
    )
    for key, argument in arguments.items():
        _expect(argument, int, lambda number: 1 <= number <= _MOST_ARGUMENT[key], "a number")  # noqa: B023
    return Architecture(source, name, arguments)
