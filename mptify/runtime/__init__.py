"""Ticket files become networks that run: float modules, or packed programs on bit planes."""

from mptify.runtime.compiler import pack, packed_layers
from mptify.runtime.loading import load

__all__ = ["load", "pack", "packed_layers"]
