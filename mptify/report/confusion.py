"""The confusion matrix: runs the validation images once more, and prepares what is shown of it."""

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
from mptify.report.charts import Columns, column_chart
from mptify.report.collect import ReportData
from mptify.report.templating import in_percent
from mptify.runtime.loading import load
from mptify.training.data import Images
from mptify.training.evaluation import Evaluation, evaluate
from mptify.training.labels import as_seen, with_labels_of
from mptify.training.setup import architecture_of, build_network, classes_of
from mptify.training.sources import load_data

__all__ = ["ConfusionMatrix", "classes_context", "measure_confusion", "require_device"]

_MOST_IN_MATRIX, _MOST_PAIRS, _MOST_LISTED, _MOST_COLUMNS = 30, 25, 10, 300


@dataclass(frozen=True)
class ConfusionMatrix:
    """The evaluation, and the label and the predicted class of every image."""

    evaluation: Evaluation
    labels: np.ndarray
    predicted: np.ndarray
    classes: int
    names: tuple[str, ...]
    source: str

    @property
    def counts(self) -> np.ndarray:
        """How often images of each class (rows) were classified as each class (columns)."""
        pairs = self.labels * self.classes + self.predicted
        return np.bincount(pairs, minlength=self.classes**2).reshape(self.classes, self.classes)

    @property
    def totals(self) -> np.ndarray:
        return np.bincount(self.labels, minlength=self.classes)

    @property
    def by_class(self) -> np.ndarray:
        """The accuracy of each class; NaN for a class without images."""
        right = np.bincount(self.labels[self.labels == self.predicted], minlength=self.classes)
        unknown = np.full(self.classes, np.nan)
        return np.divide(right, self.totals, out=unknown, where=self.totals > 0)

    @property
    def confused(self) -> list[tuple[int, int, int]]:
        """(class, predicted class, how often), most often first."""
        pairs = np.stack([self.labels, self.predicted], 1)[self.labels != self.predicted]
        found, often = np.unique(pairs, axis=0, return_counts=True)
        order = np.argsort(-often, kind="stable")
        return [(int(found[at, 0]), int(found[at, 1]), int(often[at])) for at in order]

    def name(self, label: int) -> str:
        return self.names[label] if label < len(self.names) else str(label)


def measure_confusion(
    data: ReportData,
    *,
    most: int | None = None,
    batch: int = 256,
    device: Any = "cpu",
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> ConfusionMatrix:
    """Run at most `most` validation images that the recipe names through the run's last network.

    Args:
        tick: Called after each batch with the number of images done, and of all images.

    Raises:
        MptifyError: The images or the network can't be opened.
    """
    recipe = data.recipe
    if not isinstance(recipe, Recipe):
        raise MptifyError(
            "The validation images are unknown: "
            "they were passed from Python, or nothing was searched."
        )
    limits = [count for count in (most, recipe.data.val_images) if count is not None]
    source = recipe.data.model_copy(update={"val_images": min(limits, default=None)})
    _, images = load_data(source, only_val=True)
    network = _network(data, recipe, images).to(device)
    if data.file is not None:
        images = as_seen(images, data.notes)
    images = with_labels_of(images, data.notes, classes_of(network, images, device))
    seen: list[tuple[Tensor, Tensor]] = []
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        tick(done, len(images))

    def see(ranked: Tensor, labels: Tensor) -> None:
        seen.append((ranked[:, 0].cpu(), labels.cpu()))

    evaluation = evaluate(network, images, batch, device, tick=count, see=see)
    predicted, labels = (torch.cat(part).numpy() for part in zip(*seen, strict=True))
    classes = max(images.classes, int(predicted.max()) + 1)  # the data may lack a class
    noted = data.notes.get("labels")
    names = images.names or (tuple(map(str, noted)) if isinstance(noted, list) else ())
    return ConfusionMatrix(evaluation, labels, predicted, classes, names, recipe.data.source)


def require_device(device: str) -> None:
    """Raise if there is no such device."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without it
        raise BadConfig(f"--device {device}: {first_line(error)}.") from None


def _network(data: ReportData, recipe: Recipe, images: Images) -> nn.Module:
    """The last ticket's network, or the one that was trained densely."""
    if data.file is not None:
        return load(data.file.path)
    state = data.place / "last.safetensors"
    if not recipe.trains_weights or not state.is_file():
        raise MptifyError(
            "There is no network to evaluate yet: the first epoch writes the first one at its end."
        )
    architecture = architecture_of(registry.resolve(recipe.model), images)
    network = methods[recipe.method]().prepare(build_network(architecture, recipe), recipe)
    try:
        network.load_state_dict(safetensors.torch.load_file(state))
    except (safetensors.SafetensorError, RuntimeError, OSError) as error:
        raise MptifyError(
            f"{state}: does not hold the weights of {recipe.model} ({first_line(error)})."
        ) from None
    return network.eval()


# -- what the page shows ---------------------------------------------------------------------


def classes_context(matrix: ConfusionMatrix, noted: float | None) -> dict[str, Any]:
    """The template's data; `noted` is the accuracy that the search measured."""
    few, confused = matrix.classes <= _MOST_IN_MATRIX, matrix.confused
    totals = matrix.totals
    pairs = [
        (matrix.name(label), matrix.name(predicted), f"{count:,}", _share(count / totals[label]))
        for label, predicted, count in confused[: 5 if few else _MOST_PAIRS]
    ]
    differs = noted is not None and abs(matrix.evaluation.top1 - noted) >= 5e-7
    return {
        "images": matrix.evaluation.images,
        "source": matrix.source,
        "result": matrix.evaluation.in_words(matrix.classes),
        "noted": f"{100 * noted:.2f} %" if noted is not None and differs else None,
        "matrix": _matrix(matrix) if few else None,
        "many": None if few else _many(matrix),
        "pairs": pairs,
        "confused": len(confused),
    }


def _matrix(matrix: ConfusionMatrix) -> dict[str, Any]:
    """Heads and rows of the table; long names stand in the rows only, numbers in the heads."""
    names = [matrix.name(label) for label in range(matrix.classes)]
    short = all(len(name) <= 4 for name in names)
    heads = names if short else [str(label) for label in range(matrix.classes)]
    rows = [
        {
            "name": heads[label] if short or not matrix.names else f"{name} {label}",
            "title": name,
            "cells": [
                _cell(int(count), count / max(counts.sum(), 1), label == predicted)
                for predicted, count in enumerate(counts)
            ],
            "share": _share(share),
        }
        for label, (name, counts, share) in enumerate(
            zip(names, matrix.counts, matrix.by_class, strict=True)
        )
    ]
    return {"heads": heads, "rows": rows}


def _cell(count: int, share: float, right: bool) -> tuple[int, str, str]:
    """The count, the CSS class, and how deep its colour is."""
    depth = 0.2 + 0.75 * share
    style = ("right" if right else "wrong") + (" deep" if depth > 0.55 else "")
    return count, style if count else "none", f"{depth:.2f}"


def _many(matrix: ConfusionMatrix) -> dict[str, Any]:
    """A chart of the accuracy of every class, and the classes at both ends."""
    shares = matrix.by_class
    known = [int(one) for one in np.argsort(shares, kind="stable") if not np.isnan(shares[one])]
    step = -(-len(known) // _MOST_COLUMNS)
    shown = known[::step]
    chart = column_chart(
        "Accuracy by class, worst first" + (f" (every {step}th)" if step > 1 else ""),
        Columns([matrix.name(one) for one in shown], [float(shares[one]) for one in shown]),
        in_percent,
        across="class, by rank",
    )
    listed = [(matrix.name(label), _share(shares[label])) for label in known]
    return {
        "chart": chart,
        "worst": listed[:_MOST_LISTED],
        "best": listed[: -_MOST_LISTED - 1 : -1],
    }


def _share(value: float) -> str:
    return "–" if np.isnan(value) else f"{100 * value:.1f} %"
