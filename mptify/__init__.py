"""mptify: any torchvision or timm network becomes its multi-prize version, a sparse binary ticket."""

from mptify.errors import BadSpec, CannotConvert, LeftDense, MptifyError, NothingToConvert, UnknownModel
from mptify.layers import Sign, TicketConv1d, TicketConv2d, TicketConv3d, TicketLinear
from mptify.reporting import Report, report
from mptify.spec import TicketSpec
from mptify.surgery import Handler, Plan, plan, register, ticket_layers, transform

__version__ = "0.1.0"

__all__ = [
    "BadSpec", "CannotConvert", "Handler", "LeftDense", "MptifyError", "NothingToConvert", "Plan", "Report", "Sign", "TicketConv1d",
    "TicketConv2d", "TicketConv3d", "TicketLinear", "TicketSpec", "UnknownModel", "plan", "register", "report", "ticket_layers",
    "transform",
]  # fmt: skip
