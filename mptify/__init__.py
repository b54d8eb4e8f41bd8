"""mptify: any torchvision or timm network becomes its multi-prize version, a sparse binary ticket.

Public names are imported when they are first used, so that the program answers before torch is there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mptify.models.in_timm import offer_to_timm

if TYPE_CHECKING:
    from mptify.config import SearchSpec, TicketSpec
    from mptify.errors import (
        BadData,
        BadSpec,
        CannotConvert,
        CannotPickle,
        DamagedTicket,
        Disagreement,
        LeftDense,
        LostProcess,
        MptifyError,
        NothingToConvert,
        NotKept,
        NoTorchScript,
        RunExists,
        TicketMismatch,
        UnknownModel,
    )
    from mptify.nn.layers import Sign, TicketConv1d, TicketConv2d, TicketConv3d, TicketLinear
    from mptify.runtime import load, pack
    from mptify.surgery import Handler, Plan, plan, register, ticket_layers, transform  # type: ignore[no-redef]
    from mptify.surgery.model_summary import Report, report
    from mptify.ticket import Deck, Ticket, read, save, swap_, ticket_of
    from mptify.training import Result, Watcher, search

__version__ = "0.1.0"

__all__ = [
    "BadData", "BadSpec", "CannotConvert", "CannotPickle", "DamagedTicket", "Deck", "Disagreement", "Handler", "LeftDense",
    "LostProcess", "MptifyError", "NoTorchScript", "NotKept", "NothingToConvert", "Plan", "Report", "Result", "RunExists", "SearchSpec",
    "Sign", "Ticket", "TicketConv1d", "TicketConv2d", "TicketConv3d", "TicketLinear", "TicketMismatch", "TicketSpec", "UnknownModel",
    "Watcher", "load", "pack", "plan", "read", "register", "report", "save", "search", "swap_", "ticket_layers", "ticket_of",
    "transform",
]  # fmt: skip

_PLACES = {
    "errors": (
        "BadData", "BadSpec", "CannotConvert", "CannotPickle", "DamagedTicket", "Disagreement", "LeftDense", "LostProcess", "MptifyError",
        "NoTorchScript", "NotKept", "NothingToConvert", "RunExists", "TicketMismatch", "UnknownModel",
    ),
    "nn.layers": ("Sign", "TicketConv1d", "TicketConv2d", "TicketConv3d", "TicketLinear"),
    "config": ("SearchSpec", "TicketSpec"),
    "surgery.model_summary": ("Report", "report"),
    "runtime": ("load", "pack"),
    "surgery": ("Handler", "Plan", "plan", "register", "ticket_layers", "transform"),
    "ticket": ("Deck", "Ticket", "read", "save", "swap_", "ticket_of"),
    "training": ("Result", "Watcher", "search"),
}  # fmt: skip
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}
_PACKAGES = {"config", "errors", "export", "models", "nn", "runtime", "surgery", "ticket", "tools", "training"}


def __getattr__(name: str) -> Any:
    if name in _PLACE_OF:
        found = getattr(importlib.import_module(f"mptify.{_PLACE_OF[name]}"), name)
        globals()[name] = found
        return found
    if name in _PACKAGES:
        return importlib.import_module(f"mptify.{name}")
    raise AttributeError(f"module 'mptify' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


offer_to_timm()
