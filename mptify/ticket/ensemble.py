"""Several tickets on one backbone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mptify.errors import BadConfig, shown
from mptify.ticket.codec import Ticket, from_bytes, to_bytes
from mptify.ticket.state import read, require_match, swap_

__all__ = ["Ensemble"]


class Ensemble(nn.Module):
    """Several tickets that share the memory of one network.

    `forward` puts each ticket into the network in turn, and averages the class probabilities; it
    returns their logarithms. A member costs only the bytes of its file.

    Args:
        model: A ticket model.
        tickets: Tickets of this network, or their files.

    Raises:
        BadConfig: There is no ticket.
        TicketMismatch: A ticket is of another network.

    Example:
        ensemble = mptify.Ensemble(mptify.load("a.ticket"), ["a.ticket", "b.ticket"]).eval()
    """

    def __init__(self, model: nn.Module, tickets: Iterable[Ticket | str | Path]):
        super().__init__()
        if not isinstance(tickets, Iterable) or isinstance(tickets, (str, Path)):
            raise BadConfig(
                f"An ensemble needs a list of tickets or of their files, not {shown(tickets)}."
            )
        dealt = [read(ticket) if isinstance(ticket, (str, Path)) else ticket for ticket in tickets]
        if not dealt:
            raise BadConfig("An ensemble needs at least one ticket.")
        for ticket in dealt:
            require_match(model, ticket)
        self.model = model
        self.members = [to_bytes(ticket) for ticket in dealt]

    def __len__(self) -> int:
        return len(self.members)

    @property
    def size(self) -> int:
        """The bytes that all members take in addition to the network."""
        return sum(map(len, self.members))

    def forward(self, *inputs: Any) -> Tensor:
        if self.model.training:
            raise BadConfig("An ensemble predicts; call eval() first.")
        total: Any = None
        for member in self.members:
            swap_(self.model, from_bytes(member))
            chances = torch.log_softmax(self.model(*inputs).float(), dim=-1)
            total = chances if total is None else torch.logaddexp(total, chances)
        return total - torch.log(torch.tensor(float(len(self))))
