"""Kernel selection: the cheapest candidate of all registered kernels."""

from __future__ import annotations

from dataclasses import replace

from mptify.registry import kernels
from mptify.runtime.fusion import Pattern
from mptify.runtime.kernel import Kernel
from mptify.runtime.kernels.max_pool import MaxPool

__all__ = ["select_kernel"]


def select_kernel(pattern: Pattern) -> tuple[Kernel, MaxPool | None] | None:
    """The kernel for a pattern, and the one for its max-pool; None if no kernel can compute it."""
    pattern = replace(pattern)  # a copy: the weights that it caches are freed with it
    matching = [kernel for kernel in kernels.all().values() if kernel.matches(pattern)]
    if not matching or (pattern.pool is not None and pattern.thresholds is None):
        return None
    found = [kernel.candidate(pattern) for kernel in matching]
    candidates = [candidate for candidate in found if candidate is not None]
    if not candidates:
        return None
    kernel = min(candidates, key=lambda candidate: candidate.cost).make()
    if pattern.pool is None:
        return kernel, None
    assert pattern.thresholds is not None
    return kernel, MaxPool.of(pattern.pool, pattern.thresholds.falling)
