"""Speed, as ratios measured side by side in one process: the machines are shared and noisy, ratios are not."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mptify.surgery import transform

__all__ = ["StepRatio", "cifar_resnet18", "command_ratio", "step_ratio"]


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


def cifar_resnet18() -> nn.Module:
    """torchvision's ResNet-18 as it is used on 32×32 images: a 3×3 stem of stride 1, and no max-pool."""
    import torchvision

    model = torchvision.models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def step_ratio(
    make: Callable[[], nn.Module], network: str, bits: str, prune: float, batch: int, rounds: int, tick: Callable[[], None] = lambda: None
) -> StepRatio:
    """Interleave dense and ticket training steps, and compare pair by pair: the ratio is the median over the pairs."""
    _keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (batch,), generator=generator)
    dense = _stepper(make(), images, labels)
    ticket = _stepper(transform(make(), bits=bits, prune=prune), images, labels)
    pairs = []
    for turn in range(rounds + 2):
        order = (dense, ticket) if turn % 2 else (ticket, dense)
        seconds = {step: _timed(step) for step in order}
        if turn >= 2:  # the first two warm up
            pairs.append((seconds[dense], seconds[ticket]))
        tick()
    theirs_ms, ours_ms = (1e3 * statistics.median(one) for one in zip(*pairs, strict=True))
    low, ratio, high = np.quantile([ours / theirs for theirs, ours in pairs], (0.25, 0.5, 0.75)).tolist()
    return StepRatio(network, bits, batch, theirs_ms, ours_ms, ratio, low, high)


def _keep_freed_memory() -> None:
    """Tell glibc not to give freed memory back, so that no step pays for pages again that the other one's end let go."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for setting in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(setting, 1 << 30)


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


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def command_ratio(command: list[str], imports: str, rounds: int, tick: Callable[[], None] = lambda: None) -> tuple[float, float, float]:
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
