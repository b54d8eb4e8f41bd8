"""Time one network at several activation bits, beside its accuracy at these bits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mptify.errors import MptifyError
from mptify.runtime import pack
from mptify.tools.bench_inference import networks_by_name, prepare, times_in_turns
from mptify.tools.sweep import read_results

__all__ = ["DENSE", "BitsTime", "accuracies_of", "bits_times"]

DENSE = "dense"


@dataclass(frozen=True)
class BitsTime:
    """The time of a network for one image, and its accuracy.

    Attributes:
        bits: Bits per weight and activation, or "dense".
        ms: The median time in milliseconds.
        speedup: How many times faster than the dense network in torch.
        top1: The mean top-1 of the seeds in percent; None if no accuracies were given.
    """

    bits: str
    ms: float
    speedup: float
    top1: float | None = None


def accuracies_of(path: Path, where: Mapping[str, str]) -> dict[str, list[float]]:
    """The top-1 of each line of a sweep.

    Args:
        path: The folder of a sweep, or its results.csv. Lines are named after bits, and `dense`.
        where: The columns that a row must have, and their values. Rows in which such a column is
            empty do not vary along it, and count too.

    Returns:
        The top-1 of the finished runs of each line in percent.

    Raises:
        MptifyError: The file is not a table of results, or none of its rows fits.
    """
    rows, _, axes = read_results(path)
    unknown = [name for name in where if name not in axes]
    if unknown:
        known = ", ".join(axes) or "none"
        raise MptifyError(f"{path} has no axis {unknown[0]!r}; its axes are {known}.")
    for name, value in where.items():
        values = {row[name] for row in rows} - {""}
        if value not in values:
            known = ", ".join(sorted(values))
            raise MptifyError(f"{path} has no run with {name}={value}; there is {known}.")
    found: dict[str, list[float]] = {}
    for row in rows:
        fits = all(row[name] in ("", value) for name, value in where.items())
        if row["state"] == "done" and fits:
            found.setdefault(row["line"], []).append(float(row["top1"]))
    if not found:
        raise MptifyError(f"{path}: none of the runs that fit is done yet.")
    return found


def bits_times(
    name: str,
    bits: Sequence[str],
    prune: float,
    size: int | None,
    rounds: int,
    tick: Callable[[], None],
    accuracies: Mapping[str, Sequence[float]] | None = None,
) -> list[BitsTime]:
    """Time the packed programs of a network at several bits, and the dense network, in turns.

    Args:
        name: The name of the network.
        bits: Bits per weight and activation.
        prune: The fraction of weights to remove.
        size: Pixels of the image; None takes the network's input size.
        rounds: Calls of each to time.
        tick: Called after each round.
        accuracies: For each bits, and `dense`: the top-1 of some runs in percent.

    Returns:
        The dense network, then one entry for each bits.
    """
    prepare()
    runs: dict[str, Callable[[], Any]] = {}
    for one in bits:
        dense, ticketed, image = networks_by_name(name, one, prune, size)
        runs[one] = partial(pack(ticketed, image), image)
    with torch.no_grad():
        times = times_in_turns({DENSE: partial(dense, image), **runs}, rounds, tick)
    medians = {one: statistics.median(some) for one, some in times.items()}
    means = {one: statistics.fmean(some) for one, some in (accuracies or {}).items()}
    return [BitsTime(one, ms, medians[DENSE] / ms, means.get(one)) for one, ms in medians.items()]
