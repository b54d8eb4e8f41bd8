"""Which classes a network takes for which: its validation images, run once more for the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from mptify.config import Recipe
from mptify.errors import BadConfig, MptifyError, first_line
from mptify.models import registry
from mptify.registry import methods
from mptify.report.collect import Findings
from mptify.runtime.loading import load
from mptify.training.data import Images
from mptify.training.evaluation import Evaluation, evaluate
from mptify.training.labels import as_seen, with_labels_of
from mptify.training.setup import architecture_of, build_network, classes_of
from mptify.training.sources import load_data

__all__ = ["Judged", "judge", "require_device"]


@dataclass(frozen=True)
class Judged:
    """The figures, and of every image which class it has and which it was taken for."""

    figures: Evaluation
    true: np.ndarray
    taken: np.ndarray
    classes: int
    names: tuple[str, ...]
    source: str

    @property
    def counts(self) -> np.ndarray:
        """How often images of each class (rows) were taken for each (columns)."""
        pairs = self.true * self.classes + self.taken
        return np.bincount(pairs, minlength=self.classes**2).reshape(self.classes, self.classes)

    @property
    def by_class(self) -> np.ndarray:
        """The share of each class's images that were recognized; NaN of a class without images."""
        totals = np.bincount(self.true, minlength=self.classes)
        right = np.bincount(self.true[self.true == self.taken], minlength=self.classes)
        return np.divide(right, totals, out=np.full(self.classes, np.nan), where=totals > 0)

    @property
    def confused(self) -> list[tuple[int, int, int]]:
        """(class, taken for, how often), most often first."""
        wrong = np.stack([self.true, self.taken], 1)[self.true != self.taken]
        pairs, often = np.unique(wrong, axis=0, return_counts=True)
        order = np.argsort(-often, kind="stable")
        return [(int(true), int(taken), int(count)) for (true, taken), count in zip(pairs[order], often[order], strict=True)]

    def name(self, label: int) -> str:
        return self.names[label] if label < len(self.names) else str(label)


def judge(
    findings: Findings,
    *,
    most: int | None = None,
    batch: int = 256,
    device: Any = "cpu",
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Judged:
    """Run the validation images that the recipe names, at most so many, through the run's last network.

    Raises `MptifyError` where data or network can't be had; `tick` is told how many images are done, of how many.
    """
    recipe = findings.recipe
    if not isinstance(recipe, Recipe):
        raise MptifyError("Which images it was searched on is not told: they were given from Python, or nothing was searched.")
    fewest = min((count for count in (most, recipe.data.val_images) if count is not None), default=None)
    _, images = load_data(recipe.data.model_copy(update={"val_images": fewest}), only_val=True)
    network = _network(findings, recipe, images)
    if findings.cut is not None:
        images = as_seen(images, findings.cut.ticket.notes)
    network = network.to(device)
    notes = findings.cut.ticket.notes if findings.cut is not None else {}
    images = with_labels_of(images, notes, classes_of(network, images, device))
    seen: list[tuple[Tensor, Tensor]] = []
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        tick(done, len(images))

    figures = evaluate(
        network, images, batch, device, tick=count, see=lambda ranked, labels: seen.append((ranked[:, 0].cpu(), labels.cpu()))
    )
    taken, true = (torch.cat(part).numpy() for part in zip(*seen, strict=True))
    classes = max(images.classes, int(taken.max()) + 1)  # the network may say one that the data lacks
    return Judged(figures, true, taken, classes, _names(findings, images), recipe.data.source)


def require_device(device: str) -> None:
    """Raise if there is no such device."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter from builds of torch that know no such device
        raise BadConfig(f"--device {device}: {first_line(error)}.") from None


def _network(findings: Findings, recipe: Recipe, images: Images) -> nn.Module:
    """The last ticket's, or the one that was trained densely."""
    if findings.cut is not None:
        return load(findings.cut.file)
    state = findings.place / "last.safetensors"
    if not recipe.trains_weights or not state.is_file():
        raise MptifyError("There is no network to judge yet: the first one is written at the end of the first epoch.")
    dense = build_network(architecture_of(registry.resolve(recipe.model), images), recipe)
    network = methods[recipe.method]().prepare(dense, recipe)
    try:
        network.load_state_dict(safetensors.torch.load_file(state))
    except (safetensors.SafetensorError, RuntimeError, OSError) as error:
        raise MptifyError(f"{state}: does not hold the weights of {recipe.model} ({first_line(error)}).") from None
    return network.eval()


def _names(findings: Findings, images: Images) -> tuple[str, ...]:
    noted = findings.cut.ticket.notes.get("labels") if findings.cut is not None else None
    return images.names or (tuple(str(label) for label in noted) if isinstance(noted, list) else ())
