"""Measure ratios of times, side by side in one process, since shared machines are noisy."""

from __future__ import annotations

import io
import lzma
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mptify import models
from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.nn.topk import mask_entropy
from mptify.runtime import load
from mptify.surgery import ticket_layers, transform
from mptify.ticket import save, ticket_of
from mptify.ticket.codec import to_bytes
from mptify.training.data import as_images
from mptify.training.loop import steps_of
from mptify.training.signals import keep_freed_memory

__all__ = [
    "PeakMemory",
    "StepRatio",
    "TicketSize",
    "TicketSpeed",
    "command_ratio",
    "peak_memory",
    "search_ratio",
    "step_ratio",
    "ticket_size",
    "ticket_speed",
]


@dataclass(frozen=True)
class StepRatio:
    """A training step of a ticket model against a step of dense training.

    Attributes:
        network: The name of the network.
        bits: The bits of the ticket.
        batch: Images per step.
        dense_ms: The median time of a step of dense training, in milliseconds.
        ticket_ms: The median time of a step of the ticket model.
        ratio: The median ratio over pairs of adjacent steps.
        low: The lower quartile of the ratios.
        high: The upper quartile.
    """

    network: str
    bits: str
    batch: int
    dense_ms: float
    ticket_ms: float
    ratio: float
    low: float
    high: float


def step_ratio(
    make: Callable[[], nn.Module],
    network: str,
    bits: str,
    prune: float,
    batch: int,
    rounds: int,
    tick: Callable[[], None] = lambda: None,
) -> StepRatio:
    """Interleave steps of dense training and of a ticket model, and compare them pair by pair.

    Args:
        make: Builds the network.
        network: Its name.
        bits: The bits of the ticket.
        prune: The fraction of weights to remove.
        batch: Images per step.
        rounds: Pairs of steps to time.
        tick: Called after each pair.

    Returns:
        The ratio and the times.
    """
    keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (batch,), generator=generator)
    dense = _training_step(make(), images, labels)
    ticket = _training_step(transform(make(), bits=bits, prune=prune), images, labels)
    return StepRatio(network, bits, batch, *_interleaved(dense, ticket, rounds, tick))


def _interleaved(
    dense: Callable[[], Any], ticket: Callable[[], Any], rounds: int, tick: Callable[[], None]
) -> tuple[float, float, float, float, float]:
    """Median milliseconds of both, then the median of the ratios and its quartiles."""
    pairs = []
    for number in range(rounds + 2):
        order = (dense, ticket) if number % 2 else (ticket, dense)
        seconds = {step: _timed(step) for step in order}
        if number >= 2:  # the first two rounds warm up
            pairs.append((seconds[dense], seconds[ticket]))
        tick()
    dense_ms, ticket_ms = (1e3 * statistics.median(one) for one in zip(*pairs, strict=True))
    low, ratio, high = np.quantile(
        [ticket_s / dense_s for dense_s, ticket_s in pairs], (0.25, 0.5, 0.75)
    ).tolist()
    return dense_ms, ticket_ms, ratio, low, high


def _training_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """A function that runs one training step."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def search_ratio(
    bits: str, prune: float, batch: int, rounds: int, tick: Callable[[], None] = lambda: None
) -> StepRatio:
    """Compare whole steps of `mptify.search`, with data and augmentation, with dense training.

    Args:
        bits: The bits of the ticket.
        prune: The fraction of weights to remove.
        batch: Images per step.
        rounds: Pairs of steps to time.
        tick: Called after each pair.

    Returns:
        The ratio and the times.
    """
    keep_freed_memory()
    rng = np.random.default_rng(0)
    images = as_images(
        (rng.integers(0, 255, (4 * batch, 32, 32, 3), dtype=np.uint8), np.arange(4 * batch) % 10),
        "train",
    )
    images.crop, images.flip = 4, True
    methods: dict[str, dict[str, Any]] = {
        "dense": {"method": "dense"},
        "ticket": {"ticket": {"bits": bits, "prune": prune}},
    }
    steps = {
        method: steps_of(models.resnet18_cifar(), images, {"batch": batch, **settings})
        for method, settings in methods.items()
    }
    ratio = _interleaved(lambda: next(steps["dense"]), lambda: next(steps["ticket"]), rounds, tick)
    return StepRatio("resnet18_cifar, search", bits, batch, *ratio)


@dataclass(frozen=True)
class PeakMemory:
    """What a process that trains ResNet-18 on 32×32 images takes beyond imports, in bytes.

    Attributes:
        method: The search method, or `"dense"`.
        bits: The bits of the ticket.
        batch: Images per step.
        peak: The peak of eight steps, with building the network and with the libraries that both
            load, such as torchvision.
        libraries: What steps of a small network take: all but nothing else than these libraries.
    """

    method: str
    bits: str
    batch: int
    peak: int
    libraries: int


_PEAK_SCRIPT = """
import re, sys, numpy as np
from pathlib import Path
from mptify import models
from mptify.training.loop import steps_of
method, bits, prune, batch = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
rng = np.random.default_rng(0)
def run(network, batch, steps):
    images = rng.integers(0, 255, (2 * batch, 32, 32, 3), dtype=np.uint8), np.arange(2 * batch) % 10
    settings = {"batch": batch, "method": method, "ticket": {"bits": bits, "prune": prune}}
    training = steps_of(network, images, settings)
    for _ in range(steps):
        next(training)
def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))
start = status("VmRSS")
run(models.resnet20_cifar(), 4, 2)
libraries = status("VmRSS") - start
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
run(models.resnet18_cifar(), batch, 8)  # several steps, since each leaves gaps in memory
print(status("VmHWM") - start, libraries)
"""


def peak_memory(method: str, bits: str, prune: float, batch: int) -> PeakMemory:
    """Measure the peak memory of search steps, in a new process; only on Linux.

    Args:
        method: The search method, or `"dense"`.
        bits: The bits of the ticket.
        prune: The fraction of weights to remove.
        batch: Images per step.
    """
    command = [sys.executable, "-c", _PEAK_SCRIPT, method, bits, str(prune), str(batch)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak, libraries = (1024 * int(number) for number in output.split())
    return PeakMemory(method, bits, batch, peak, libraries)


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def command_ratio(
    command: list[str], imports: str, rounds: int, tick: Callable[[], None] = lambda: None
) -> tuple[float, float, float]:
    """Compare the time of a command with the time of its imports, in interleaved runs.

    Args:
        command: The arguments of `mptify`.
        imports: The import statements.
        rounds: Pairs of runs to time.
        tick: Called after each pair.

    Returns:
        The median seconds of the command and of the imports, and the median ratio.
    """
    whole, alone = [], []
    for _ in range(rounds):
        alone.append(_timed(lambda: _run_silently([sys.executable, "-c", imports])))
        whole.append(_timed(lambda: _run_silently([sys.executable, "-m", "mptify", *command])))
        tick()
    ratios = [seconds / imported for seconds, imported in zip(whole, alone, strict=True)]
    return statistics.median(whole), statistics.median(alone), statistics.median(ratios)


def _run_silently(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@dataclass(frozen=True)
class TicketSize:
    """The size of a ticket file in bytes, beside other ways to store the same network.

    Attributes:
        network: The name of the network.
        bits: The bits of the ticket.
        prune: The fraction of weights removed.
        file: The ticket file.
        limit: The design's upper limit for the file.
        entropy: The entropy of the masks.
        float32: All weights as float32.
        two_bits: Two bits per weight: kept or not, and the sign.
        zstd: The masks as bits, compressed by zstd at level 19.
        xz: The masks as bits, compressed by xz.
        checkpoint: Weights and scores, saved by torch.
    """

    network: str
    bits: str
    prune: float
    file: int
    limit: float
    entropy: float
    float32: int
    two_bits: int
    zstd: int
    xz: int
    checkpoint: int


def ticket_size(name: str, bits: str, prune: float) -> TicketSize:
    """Measure the file of a ticket with random masks, which the seed does not help to compress.

    The file includes statistics from one training pass. After a search, files are smaller, since
    its masks resemble the initial ones.

    Args:
        name: The name of the network.
        bits: The bits of the ticket.
        prune: The fraction of weights to remove.

    Returns:
        The sizes.
    """
    import zstandard  # a development dependency

    entry = registry.resolve(name)
    with InitMode("constant"):
        model = registry.build(entry)
    ticketed = transform(model, bits=bits, prune=prune).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in ticket_layers(ticketed).values():
            layer.scores.normal_(generator=generator)
        ticketed(*registry.example_inputs(entry, model))
    ticket = ticket_of(ticketed.eval())
    entropy = sum(mask_entropy(layer.size, layer.kept) for layer in ticket.layers.values()) / 8
    stored = ticket.stored_floats + len(ticket.layers)
    packed = b"".join(np.packbits(layer.mask).tobytes() for layer in ticket.layers.values())
    floats = 4 * sum(value.size for value in ticket.floats.values())
    checkpoint = io.BytesIO()
    torch.save(
        {key: (layer.frozen, layer.scores) for key, layer in ticket_layers(ticketed).items()},
        checkpoint,
    )
    return TicketSize(
        network=str(entry),
        bits=bits,
        prune=prune,
        file=len(to_bytes(ticket)),
        limit=1.01 * entropy + 4 * stored + (16 << 10),
        entropy=entropy,
        float32=4 * ticket.count + floats,
        two_bits=-(-ticket.count // 4) + floats,
        zstd=len(zstandard.ZstdCompressor(level=19).compress(packed)) + floats,
        xz=len(lzma.compress(packed)) + floats,
        checkpoint=checkpoint.tell() + floats,
    )


@dataclass(frozen=True)
class TicketSpeed:
    """Median seconds to save and load a ticket, and to build its network, a part of loading."""

    network: str
    save: float
    load: float
    build: float


def ticket_speed(name: str, bits: str, prune: float, rounds: int) -> TicketSpeed:
    """Time saving and loading a ticket, and building its network.

    Args:
        name: The name of the network.
        bits: The bits of the ticket.
        prune: The fraction of weights to remove.
        rounds: How often to do each.

    Returns:
        The times.
    """
    entry = registry.resolve(name)
    times: dict[str, list[float]] = {"save": [], "load": [], "build": []}

    def build() -> nn.Module:
        with InitMode("constant"):
            return registry.build(entry)

    ticketed = transform(build(), bits=bits, prune=prune).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ticket"
        for _ in range(rounds):
            times["save"].append(_timed(lambda: save(ticketed, path, name)))
            times["build"].append(_timed(build))
            times["load"].append(_timed(lambda: load(path)))
    return TicketSpeed(
        str(entry), **{action: statistics.median(seconds) for action, seconds in times.items()}
    )
