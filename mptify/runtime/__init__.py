"""Packed inference: 1/1 tickets on bit planes, where a kept weight costs one addition of 256 pixels, and a pruned one nothing."""

from mptify.runtime.compiler import pack, packed_layers

__all__ = ["pack", "packed_layers"]
