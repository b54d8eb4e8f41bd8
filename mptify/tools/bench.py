"""Speed, as ratios measured side by side in one process: the machines are shared and noisy, ratios are not."""

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
    """A training step of a ticket model against one of the same network trained densely (medians, in milliseconds).

    `ratio` is the median over pairs of steps, one after the other; half of the pairs lie between `low` and `high`.
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
    """Interleave dense and ticket training steps, and compare pair by pair: the ratio is the median over the pairs."""
    keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (batch,), generator=generator)
    dense = _stepper(make(), images, labels)
    ticket = _stepper(transform(make(), bits=bits, prune=prune), images, labels)
    return StepRatio(network, bits, batch, *_interleaved(dense, ticket, rounds, tick))


def _interleaved(
    dense: Callable[[], Any], ticket: Callable[[], Any], rounds: int, tick: Callable[[], None]
) -> tuple[float, float, float, float, float]:
    """Milliseconds of either (medians), and of the ratio over pairs the median and the middle half."""
    pairs = []
    for turn in range(rounds + 2):
        order = (dense, ticket) if turn % 2 else (ticket, dense)
        seconds = {step: _timed(step) for step in order}
        if turn >= 2:  # the first two warm up
            pairs.append((seconds[dense], seconds[ticket]))
        tick()
    theirs_ms, ours_ms = (1e3 * statistics.median(one) for one in zip(*pairs, strict=True))
    low, ratio, high = np.quantile(
        [ours / theirs for theirs, ours in pairs], (0.25, 0.5, 0.75)
    ).tolist()
    return theirs_ms, ours_ms, ratio, low, high


def _stepper(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
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
    """Steps of `mptify.search` with everything in them, data and augmentation too, against dense training by the same loop."""
    keep_freed_memory()
    rng = np.random.default_rng(0)
    images = as_images(
        (rng.integers(0, 255, (4 * batch, 32, 32, 3), dtype=np.uint8), np.arange(4 * batch) % 10),
        "train",
    )
    images.crop, images.flip = 4, True
    kinds: dict[str, dict[str, Any]] = {
        "dense": {"method": "dense"},
        "ticket": {"ticket": {"bits": bits, "prune": prune}},
    }
    steps = {
        kind: steps_of(models.resnet18_cifar(), images, {"batch": batch, **settings})
        for kind, settings in kinds.items()
    }
    ratio = _interleaved(lambda: next(steps["dense"]), lambda: next(steps["ticket"]), rounds, tick)
    return StepRatio("resnet18_cifar, search", bits, batch, *ratio)


_PEAK = """
import re, sys, numpy as np
from pathlib import Path
from mptify import models
from mptify.training.loop import steps_of
method, bits, prune, batch = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
rng = np.random.default_rng(0)
images = rng.integers(0, 255, (2 * batch, 32, 32, 3), dtype=np.uint8), np.arange(2 * batch) % 10
def status(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = status("VmRSS")
steps = steps_of(models.resnet18_cifar(), images, {"batch": batch, "method": method, "ticket": {"bits": bits, "prune": prune}})
for _ in range(3):
    next(steps)
print(status("VmHWM") - before)
"""


def peak_memory(method: str, bits: str, prune: float, batch: int) -> int:
    """Bytes that three search steps of ResNet-18 for 32×32 images take at their peak, in a process of its own (Linux only)."""
    command = [sys.executable, "-c", _PEAK, method, bits, str(prune), str(batch)]
    return 1024 * int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def command_ratio(
    command: list[str], imports: str, rounds: int, tick: Callable[[], None] = lambda: None
) -> tuple[float, float, float]:
    """Seconds of the whole command, seconds of its imports alone, and the ratio, medians over interleaved runs."""
    whole, alone = [], []
    for _ in range(rounds):
        alone.append(_timed(lambda: _quietly([sys.executable, "-c", imports])))
        whole.append(_timed(lambda: _quietly([sys.executable, "-m", "mptify", *command])))
        tick()
    pairs = [a / b for a, b in zip(whole, alone, strict=True)]
    return statistics.median(whole), statistics.median(alone), statistics.median(pairs)


def _quietly(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# -- the ticket file -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TicketSize:
    """Bytes of one ticket file, and of what else one could write. `limit` is the design's target."""

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
    """Sizes of a named network's ticket with masks as random as masks can be: nothing that its seed could say.

    Statistics of one training pass are included. What a search leaves is smaller, since it leans on the first scores.
    """
    import zstandard

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
    """Seconds to save and load a ticket, and to build the dense network, which is part of loading (medians)."""

    network: str
    save: float
    load: float
    build: float


def ticket_speed(name: str, bits: str, prune: float, rounds: int) -> TicketSpeed:
    """Time saving and loading a named network's ticket beside building the network alone."""
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
        str(entry), **{what: statistics.median(seconds) for what, seconds in times.items()}
    )
