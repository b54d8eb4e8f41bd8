"""Speed of packed inference, beside float32: whole networks node by node, single layers, and time against the prune rate."""

from __future__ import annotations

import copy
import operator
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mptify.errors import MptifyError
from mptify.export.onnx import to_onnx
from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.registry import kernels
from mptify.runtime import load, pack, packed_layers
from mptify.runtime.chain import Call, Chain
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernel import Kernel
from mptify.runtime.kernels.bitsliced_conv import BitslicedConv
from mptify.runtime.kernels.pack import Pack
from mptify.runtime.kernels.unpack import Unpack
from mptify.runtime.library import library
from mptify.surgery import transform
from mptify.ticket import read
from mptify.training.signals import keep_freed_memory

__all__ = [
    "STAGES", "LayerTime", "NetworkTimes", "NodeTime", "from_file", "layer_time", "network_times", "prune_times",
    "ready_network",
]  # fmt: skip

STAGES = ((64, 56), (128, 28), (256, 14), (512, 7))  # channels and pixels of ResNet-18's 3×3 layers
Tick = Callable[[], None]


@dataclass(frozen=True)
class NodeTime:
    """One step of a program: what does it, and how long it takes (median, milliseconds)."""

    name: str
    kernel: str
    ms: float


@dataclass(frozen=True)
class NetworkTimes:
    """Median milliseconds for one image of the dense network in torch and onnxruntime, and of the packed program; and its steps.

    `speedup` is what several threads gain over one, if there are several, and `at_once` how many times as many images as one program do
    as many of them at the same time, one thread each: what the cores have to give. Taken before onnxruntime's threads are there to disturb.
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

    @property
    def float_share(self) -> float:
        """Of the program's time, what the kernels have no part in."""
        return sum(node.ms for node in self.nodes if node.kernel.startswith("torch")) / sum(node.ms for node in self.nodes)


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds of one binary layer with its threshold, and of torch's float32 convolution: medians, and lowest tenths.

    The kernels keep a core's arithmetic busy, and lose more than torch does to a neighbour who has the other half of the core: the
    lowest tenth of both is what it is without one, if there were moments without.
    """

    channels: int
    size: int
    prune: float
    packed: float
    dense: float
    packed_low: float
    dense_low: float

    @property
    def ratio(self) -> float:
        return self.dense / self.packed

    @property
    def undisturbed(self) -> float:
        return self.dense_low / self.packed_low


def from_file(path: str, size: int | None) -> tuple[nn.Module, nn.Module, Tensor]:
    """The dense network that a 1/1 ticket was cut from, the ticket model, and an image."""
    ticket = read(path)
    if ticket.architecture is None:
        raise MptifyError(f"{path}: holds a ticket of a model that no registry knows, so that there is nothing to compare it with.")
    entry, arguments = registry.resolve(str(ticket.architecture)), ticket.architecture.arguments
    with InitMode("constant"):
        dense = registry.build(entry, **arguments)
    channels, pixels = arguments.get("in_chans", 3), size or arguments.get("input_size")
    image = registry.example_inputs(entry, dense, pixels, channels)[0][:1].contiguous()
    return dense.eval(), load(path), image


def ready_network(name: str, prune: float, size: int | None) -> tuple[nn.Module, nn.Module, Tensor]:
    """A dense network, its 1/1 ticket model after one training pass (for its norms' sake), and an image."""
    entry = registry.resolve(name)
    with InitMode("constant"):
        dense = registry.build(entry)
    inputs = registry.example_inputs(entry, dense, size)
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
        raise MptifyError(f"{entry}: networks that take something else than an image can't be measured.")
    ticketed = transform(dense, bits="1/1", prune=prune).train()
    with torch.no_grad():
        ticketed(inputs[0])
    return dense.eval(), ticketed.eval(), inputs[0][:1].contiguous()


def network_times(dense: nn.Module, ticketed: nn.Module, image: Tensor, rounds: int, tick: Tick) -> NetworkTimes:
    """All of them in turn, `rounds` times."""
    _begin()
    program = pack(ticketed, image)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        last = copy.deepcopy(dense).to(memory_format=torch.channels_last)
        runs: dict[str, Callable[[], Any]] = {"eager": partial(dense, image), "packed": partial(program, image)}
        runs["channels_last"] = partial(last, image.to(memory_format=torch.channels_last))
        speedup, at_once = _gain_of_threads(program, image, rounds) if torch.get_num_threads() > 1 else (None, None)
        session = _onnx_session(dense, image, Path(folder) / "dense.onnx")
        if session is not None:
            feed = {session.get_inputs()[0].name: image.numpy()}
            runs["onnxruntime"] = partial(session.run, None, feed)
        times = _in_turn(runs, rounds, tick)
        nodes = _node_times(program, image, rounds)
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
    )


def _gain_of_threads(program: nn.Module, image: Tensor, rounds: int) -> tuple[float, float]:
    """How many times faster all threads are than one, and how many times as many images as many programs do at once.

    Medians over rounds of five calls of each in turn, whose medians are compared with each other: those of one round found the cores alike.
    Two calls before are not counted: to change their number costs torch a while, in which threads of pools that it makes anew spin.
    """
    threads = torch.get_num_threads()
    faster, as_many = [], []
    copies = [copy.deepcopy(program) for _ in range(threads)]
    ready = threading.Barrier(threads)

    def alone(mine: nn.Module) -> list[float]:
        with torch.no_grad():
            mine(image)
            ready.wait()
            return _timed(partial(mine, image), 7)[1:-1]  # while the others run

    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(rounds):
                torch.set_num_threads(1)
                one = statistics.median(_timed(partial(program, image), 7)[2:])
                at_once = statistics.median(ms for some in pool.map(alone, copies) for ms in some)
                torch.set_num_threads(threads)
                together = statistics.median(_timed(partial(program, image), 7)[2:])
                faster.append(one / together)
                as_many.append(threads * one / at_once)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(faster), statistics.median(as_many)


def _timed(run: Callable[[], Any], calls: int) -> list[float]:
    """Milliseconds of each call."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def prune_times(name: str, prunes: list[float], size: int | None, rounds: int, tick: Tick) -> list[tuple[float, float, float]]:
    """Prune rate, and milliseconds of the dense network and of the packed program; all of them in turn."""
    _begin()
    runs: dict[Any, Callable[[], Any]] = {}
    for prune in prunes:
        dense, ticketed, image = ready_network(name, prune, size)
        runs[prune] = partial(pack(ticketed, image), image)
    with torch.no_grad():
        times = _in_turn({"eager": partial(dense, image), **runs}, rounds, tick)
    return [(prune, times["eager"], times[prune]) for prune in prunes]


def layer_time(channels: int, size: int, prune: float, rounds: int, tick: Tick) -> LayerTime:
    """A 3×3 layer of ResNet-18 on one image: a call of the library, from bit planes to bit planes, borders and thresholds included."""
    _begin()
    generator = torch.Generator().manual_seed(0)
    signs = torch.where(torch.randn(channels, channels, 3, 3, generator=generator) < 0, -1, 1)
    weight = signs * (torch.rand(signs.shape, generator=generator) >= prune)
    image = torch.where(torch.randn(1, channels, size, size, generator=generator) < 0, -1.0, 1.0)
    thresholds = torch.randint(-9, 10, (1, channels), generator=generator)
    layer = BitslicedConv(weight.to(torch.int8), thresholds, Geometry(channels, (size, size), (3, 3), padding=(1, 1)))
    calls = [Call("pack", ("image",), "bits"), Call("layer", ("bits",), "signs"), Call("unpack", ("signs",), "numbers")]
    chain = Chain({"pack": Pack("channels"), "layer": layer, "unpack": Unpack()}, calls, ["image"], ["numbers"])
    _, program = chain.program_for([image])
    outputs, floats = program.bind([image]), weight.float()
    program.run()
    assert torch.equal(outputs[0] > 0, F.conv2d(image, floats, padding=1) >= thresholds.view(-1, 1, 1))
    runs: dict[str, Callable[[], Any]] = {"packed": partial(program.run_step, 1), "dense": partial(F.conv2d, image, floats, padding=1)}
    with torch.no_grad():
        times = _all_in_turn(runs, rounds, tick, calls=5)
    packed, dense = times["packed"], times["dense"]
    low = [statistics.quantiles(some, n=10, method="inclusive")[0] for some in (packed, dense)]
    return LayerTime(channels, size, prune, statistics.median(packed), statistics.median(dense), *low)


def _begin() -> None:
    if library is None:
        raise MptifyError("mptify was installed without a C++ compiler: there are no packed programs to measure.")
    keep_freed_memory()  # float32 would pay for fresh pages in every call


def _in_turn(runs: dict[Any, Callable[[], Any]], rounds: int, tick: Tick) -> dict[Any, float]:
    """Median milliseconds of each."""
    return {name: statistics.median(some) for name, some in _all_in_turn(runs, rounds, tick).items()}


def _all_in_turn(runs: dict[Any, Callable[[], Any]], rounds: int, tick: Tick, calls: int = 1) -> dict[Any, list[float]]:
    """Milliseconds of each call; in each turn, `calls` calls of one before it is the next one's."""
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            some = _timed(run, calls)
            if number >= 2:  # the first ones are slower
                times[name] += some
        tick()
    return times


def _onnx_session(dense: nn.Module, image: Tensor, path: Path) -> Any:
    """The dense network in onnxruntime, with as many threads as torch has; None where that is not installed."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        return None
    to_onnx(dense, image, path, dynamic=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class _Timed(fx.Interpreter):
    """Runs a program step by step, on one image."""

    def __init__(self, program: fx.GraphModule):
        super().__init__(program)
        self.times: dict[tuple[str, str], list[float]] = {}  # by step and what does it, a number for each run
        self.runs = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        module = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
        if isinstance(module, Chain):
            given = module.readable(self.fetch_args_kwargs_from_env(n)[0])
            builder, program = module.program_for(given)
            _outputs = program.bind(given)  # kept until the steps have written them
            for number, name in enumerate(builder.names):
                start = time.perf_counter()
                program.run_step(number, module.instruction_set)
                self.note(name, module.kernels[name], start)
        start = time.perf_counter()
        result = super().run_node(n)
        if n.op in ("call_module", "call_function", "call_method") and not isinstance(module, Chain) and n.target is not operator.getitem:
            self.note(n.name, n.name if module is None else module, start)
        return result

    def note(self, name: str, what: Any, start: float) -> None:
        ms = 1e3 * (time.perf_counter() - start)
        shown = what if isinstance(what, str) else type(what).__name__
        kernel = kernels.name_of(type(what)) if isinstance(what, Kernel) else None
        times = self.times.setdefault((name, kernel or f"torch: {shown}"), [])
        if len(times) < self.runs:
            times.append(ms)
        else:  # one that has several parts
            times[-1] += ms


def _node_times(program: nn.Module, image: Tensor, rounds: int) -> list[NodeTime]:
    if not isinstance(program, fx.GraphModule):
        raise MptifyError("Of this network only parts are packed; its steps can't be listed.")
    timed = _Timed(program)
    for _ in range(rounds):
        timed.run(image)
    return [NodeTime(name, kernel, statistics.median(times)) for (name, kernel), times in timed.times.items()]
