"""What there is to report of a run's folder or of a ticket file: recipe, metrics, the baseline beside it, and the ticket."""

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
from mptify.ticket.summary import Summary, summarize
from mptify.training.run_folder import Run

__all__ = ["Course", "Cut", "Findings", "gather"]


@dataclass(frozen=True)
class Course:
    """How a search or a dense training went so far: a row of metrics per epoch, of so many epochs."""

    rows: list[dict[str, Any]]
    epochs: int
    finished: bool
    warnings: list[str] = field(default_factory=list)

    def values(self, key: str) -> list[tuple[float, float]]:
        """(epoch, value) of the rows that have one."""
        return [(float(row["epoch"]), float(row[key])) for row in self.rows if isinstance(row.get(key), (int, float))]

    @property
    def accuracy(self) -> float | None:
        """After the last epoch, on the validation images."""
        found = self.values("val_accuracy")
        return found[-1][1] if found else None


@dataclass(frozen=True)
class Cut:
    """A ticket and the file that it was read from; `sections` are bytes of the file by what they are for."""

    file: Path
    ticket: Ticket
    summary: Summary
    sections: dict[str, int]


@dataclass(frozen=True)
class Findings:
    """All that a page can show. A file alone has no course; dense training, and a search in its first epoch, have no ticket."""

    place: Path
    recipe: SearchConfig | None
    course: Course | None = None
    baseline: Course | None = None
    cut: Cut | None = None

    @property
    def accuracy(self) -> float | None:
        """As the search found it after its last epoch."""
        if self.course is not None:
            return self.course.accuracy
        noted = self.cut.ticket.notes.get("accuracy") if self.cut is not None else None
        return float(noted) if isinstance(noted, (int, float)) and not isinstance(noted, bool) else None

    @property
    def is_dense(self) -> bool:
        return self.cut is None and self.recipe is not None and self.recipe.trains_weights

    @property
    def network(self) -> str:
        """The name that a registry knows, or what stands for one."""
        if self.cut is not None and self.cut.summary.architecture is not None:
            return self.cut.summary.architecture
        return self.recipe.model if isinstance(self.recipe, Recipe) else "a network of the author’s own"


def gather(place: Path) -> Findings:
    """Everything that a run's folder or a ticket file holds; raises if it is neither, or if a part of it is damaged."""
    if place.is_dir():
        return _of_run(place)
    if not place.exists():
        raise MptifyError(f"{place}: there is no such file or folder; a run's folder or a ticket file is needed.")
    cut = _cut(place)
    return Findings(place, _noted_recipe(cut.ticket), cut=cut)


def _of_run(folder: Path) -> Findings:
    run = Run(folder)
    if not run.recipe.is_file():
        raise MptifyError(f"{folder} holds no run: there is no recipe.yaml in it, which `mptify search` begins with.")
    settings, origin = find_recipe(str(run.recipe))
    recipe = make_recipe(settings, origin) if "model" in settings else make_search_config(settings)
    below, last = Run(folder / "baseline"), run.ticket("last")
    baseline = None
    if below.recipe.is_file():
        baseline = _course(below, make_recipe(*find_recipe(str(below.recipe))))
    return Findings(folder, recipe, _course(run, recipe), baseline, _cut(last) if last.is_file() else None)


def _course(run: Run, recipe: SearchConfig) -> Course:
    try:
        rows, summary = run.read_metrics(), run.read_summary() if run.has_summary else {}
        for row in rows:
            row["epoch"] = int(row["epoch"])
        if run.has_summary and not rows:
            raise ValueError("a finished run has metrics")
        warnings = [str(warning) for warning in summary.get("warnings", ())]
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise MptifyError(f"{run.folder}: its metrics.jsonl or summary.json is not as a run writes it ({type(error).__name__}).") from None
    return Course(rows, recipe.epochs, run.has_summary, warnings)


def _cut(file: Path) -> Cut:
    ticket, data = read_both(file)
    sections = {name: values.nbytes for name, values in safetensors.numpy.load(data).items()}
    return Cut(file, ticket, summarize(ticket, data), sections)


def _noted_recipe(ticket: Ticket) -> SearchConfig | None:
    """As the ticket tells it; anybody may have written that, so what means nothing is nothing."""
    noted = ticket.notes.get("recipe")
    if not isinstance(noted, dict):
        return None
    try:
        return make_recipe(noted) if "model" in noted else make_search_config(noted)
    except BadConfig:
        return None
