"""Kernel selection: the cheapest candidate of all registered kernels."""

from __future__ import annotations

from dataclasses import replace

from mptify.registry import kernels
from mptify.runtime.fusion import Pattern
from mptify.runtime.kernel import Candidate, Kernel
from mptify.runtime.kernels.max_pool import MaxPool
from mptify.runtime.lane_fusion import LanePattern

__all__ = ["select_kernel", "select_lane_kernel"]


def select_lane_kernel(pattern: LanePattern) -> Candidate | None:
    """The kernel for a pattern on lanes; None if torch is estimated to be faster."""
    return min(_candidates(pattern, on_lanes=True), key=lambda one: one.cost, default=None)


def select_kernel(pattern: Pattern) -> tuple[Kernel, MaxPool | None] | None:
    """The kernel for a pattern, and the one for its max-pool; None if no kernel can compute it."""
    pattern = replace(pattern)  # a copy: the weights that it caches are freed with it
    candidates = _candidates(pattern, on_lanes=False)
    if not candidates or (pattern.pool is not None and pattern.thresholds is None):
        return None
    kernel = min(candidates, key=lambda candidate: candidate.cost).make()
    if pattern.pool is None:
        return kernel, None
    assert pattern.thresholds is not None
    return kernel, MaxPool.of(pattern.pool, pattern.thresholds.falling)


def _candidates(pattern: Pattern | LanePattern, *, on_lanes: bool) -> list[Candidate]:
    known = [kernel for kernel in kernels.all().values() if on_lanes == kernel.ON_LANES]
    found = [kernel.candidate(pattern) for kernel in known if kernel.matches(pattern)]
    return [candidate for candidate in found if candidate is not None]
