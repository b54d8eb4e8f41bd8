"""One family: its dense network, its tickets, and how each behaviour fares on them.

Each behaviour is tried on the dense network first: what timm does not offer there is not asked of a
ticket.
"""

from __future__ import annotations

import enum
import gc
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mptify.errors import MptifyError, first_line
from mptify.surgery import transform
from mptify.tools.compatibility.behaviours import BEHAVIOURS, Behaviour, Network, outputs_of
from mptify.tools.compatibility.families import FAMILIES, IMAGE_SIZES
from mptify.tools.zoo_check import MODES

__all__ = ["Cell", "Cells", "State", "check_family"]


class State(enum.Enum):
    """How a behaviour fares on a ticket; the value is its mark in the table."""

    WORKS = "●"
    REFUSED = "refused"  # by an error of ours; the table has the number of its reason
    NOT_OFFERED = "–"
    FAILED = "✗"


@dataclass(frozen=True)
class Cell:
    """One behaviour of one network in one mode, with the reason where it does not work."""

    state: State
    reason: str = ""


Cells = dict[str, dict[str, Cell]]  # by mode and behaviour


@torch.no_grad()  # some networks cache what they compute, and can't be copied with its history
def check_family(name: str) -> Cells:
    """Try every behaviour on one network in both modes. What a behaviour raises becomes a cell."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # timm deprecates some of its own names
        torch.manual_seed(0)
        dense = _dense_network(name)
        tickets = {bits: _ticket_of(dense, bits, prune) for bits, prune in MODES.items()}
        cells: Cells = {bits: {} for bits in MODES}
        for key, one in BEHAVIOURS.items():
            try:
                expected = one.run(dense)
            except Exception as error:
                for of_mode in cells.values():
                    of_mode[key] = Cell(State.NOT_OFFERED, _text_of(error))
                continue
            for bits, ticket in tickets.items():
                cells[bits][key] = _try(one, ticket, expected)
    gc.collect()  # networks hang in cycles with their graphs
    return cells


def _try(one: Behaviour, ticket: Network, expected: Any) -> Cell:
    try:
        found = one.run(ticket)
    except MptifyError as error:
        where, _, reason = first_line(error).partition(": ")
        return Cell(State.REFUSED, reason or where)
    except Exception as error:
        return Cell(State.FAILED, _text_of(error))
    if found != expected:
        return Cell(State.FAILED, f"gives {found}, timm {expected}")
    return Cell(State.WORKS)


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _dense_network(name: str) -> Network:
    import timm

    size = IMAGE_SIZES.get(name, 64)

    def build(**options: Any) -> Any:
        options = {"num_classes": 10, **FAMILIES[name], **options}
        sized: dict[str, Any] = {"img_size": size} if size else {}
        try:
            return timm.create_model(name, **options, **sized).eval()
        except TypeError:  # a network that takes any size has no such argument
            return timm.create_model(name, **options).eval()

    model = build()
    size = size or model.pretrained_cfg["input_size"][-1]
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    modules = model.named_modules()
    layers = [path for path, one in modules if isinstance(one, (nn.Conv2d, nn.Linear))]
    calls = {path: len(outputs) for path, outputs in outputs_of(model, layers, images).items()}
    return Network(model, images, calls, build, lambda one: one)


def _ticket_of(dense: Network, bits: str, prune: float) -> Network:
    def convert(model: nn.Module) -> nn.Module:
        return transform(model, bits=bits, prune=prune, init="keep")

    return Network(convert(dense.model).eval(), dense.images, dense.calls, dense.build, convert)
