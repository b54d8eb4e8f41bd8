import torch
from torch import nn
from torch.nn import functional as F

import mptify


class Gated(nn.Module):
    """Two linear maps of one input; one gates the other."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.value = nn.Parameter(torch.randn(width, width))
        self.gate = nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        return F.linear(x, self.value) * F.linear(x, self.gate).sigmoid()


class TicketGated(Gated):
    value = gate = None  # each is a ticket now

    def forward(self, x):
        value = self.value_ticket.run("linear", x, None)
        return value * self.gate_ticket.run("linear", x, None).sigmoid()


def convert_(module, tickets, quantizers):
    for name, ticket in tickets.items():
        del module._parameters[name]
        module.add_module(f"{name}_ticket", ticket)
    module.__class__ = TicketGated


@mptify.register(Gated)
def describe(layer):
    weights = {"value": ("x",), "gate": ("x",)}
    return mptify.CompositeHandler(weights=weights, outputs=layer.width, convert_=convert_)


ticketed = mptify.transform(nn.Sequential(nn.Linear(4, 8), Gated(8)), bits="1/1", prune=0.5)
print(list(mptify.ticket_layers(ticketed)))
print(ticketed(torch.randn(2, 4)).shape)
