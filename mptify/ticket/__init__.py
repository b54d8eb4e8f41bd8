"""The ticket file: which weights survive, in about one bit per weight."""

from mptify.models.registry import Architecture
from mptify.ticket.codec import Ticket, TicketLayer
from mptify.ticket.ensemble import Ensemble
from mptify.ticket.state import read, save, swap_, ticket_of

__all__ = [
    "Architecture",
    "Ensemble",
    "Ticket",
    "TicketLayer",
    "read",
    "save",
    "swap_",
    "ticket_of",
]
