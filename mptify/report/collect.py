"""What a run's folder or a ticket file holds: recipe, metrics, the baseline, and the ticket."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.numpy

from mptify.config import Recipe, SearchConfig, make_recipe, make_search_config
from mptify.errors import BadConfig, MptifyError
from mptify.recipe_files import find_recipe
from mptify.ticket.codec import Ticket
from mptify.ticket.state import read_both
from mptify.ticket.ticket_summary import TicketSummary, summarize
from mptify.training.run_folder import Run

__all__ = ["ReportData", "TicketFile", "TrainingCurve", "collect_report"]


@dataclass(frozen=True)
class TrainingCurve:
    """The metrics of a search or of dense training so far: one row per epoch."""

    rows: list[dict[str, Any]]
    epochs: int
    finished: bool
    warnings: list[str] = field(default_factory=list)

    def values(self, key: str) -> list[tuple[float, float]]:
        """(epoch, value) of the rows that have one."""
        rows = [row for row in self.rows if isinstance(row.get(key), (int, float))]
        return [(float(row["epoch"]), float(row[key])) for row in rows]

    @property
    def accuracy(self) -> float | None:
        """After the last epoch, on the validation images."""
        found = self.values("val_accuracy")
        return found[-1][1] if found else None


@dataclass(frozen=True)
class TicketFile:
    """A ticket, the file it was read from, and how many bytes each section of the file takes."""

    path: Path
    ticket: Ticket
    summary: TicketSummary
    sections: dict[str, int]


@dataclass(frozen=True)
class ReportData:
    """What a page can show.

    A ticket file alone has no training curve; dense training, and a search in its first epoch,
    have no ticket.
    """

    place: Path
    recipe: SearchConfig | None
    curve: TrainingCurve | None = None
    baseline: TrainingCurve | None = None
    file: TicketFile | None = None

    @property
    def notes(self) -> dict[str, Any]:
        return self.file.ticket.notes if self.file is not None else {}

    @property
    def accuracy(self) -> float | None:
        """What the search measured after its last epoch."""
        if self.curve is not None:
            return self.curve.accuracy
        noted: Any = self.notes.get("accuracy")
        return float(noted) if type(noted) in (int, float) else None

    @property
    def is_dense(self) -> bool:
        return self.file is None and self.recipe is not None and self.recipe.trains_weights

    @property
    def network(self) -> str:
        """Its name in the model registry, or what stands for one."""
        if self.file is not None and self.file.summary.architecture is not None:
            return self.file.summary.architecture
        if isinstance(self.recipe, Recipe):
            return self.recipe.model
        return "a network of the author’s own"


def collect_report(place: Path) -> ReportData:
    """Read a run's folder or a ticket file; raises if it is neither, or if it is damaged."""
    if place.is_dir():
        return _of_run(place)
    if not place.exists():
        raise MptifyError(
            f"{place}: there is no such file or folder; a run's folder or a ticket file is needed."
        )
    file = _read_ticket(place)
    return ReportData(place, _noted_recipe(file.ticket), file=file)


def _of_run(folder: Path) -> ReportData:
    run = Run(folder)
    if not run.recipe.is_file():
        raise MptifyError(
            f"{folder} holds no run: there is no recipe.yaml in it. "
            f"`mptify search --out {folder}` starts one."
        )
    settings, origin = find_recipe(str(run.recipe))
    recipe = make_recipe(settings, origin) if "model" in settings else make_search_config(settings)
    curve = _curve(run, recipe)
    below, last = Run(folder / "baseline"), run.ticket("last")
    baseline = None
    if below.recipe.is_file():
        baseline = _curve(below, make_recipe(*find_recipe(str(below.recipe))))
    file = _read_ticket(last) if last.is_file() else None
    return ReportData(folder, recipe, curve, baseline, file)


def _curve(run: Run, recipe: SearchConfig) -> TrainingCurve:
    try:
        rows, summary = run.read_metrics(), run.read_summary() if run.has_summary else {}
        for row in rows:
            row["epoch"] = int(row["epoch"])
        if run.has_summary and not rows:
            raise ValueError("a finished run has metrics")
        warnings = [str(warning) for warning in summary.get("warnings", ())]
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise MptifyError(
            f"{run.folder}: its metrics.jsonl or summary.json is damaged ({type(error).__name__})."
        ) from None
    return TrainingCurve(rows, recipe.epochs, run.has_summary, warnings)


def _read_ticket(path: Path) -> TicketFile:
    ticket, data = read_both(path)
    sections = {name: values.nbytes for name, values in safetensors.numpy.load(data).items()}
    return TicketFile(path, ticket, summarize(ticket, data), sections)


def _noted_recipe(ticket: Ticket) -> SearchConfig | None:
    """The recipe in the ticket's notes; anybody may have written those, so a bad one is none."""
    noted = ticket.notes.get("recipe")
    if not isinstance(noted, dict):
        return None
    try:
        return make_recipe(noted) if "model" in noted else make_search_config(noted)
    except BadConfig:
        return None
