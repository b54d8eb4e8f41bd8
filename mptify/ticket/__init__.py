"""The ticket file: which weights survive, in about one bit per weight."""

from mptify.ticket.deck import Deck
from mptify.ticket.format import Architecture, Ticket, TicketLayer
from mptify.ticket.loading import load
from mptify.ticket.store import read, save, swap_, ticket_of

__all__ = ["Architecture", "Deck", "Ticket", "TicketLayer", "load", "read", "save", "swap_", "ticket_of"]
