"""mptify: any torchvision or timm network becomes its multi-prize version, a sparse binary ticket."""

from mptify.errors import BadSpec, CannotConvert, DamagedTicket, LeftDense, MptifyError, NothingToConvert, TicketMismatch, UnknownModel
from mptify.layers import Sign, TicketConv1d, TicketConv2d, TicketConv3d, TicketLinear
from mptify.reporting import Report, report
from mptify.spec import TicketSpec
from mptify.surgery import Handler, Plan, plan, register, ticket_layers, transform
from mptify.ticket import Deck, Ticket, load, read, save, swap_, ticket_of

__version__ = "0.1.0"

__all__ = [
    "BadSpec", "CannotConvert", "DamagedTicket", "Deck", "Handler", "LeftDense", "MptifyError", "NothingToConvert", "Plan", "Report",
    "Sign", "Ticket", "TicketConv1d", "TicketConv2d", "TicketConv3d", "TicketLinear", "TicketMismatch", "TicketSpec", "UnknownModel",
    "load", "plan", "read", "register", "report", "save", "swap_", "ticket_layers", "ticket_of", "transform",
]  # fmt: skip
