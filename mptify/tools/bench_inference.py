"""Time packed networks beside float32, step by step and at several prune rates."""

from __future__ import annotations

import copy
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mptify.errors import MptifyError
from mptify.export.onnx import to_onnx
from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.runtime import load, pack, packed_layers
from mptify.runtime.library import library
from mptify.surgery import transform
from mptify.ticket import read
from mptify.tools.bench_nodes import NodeTime, node_times
from mptify.training.signals import keep_freed_memory

__all__ = [
    "NetworkTimes",
    "network_times",
    "networks_by_name",
    "networks_of_ticket",
    "prepare",
    "prune_times",
    "times_in_turns",
]


Tick = Callable[[], None]


@dataclass(frozen=True)
class NetworkTimes:
    """Median times for a batch of images, in milliseconds.

    Attributes:
        eager: The dense network in torch.
        channels_last: The dense network in torch, in the memory format channels_last.
        onnxruntime: The dense network in onnxruntime, or None if that is not installed.
        packed: The packed program.
        speedup: How many times faster the program is with all threads than with one; None with one
            thread. It is measured before onnxruntime starts its threads, which would disturb it.
        at_once: How many times as many images as one program with one thread are processed by one
            such program per thread at once: the speedup that the cores allow.
        nodes: The steps of the program.
        weight_bytes: The size of the packed weights.
        weights: The weights of packed layers, survivors and removed ones.
        survivors: The survivors among them.
        float_share: The share of the program's time that torch takes, not the packed kernels.
    """

    eager: float
    channels_last: float
    onnxruntime: float | None
    packed: float
    speedup: float | None
    at_once: float | None
    nodes: list[NodeTime]
    weight_bytes: int
    weights: int
    survivors: int
    float_share: float


def networks_of_ticket(
    path: str, size: int | None, batch: int = 1
) -> tuple[nn.Module, nn.Module, Tensor]:
    """Load a ticket and build its dense network.

    Args:
        path: The ticket file.
        size: Pixels of the images; None takes the network's input size.
        batch: How many images there are.

    Returns:
        The dense network, the ticket model and a batch of images.

    Raises:
        MptifyError: The ticket does not name its network.
    """
    ticket = read(path)
    if ticket.architecture is None:
        raise MptifyError(
            f"{path}: the ticket does not name its network, so there is no dense network to "
            f"compare with."
        )
    entry, arguments = registry.resolve(str(ticket.architecture)), ticket.architecture.arguments
    with InitMode("constant"):
        dense = registry.build(entry, **arguments)
    channels, pixels = arguments.get("in_chans", 3), size or arguments.get("input_size")
    image = registry.example_inputs(entry, dense, pixels, channels)[0]
    return dense.eval(), load(path), _batch_of(image, batch)


def _batch_of(images: Tensor, count: int) -> Tensor:
    """As many random images as asked for, of the same shape."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *images.shape[1:], generator=generator)


def networks_by_name(
    name: str, bits: str, prune: float, size: int | None, batch: int = 1
) -> tuple[nn.Module, nn.Module, Tensor]:
    """Build a dense network and convert it.

    Args:
        name: The name of the network.
        bits: Bits per weight and activation.
        prune: The fraction of weights to remove.
        size: Pixels of the images; None takes the network's input size.
        batch: How many images there are.

    Returns:
        The dense network, the ticket model after one training pass, which sets the statistics of
        its batch norms, and a batch of images.

    Raises:
        MptifyError: The network's input is not an image.
    """
    entry = registry.resolve(name)
    with InitMode("constant"):
        dense = registry.build(entry)
    inputs = registry.example_inputs(entry, dense, size)
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
        raise MptifyError(f"{entry} can't be measured: its input is not an image.")
    ticketed = transform(dense, bits=bits, prune=prune).train()
    with torch.no_grad():
        ticketed(inputs[0])
    return dense.eval(), ticketed.eval(), _batch_of(inputs[0], batch)


def network_times(
    dense: nn.Module, ticketed: nn.Module, image: Tensor, rounds: int, tick: Tick
) -> NetworkTimes:
    """Time the packed program of a ticket model beside its dense network, in turns.

    Args:
        dense: The dense network.
        ticketed: The ticket model.
        image: A batch of images.
        rounds: Calls of each to time.
        tick: Called after each round.

    Returns:
        The times.
    """
    prepare()
    program = pack(ticketed, image)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        last = copy.deepcopy(dense).to(memory_format=torch.channels_last)
        runs: dict[str, Callable[[], Any]] = {
            "eager": partial(dense, image),
            "packed": partial(program, image),
            "channels_last": partial(last, image.to(memory_format=torch.channels_last)),
        }
        speedup, at_once = None, None
        if torch.get_num_threads() > 1:
            speedup, at_once = _gain_of_threads(program, image, rounds)
        session = _onnx_session(dense, image, Path(folder) / "dense.onnx")
        if session is not None:
            feed = {session.get_inputs()[0].name: image.numpy()}
            runs["onnxruntime"] = partial(session.run, None, feed)
        times = _median_times(runs, rounds, tick)
        nodes, float_share = node_times(program, image, rounds)
    layers = packed_layers(program)
    return NetworkTimes(
        times["eager"],
        times["channels_last"],
        times.get("onnxruntime"),
        times["packed"],
        speedup,
        at_once,
        nodes,
        weight_bytes=sum(layer.weight_bytes for layer in layers),
        weights=sum(layer.weight_count for layer in layers),
        survivors=sum(layer.survivor_count for layer in layers),
        float_share=float_share,
    )


def _gain_of_threads(program: nn.Module, image: Tensor, rounds: int) -> tuple[float, float]:
    """The speedup by all threads over one, and by one program per thread over one program.

    Each round compares medians of five calls, since within a round the load of the machine is
    alike; the results are medians over rounds. The two calls before them are not counted: after its
    number of threads changes, torch starts new pools, whose threads spin for a while.
    """
    threads = torch.get_num_threads()
    speedups, throughputs = [], []
    copies = [copy.deepcopy(program) for _ in range(threads)]
    barrier = threading.Barrier(threads)

    def time_copy(own: nn.Module) -> list[float]:
        with torch.no_grad():
            own(image)
            barrier.wait()
            return _call_times(partial(own, image), 7)[1:-1]  # during these, the others run, too

    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(rounds):
                torch.set_num_threads(1)
                one = statistics.median(_call_times(partial(program, image), 7)[2:])
                at_once = statistics.median(itertools.chain(*pool.map(time_copy, copies)))
                torch.set_num_threads(threads)
                together = statistics.median(_call_times(partial(program, image), 7)[2:])
                speedups.append(one / together)
                throughputs.append(threads * one / at_once)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(speedups), statistics.median(throughputs)


def _call_times(run: Callable[[], Any], calls: int) -> list[float]:
    """The time of each call in milliseconds."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def prune_times(
    name: str,
    bits: Sequence[str],
    prunes: Sequence[float],
    size: int | None,
    rounds: int,
    tick: Tick,
) -> tuple[float, dict[str, list[float]]]:
    """Time a packed network at several prune rates, in turns.

    Args:
        name: The name of the network.
        bits: Bits per weight and activation; each has programs of its own.
        prunes: The fractions of weights to remove.
        size: Pixels of the image; None takes the network's input size.
        rounds: Calls of each to time.
        tick: Called after each round.

    Returns:
        The milliseconds of the dense network, and for each bits those of the packed network at each
        prune rate.
    """
    prepare()
    runs: dict[Any, Callable[[], Any]] = {}
    for one, prune in itertools.product(bits, prunes):
        dense, ticketed, image = networks_by_name(name, one, prune, size)
        runs[one, prune] = partial(pack(ticketed, image), image)
    with torch.no_grad():
        times = _median_times({"dense": partial(dense, image), **runs}, rounds, tick)
    return times["dense"], {one: [times[one, prune] for prune in prunes] for one in bits}


def prepare() -> None:
    """Require the C++ library, and stop the allocator from returning freed memory."""
    if library is None:
        raise MptifyError(
            "mptify was installed without a C++ compiler, so it has no packed programs to measure. "
            "Install a compiler, then mptify again."
        )
    keep_freed_memory()  # otherwise float32 would allocate fresh pages in every call


def _median_times(runs: dict[Any, Callable[[], Any]], rounds: int, tick: Tick) -> dict[Any, float]:
    """The median time of each function in milliseconds."""
    times = times_in_turns(runs, rounds, tick)
    return {name: statistics.median(some) for name, some in times.items()}


def times_in_turns(
    runs: dict[Any, Callable[[], Any]], rounds: int, tick: Tick, calls: int = 1
) -> dict[Any, list[float]]:
    """The times of all calls in milliseconds.

    In each round, each function is called `calls` times in a row.
    """
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            some = _call_times(run, calls)
            if number >= 2:  # the first two rounds warm up
                times[name] += some
        tick()
    return times


def _onnx_session(dense: nn.Module, image: Tensor, path: Path) -> Any:
    """The dense network in onnxruntime, with torch's number of threads; None if not installed."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        return None
    to_onnx(dense, image, path, dynamic=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
