"""Ticket summaries: the size of each mask, and how much two tickets agree."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mptify.errors import TicketMismatch
from mptify.nn.topk import mask_entropy
from mptify.ticket import masks
from mptify.ticket.codec import Ticket, TicketLayer, coded_masks

__all__ = ["LayerOverlap", "MaskSummary", "TicketSummary", "compare", "summarize"]


@dataclass(frozen=True)
class MaskSummary:
    """One mask: its coded size and entropy, and how its density varies over filters."""

    name: str
    shape: tuple[int, ...]
    kept: int
    count: int
    sparsest_filter: float
    densest_filter: float
    coded_bytes: int
    entropy_bytes: float
    coded_as: str
    gain: float

    @property
    def density(self) -> float:
        return self.kept / self.count

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.coded_bytes / self.count


@dataclass(frozen=True)
class TicketSummary:
    """A ticket file: its origin, and what its bytes hold."""

    architecture: str | None
    arguments: dict[str, int]
    config: dict[str, Any]
    notes: dict[str, Any]
    digest: str
    dtype: str
    layers: tuple[MaskSummary, ...]
    weights: int
    kept: int
    floats: int
    stored_floats: int
    file_bytes: int
    mask_bytes: int
    entropy_bytes: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(ticket: Ticket, data: bytes) -> TicketSummary:
    """What `mptify inspect` shows of a ticket and its file."""
    coded = coded_masks(data)
    layers = tuple(_layer(layer, coded[name]) for name, layer in ticket.layers.items())
    built = ticket.architecture
    return TicketSummary(
        architecture=None if built is None else str(built),
        arguments={} if built is None else built.arguments,
        config=ticket.config.model_dump(mode="json"),
        notes=ticket.notes,
        digest=ticket.digest,
        dtype=ticket.dtype,
        layers=layers,
        weights=ticket.count,
        kept=ticket.kept,
        floats=sum(value.size for value in ticket.floats.values()),
        stored_floats=ticket.stored_floats + len(layers),
        file_bytes=len(data),
        mask_bytes=sum(layer.coded_bytes for layer in layers),
        entropy_bytes=sum(layer.entropy_bytes for layer in layers),
    )


def _layer(layer: TicketLayer, blob: bytes) -> MaskSummary:
    filters = layer.mask.reshape(layer.shape[0] if layer.shape else 1, -1).mean(1)
    return MaskSummary(
        name=layer.name,
        shape=layer.shape,
        kept=layer.kept,
        count=layer.size,
        sparsest_filter=float(filters.min()),
        densest_filter=float(filters.max()),
        coded_bytes=len(blob),
        entropy_bytes=mask_entropy(layer.size, layer.kept) / 8,
        coded_as=masks.describe(blob),
        gain=float(np.float32(layer.gain)),
    )


@dataclass(frozen=True)
class LayerOverlap:
    """Two masks of one layer.

    `chance` is the share of the first's survivors that an unrelated mask would keep too.
    """

    name: str
    kept: tuple[int, int]
    both: int
    share: float
    chance: float
    gains: tuple[float, float]


def compare(first: Ticket, second: Ticket) -> list[LayerOverlap]:
    """How many survivors two tickets of one network share, layer by layer."""
    found = []
    for name, one in first.layers.items():
        other = second.layers.get(name)
        if other is None or one.shape != other.shape:
            what = (
                "has no such layer"
                if other is None
                else f"has a layer of shape {other.shape} there, not {one.shape}"
            )
            raise TicketMismatch(
                f"{name}: the second ticket {what}; only tickets of one network can be compared."
            )
        both = int((one.mask & other.mask).sum())
        found.append(
            LayerOverlap(
                name,
                (one.kept, other.kept),
                both,
                both / one.kept,
                other.kept / other.size,
                (one.gain, other.gain),
            )
        )
    extra = [name for name in second.layers if name not in first.layers]
    if extra:
        raise TicketMismatch(
            f"{extra[0]}: the first ticket has no such layer; only tickets of one network can be "
            "compared."
        )
    return found
