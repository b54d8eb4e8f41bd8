"""Evaluate a network on labelled images, each counted once over all processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mptify.errors import BadData
from mptify.training.data import Images, evaluation_batches

__all__ = ["Evaluation", "evaluate", "evaluating", "logits_of", "loss_of"]


@dataclass(frozen=True)
class Evaluation:
    """Top-1 and top-5 accuracy, mean cross-entropy, and images per second."""

    images: int
    top1: float
    top5: float
    loss: float
    images_per_second: float

    def in_words(self, classes: int) -> str:
        """The metrics as one line of text; with up to five classes, without top-5."""
        top5 = f"top-5 {100 * self.top5:.2f} %, " if classes > 5 else ""
        return f"top-1 {100 * self.top1:.2f} %, {top5}loss {self.loss:.4f}"


def logits_of(output: Any) -> Tensor:
    """The main output of a classifier, without auxiliary heads."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor) or output.dim() != 2:
        what = (
            f"of shape {tuple(output.shape)}"
            if isinstance(output, Tensor)
            else f"a {type(output).__name__}"
        )
        raise BadData(
            "A search needs a classifier, with one row of class scores per image; this network "
            f"returns {what}."
        )
    return output


def loss_of(output: Any, labels: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy summed over images; auxiliary heads count 0.3, as in their papers."""
    heads = [
        head
        for head in (output if isinstance(output, (tuple, list)) else [output])
        if isinstance(head, Tensor)
    ]
    logits_of(output)
    losses = [
        F.cross_entropy(head.float(), labels, reduction="sum", label_smoothing=smoothing)
        for head in heads
    ]
    return losses[0] + 0.3 * sum(losses[1:]) if len(losses) > 1 else losses[0]


def evaluate(
    model: nn.Module,
    images: Images,
    batch: int,
    device: Any,
    *,
    rank: int = 0,
    world: int = 1,
    sum_up: Callable[[Tensor], Tensor] = lambda sums: sums,
    tick: Callable[[int], None] = lambda count: None,
    see: Callable[[Tensor, Tensor], None] = lambda ranked, labels: None,
) -> Evaluation:
    """Evaluate a model in `eval()`, and restore its mode.

    `see` is called with each of this process's batches: the classes of every image, best first, and
    the labels.
    """
    sums = torch.zeros(
        4, dtype=torch.float64, device=device if torch.device(device).type != "mps" else "cpu"
    )
    start = time.perf_counter()
    with evaluating(model):
        for pixels, labels in evaluation_batches(
            images, batch, rank=rank, world=world, device=device
        ):
            logits = logits_of(model(pixels)).float()
            ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
            best = ranked == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            sums += torch.stack(
                [
                    best[:, 0].sum(),
                    best.any(1).sum(),
                    loss,
                    torch.tensor(len(labels), device=loss.device),
                ]
            ).to(sums)
            see(ranked, labels)
            tick(len(labels))
    top1, top5, loss, count = sum_up(sums).tolist()
    assert count == len(images), f"{count} images were counted, and there are {len(images)}"
    return Evaluation(
        int(count), top1 / count, top5 / count, loss / count, count / (time.perf_counter() - start)
    )


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """`eval()` without gradients inside this context; the mode of each module is restored."""
    modes = {module: module.training for module in network.modules()}
    try:
        with torch.no_grad():
            network.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
