"""What `mptify search` does with its options: search, train the baseline, print the results."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer

from mptify.cli.console import Unwrapped, console, print_fields
from mptify.cli.launching import (
    is_main_process,
    print_from_main,
    process_count,
    relaunch_with_torchrun,
    resume_command,
)
from mptify.cli.progress import Progress
from mptify.cli.search_recipe import recipe_from_options, recipe_of_run
from mptify.config import Recipe, baseline_of
from mptify.errors import LostProcess, RunExists
from mptify.models import registry
from mptify.models.registry import Entry
from mptify.ticket.state import read
from mptify.training import search, sources
from mptify.training.data import Images, sizes
from mptify.training.distributed import barrier
from mptify.training.run_folder import Run, free_folder, newest_unfinished
from mptify.training.setup import architecture_of, build_network

__all__ = ["resume_search", "start_search", "suggested_change"]

_RUNS = Path("runs")
_BUSY = (
    "This machine's cores were busy in the last minute. "
    "If they still are, `--threads 1` may be much faster."
)


def start_search(
    start: str | None,
    recipe: str | None,
    data: str | None,
    options: Mapping[str, Any],
    changes: Sequence[str],
    *,
    baseline: bool | None,
    out: Path | None,
) -> None:
    """Run a new search.

    Args:
        start: A ticket file to continue from, or the name of a network.
        recipe: The name or the file of a recipe.
        data: The source of the images.
        options: Settings by key, such as `{"ticket.prune": 0.9}`.
        changes: Settings as text, such as `["lr=0.05"]`.
        baseline: Whether to train the dense network too; None leaves that to the recipe.
        out: The folder of the run; None creates one in `runs/`.
    """
    relaunch_with_torchrun()
    checked = recipe_from_options(start, recipe, data, options, changes, baseline)
    checked = _with_threads(checked, options.get("threads"))
    if out is not None:
        _require_free(out)
    _search(checked, out, resume=False)


def resume_search(folder: Path | None, threads: int | None) -> None:
    """Continue a run that was stopped.

    Args:
        folder: The folder of the run; None takes the run in `runs/` that was stopped last.
        threads: Threads for torch; None takes the number in the run's recipe.
    """
    relaunch_with_torchrun()
    folder = folder or newest_unfinished(_RUNS)
    _search(_with_threads(recipe_of_run(folder), threads), folder, resume=True)


def _with_threads(recipe: Recipe, threads: int | None) -> Recipe:
    """Set torch's number of threads, and the recipe's, since the folder of the run records it."""
    if threads is not None:
        recipe = recipe.model_copy(update={"threads": threads})
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    return recipe


def _require_free(folder: Path) -> None:
    try:
        Run(folder).require_free()
    except RunExists:
        if is_main_process():
            raise
        raise typer.Exit(1) from None  # the main process prints the error


def _search(recipe: Recipe, out: Path | None, *, resume: bool) -> None:
    entry = registry.resolve(recipe.model)
    train, val = sources.load_data(recipe.data)
    architecture = architecture_of(entry, train)
    folder = out or free_folder(_RUNS, f"{entry.name}-{recipe.data.source.partition(':')[0]}")
    run = Run(folder)
    if resume and run.is_finished:
        print_from_main(f"{folder}: this run is finished.")
        raise typer.Exit
    baseline_folder = folder / "baseline"
    is_searched = resume and run.has_summary
    has_baseline = (baseline_folder / "recipe.yaml").exists()
    barrier()  # all processes look at the folder before any of them changes it
    if not is_searched:
        headlines = [_headline(recipe, entry, train, val, folder)]
        if recipe.threads is None and _is_busy():
            headlines.insert(0, _BUSY)
        with _resume_hint(folder), Progress(recipe.method, *headlines) as progress:
            result = search(
                build_network(architecture, recipe),
                train,
                val,
                recipe,
                out=folder,
                resume=resume,
                architecture=architecture,
                callbacks=[progress],
            )
        if not result.finished or (result.stop_requested and recipe.baseline is not None):
            _exit_stopped(folder)
    if recipe.baseline is not None:
        dense_recipe = baseline_of(recipe)
        with _resume_hint(folder), Progress("dense") as progress:
            result = search(
                build_network(architecture, dense_recipe),
                train,
                val,
                dense_recipe,
                out=baseline_folder,
                resume=has_baseline,
                callbacks=[progress],
            )
        if not result.finished:
            _exit_stopped(folder)
    if is_main_process():
        _print_results(Run(folder), recipe, train.classes)


@contextlib.contextmanager
def _resume_hint(folder: Path) -> Iterator[None]:
    """Add the command that resumes the run to the error about a lost process."""
    try:
        yield
    except LostProcess as error:
        if not (folder / "recipe.yaml").exists():
            raise
        raise LostProcess(
            f"{error} `{resume_command(folder)}` resumes from the last checkpoint."
        ) from None


def _exit_stopped(folder: Path) -> NoReturn:
    print_from_main(
        f"Stopped and saved. `{resume_command(folder)}` resumes, and ends in the same bytes."
    )
    raise typer.Exit(130)


def _is_busy() -> bool:
    """Whether, on a machine without GPU, half of the cores were in use in the last minute."""
    try:
        return not torch.cuda.is_available() and os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)
    except (OSError, AttributeError):  # some systems have no load average
        return False


def _headline(recipe: Recipe, entry: Entry, train: Images, val: Images, folder: Path) -> str:
    config = recipe.ticket
    method = (
        "dense training"
        if recipe.trains_weights
        else f"{recipe.method}, {config.bits} bits, {100 * config.prune:g} % pruned"
    )
    data = (
        f"{len(train):,} images of {sizes(train.shape())} to train, {len(val):,} to validate, "
        f"{train.classes} classes"
    )
    processes = f"; {process_count()} processes" if process_count() > 1 else ""
    return f"{entry}: {method}; {data}; {folder}{processes}"


def _print_results(run: Run, recipe: Recipe, classes: int) -> None:
    summary = run.read_summary()
    accuracy, best = 100 * summary["accuracy"], 100 * summary["best"]
    fields = [("accuracy", f"{accuracy:.2f} % after the last epoch, {best:.2f} % at best")]
    if recipe.baseline is not None:
        dense = 100 * Run(run.folder / "baseline").read_summary()["accuracy"]
        fields.append(
            (
                "dense",
                f"{dense:.2f} % after the last epoch: the same network and data, trained weights",
            )
        )
    if recipe.trains_weights:
        fields.append(("network", Unwrapped(run.folder / "last.safetensors")))
    else:
        change = suggested_change(recipe, summary["accuracy"], classes)
        fields += [
            *_ticket_fields(run.ticket("last")),
            ("curves", Unwrapped(run.folder / "curves.png")),
            ("next", Unwrapped(f"mptify inspect {run.ticket('last')}")),
            ("", Unwrapped(f"mptify report {run.folder}")),
            ("", Unwrapped(f"mptify search --recipe {run.recipe} --set {change}")),
        ]
    fields += [("warning", warning) for warning in summary["warnings"]]
    print_fields(console(), fields)


def _ticket_fields(path: Path) -> list[tuple[str, str]]:
    ticket = read(path)
    share = 100 * ticket.kept / ticket.count
    size, dense_size = path.stat().st_size, 4 * ticket.count
    return [
        (
            "kept",
            f"{ticket.kept:,} of {ticket.count:,} random weights, never trained ({share:.1f} %)",
        ),
        ("size", f"{size:,} bytes; the weights as float32 take {dense_size:,}"),
        ("ticket", Unwrapped(path)),
        ("", "from the last epoch; best.ticket did best on the validation images"),
    ]


def suggested_change(recipe: Recipe, accuracy: float, classes: int) -> str:
    """The setting to change in the next search.

    Args:
        recipe: The recipe of this search.
        accuracy: The accuracy that it reached.
        classes: The number of classes.

    Returns:
        More epochs if the accuracy is near chance, a higher prune rate otherwise.
    """
    if accuracy < min(2 / classes, 0.6):
        return f"epochs={4 * recipe.epochs}"
    return f"ticket.prune={1 - (1 - recipe.ticket.prune) / 4:g}"
