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
    """An ensemble whose members share the memory of one network: `forward` deals each ticket in turn and averages.

    A member adds nothing but its file's bytes. The average is that of the members' class probabilities, as logarithms.

        ensemble = mptify.Ensemble(mptify.load("a.ticket"), paths)
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
        """Bytes that the members add to the backbone."""
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
