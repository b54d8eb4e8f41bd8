"""Try each behaviour on the tickets of one family.

A behaviour runs on the dense network first. If it fails there, timm does not offer it, and tickets
are not tried.
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
from mptify.tools.zoo_rows import DEFAULT_BITS, PRUNE

__all__ = ["Cell", "Cells", "State", "check_family"]


class State(enum.Enum):
    """The result of a behaviour on a ticket; the value is its mark in the table."""

    WORKS = "●"
    REFUSED = "refused"  # by a MptifyError; the table shows the number of its reason
    NOT_OFFERED = "–"
    FAILED = "✗"


@dataclass(frozen=True)
class Cell:
    """One behaviour of one network in one mode, with the reason where it does not work."""

    state: State
    reason: str = ""


Cells = dict[str, dict[str, Cell]]  # by mode and behaviour


@torch.no_grad()  # some networks cache tensors, which can't be copied with their history
def check_family(name: str) -> Cells:
    """Try every behaviour on one network in both modes.

    Args:
        name: The name of the network in timm.

    Returns:
        The cells of the table. An exception becomes a cell.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # timm deprecates some of its own names
        torch.manual_seed(0)
        dense = _dense_network(name)
        tickets = {bits: _ticket_of(dense, bits, PRUNE[bits]) for bits in DEFAULT_BITS}
        cells: Cells = {bits: {} for bits in DEFAULT_BITS}
        for key, behaviour in BEHAVIOURS.items():
            try:
                expected = behaviour.run(dense)
            except Exception as error:
                for of_mode in cells.values():
                    of_mode[key] = Cell(State.NOT_OFFERED, _text_of(error))
                continue
            for bits, ticket in tickets.items():
                cells[bits][key] = _try(behaviour, ticket, expected)
    gc.collect()  # networks and their graphs form reference cycles
    return cells


def _try(behaviour: Behaviour, ticket: Network, expected: Any) -> Cell:
    try:
        found = behaviour.run(ticket)
    except MptifyError as error:
        where, _, reason = first_line(error).partition(": ")
        return Cell(State.REFUSED, reason or where)
    except Exception as error:
        return Cell(State.FAILED, _text_of(error))
    if found != expected:
        return Cell(State.FAILED, f"returns {found}, timm {expected}")
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
        except TypeError:  # networks that take any size lack the argument
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
