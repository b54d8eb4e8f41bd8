"""mptify: any torchvision or timm network becomes its multi-prize version, a sparse binary ticket."""

from mptify.errors import (
    BadData,
    BadSpec,
    CannotConvert,
    DamagedTicket,
    Disagreement,
    LeftDense,
    MptifyError,
    NothingToConvert,
    RunExists,
    TicketMismatch,
    UnknownModel,
)  # fmt: skip
from mptify.layers import Sign, TicketConv1d, TicketConv2d, TicketConv3d, TicketLinear
from mptify.recipe import SearchSpec
from mptify.reporting import Report, report
from mptify.runtime import pack
from mptify.spec import TicketSpec
from mptify.surgery import Handler, Plan, plan, register, ticket_layers, transform
from mptify.ticket import Deck, Ticket, load, read, save, swap_, ticket_of
from mptify.training import Result, Watcher, search

__version__ = "0.1.0"

__all__ = [
    "BadData", "BadSpec", "CannotConvert", "DamagedTicket", "Deck", "Disagreement", "Handler", "LeftDense", "MptifyError",
    "NothingToConvert", "Plan", "Report", "Result", "RunExists", "SearchSpec", "Sign", "Ticket", "TicketConv1d", "TicketConv2d",
    "TicketConv3d", "TicketLinear", "TicketMismatch", "TicketSpec", "UnknownModel", "Watcher", "load", "pack", "plan", "read", "register",
    "report", "save", "search", "swap_", "ticket_layers", "ticket_of", "transform",
]  # fmt: skip
