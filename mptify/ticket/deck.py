"""Several tickets on one backbone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mptify.errors import BadSpec
from mptify.ticket.format import Ticket, from_bytes, to_bytes
from mptify.ticket.store import swap_

__all__ = ["Deck"]


class Deck(nn.Module):
    """An ensemble whose members share the memory of one network: `forward` deals each ticket in turn and averages.

    A member adds nothing but its file's bytes. The average is that of the members' class probabilities, as logarithms.

        deck = mptify.Deck(mptify.load("a.ticket"), [mptify.read(path) for path in paths])
    """

    def __init__(self, model: nn.Module, tickets: Iterable[Ticket]):
        super().__init__()
        self.model = model
        self.members = [to_bytes(ticket) for ticket in tickets]
        if not self.members:
            raise BadSpec("A deck needs at least one ticket.")

    def __len__(self) -> int:
        return len(self.members)

    @property
    def size(self) -> int:
        """Bytes that the members add to the backbone."""
        return sum(map(len, self.members))

    def forward(self, *inputs: Any) -> Tensor:
        if self.model.training:
            raise BadSpec("A deck predicts; call eval() first.")
        total: Any = None
        for member in self.members:
            swap_(self.model, from_bytes(member))
            chances = torch.log_softmax(self.model(*inputs).float(), dim=-1)
            total = chances if total is None else torch.logaddexp(total, chances)
        return total - torch.log(torch.tensor(float(len(self))))
