"""Multi-prize lottery tickets: sparse binary versions of any torchvision or timm network.

Public names are imported on first use, so `import mptify` alone imports neither torch nor timm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mptify.config import SearchConfig, TicketConfig
    from mptify.errors import (
        BadConfig,
        BadData,
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
    from mptify.nn.layers import TicketConv1d, TicketConv2d, TicketConv3d, TicketLinear
    from mptify.nn.quantizers import Sign
    from mptify.runtime import load, pack
    from mptify.surgery import (  # type: ignore[no-redef]
        CompositeHandler,
        Handler,
        Plan,
        plan,
        register,
        ticket_layers,
        transform,
    )
    from mptify.surgery.model_summary import Summary, summary
    from mptify.ticket import Ensemble, Ticket, read, save, swap_, ticket_of
    from mptify.training import Callback, Result, SearchMethod, SearchState, StepMetrics, search

__version__ = "0.1.0"

__all__ = [
    "BadConfig", "BadData", "Callback", "CannotConvert", "CannotPickle", "CompositeHandler",
    "DamagedTicket", "Disagreement", "Ensemble", "Handler", "LeftDense", "LostProcess",
    "MptifyError", "NoTorchScript", "NotKept", "NothingToConvert", "Plan", "Result", "RunExists",
    "SearchConfig", "SearchMethod", "SearchState", "Sign", "StepMetrics", "Summary", "Ticket",
    "TicketConfig", "TicketConv1d", "TicketConv2d", "TicketConv3d", "TicketLinear",
    "TicketMismatch", "UnknownModel", "load", "pack", "plan", "read", "register", "save", "search",
    "summary", "swap_", "ticket_layers", "ticket_of", "transform",
]  # fmt: skip

_PLACES = {
    "errors": (
        "BadConfig", "BadData", "CannotConvert", "CannotPickle", "DamagedTicket", "Disagreement",
        "LeftDense", "LostProcess", "MptifyError", "NoTorchScript", "NotKept", "NothingToConvert",
        "RunExists", "TicketMismatch", "UnknownModel",
    ),
    "nn.quantizers": ("Sign",),
    "nn.layers": ("TicketConv1d", "TicketConv2d", "TicketConv3d", "TicketLinear"),
    "config": ("SearchConfig", "TicketConfig"),
    "surgery.model_summary": ("Summary", "summary"),
    "runtime": ("load", "pack"),
    "surgery": (
        "CompositeHandler", "Handler", "Plan", "plan", "register", "ticket_layers", "transform",
    ),
    "ticket": ("Ensemble", "Ticket", "read", "save", "swap_", "ticket_of"),
    "training": ("Callback", "Result", "SearchMethod", "SearchState", "StepMetrics", "search"),
}  # fmt: skip
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}
_PACKAGES = {
    "config",
    "errors",
    "export",
    "models",
    "nn",
    "runtime",
    "surgery",
    "ticket",
    "tools",
    "training",
}


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
