"""Sweeps: a grid of searches in one folder, each once, and a table of what they found.

sweep.yaml     what was asked for
runs/NAME/     a run's folder, as `mptify search` makes it; NAME.log beside it is what it printed
results.csv    one row per run, written again after each
"""

from __future__ import annotations

import csv
import difflib
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mptify.config import Recipe, as_tuple, checked, make_recipe
from mptify.errors import BadConfig, MptifyError
from mptify.files import write_whole
from mptify.recipe_files import find_recipe, recipe_folder, to_yaml, with_setting
from mptify.training.run_folder import Run

__all__ = [
    "Cell",
    "Figure",
    "Line",
    "Sweep",
    "cells_of",
    "find_sweep",
    "read_results",
    "run_sweep",
    "sweep_names",
]

_RESULTS = ("state", "top1", "best", "loss", "kept", "weights", "epochs", "seconds", "error")


class Line(BaseModel):
    """One kind of run, which a plot draws as one line or several: `MPT-1/32`, `dense`, ..."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, description="What the plot calls it.")
    recipe: str | None = Field(
        None, description="The recipe to begin with; the sweep's unless given."
    )
    set: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of these runs: {method: dense, ticket.prune: 0.8}.",
    )
    axes: Annotated[tuple[str, ...] | None, BeforeValidator(as_tuple)] = Field(
        None,
        description="The axes of the grid that these runs vary over; all of them unless given.",
    )


class Figure(BaseModel):
    """How the results are drawn."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    x: str = Field(
        description="The axis along which lines go; those that don't vary over it are drawn dashed from side to side."
    )
    panel: str | None = Field(None, description="The axis that has a panel for each of its values.")
    title: str = Field("", description="What stands above it.")


class Sweep(BaseModel):
    """A grid of searches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str | None = Field(None, description="The recipe that all runs begin with.")
    set: dict[str, Any] = Field(default_factory=dict, description="Settings of all runs.")
    grid: dict[str, list[Any]] = Field(
        default_factory=dict,
        description="Axes: a setting, and the values that it takes; or any name that stands in braces in a setting: conv{depth}.",
    )
    lines: tuple[Line, ...] = Field(
        min_length=1, description="Kinds of runs; each varies over the grid."
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0,), min_length=1, description="Each run is done with each of these seeds."
    )
    figure: Figure | None = Field(None, description="How `mptify plot` draws the results.")
    about: dict[str, Any] = Field(
        default_factory=dict, description="What the sweep reproduces; nothing depends on it."
    )


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its line, where it stands on each axis (None where its line has no such axis), its seed and its recipe."""

    name: str
    line: str
    place: dict[str, Any]
    seed: int
    recipe: Recipe


# -- what to run -----------------------------------------------------------------------------------------------------------------


def sweep_names() -> list[str]:
    """The sweeps that come with mptify."""
    return sorted(path.stem for path in (recipe_folder() / "sweeps").glob("*.yaml"))


def find_sweep(name: str) -> Sweep:
    """A sweep from a file, or one that comes with mptify."""
    path = Path(name) if Path(name).is_file() else recipe_folder() / "sweeps" / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(name, sweep_names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sweep_names())}."
        raise BadConfig(f"There is no sweep {name!r}; {hint}")
    settings, _ = find_recipe(str(path))
    try:
        return _consistent(checked(Sweep, settings))
    except BadConfig as error:
        raise BadConfig(f"{name}: {error}") from None


def _consistent(sweep: Sweep) -> Sweep:
    names = [line.name for line in sweep.lines]
    for name in names:
        if names.count(name) > 1:
            raise BadConfig(f"lines: there are two of the name {name!r}.")
    for axis, values in sweep.grid.items():
        if not values or len({str(value) for value in values}) < len(values):
            raise BadConfig(f"grid.{axis}: should be a list of different values.")
    drawn = (sweep.figure.x, sweep.figure.panel) if sweep.figure else ()
    named = [
        (f"lines: {line.name}: axes", axis) for line in sweep.lines for axis in line.axes or ()
    ]
    named += [("figure", axis) for axis in drawn if axis is not None]
    for where, axis in named:
        if axis not in sweep.grid:
            raise BadConfig(
                f"{where}: the grid has no axis {axis!r}; there are {', '.join(sweep.grid) or 'none'}."
            )
    return sweep


def cells_of(sweep: Sweep, changes: Mapping[str, Any]) -> list[Cell]:
    """All runs of a sweep, the first seed's first, each with its checked recipe. `changes` are settings of all runs, and win."""
    cells = []
    for seed, line in itertools.product(sweep.seeds, sweep.lines):
        axes = (
            list(sweep.grid)
            if line.axes is None
            else [axis for axis in sweep.grid if axis in line.axes]
        )
        for values in itertools.product(*(sweep.grid[axis] for axis in axes)):
            place = dict(zip(axes, values, strict=True))
            name = _name_of(line.name, place, seed)
            base = line.recipe or sweep.recipe
            settings, origin = find_recipe(base) if base else ({}, name)
            own = _filled({**sweep.set, **line.set}, place, line.name)
            for key, value in {
                **own,
                "seed": seed,
                "ticket.seed": seed,
                "baseline": None,
                **changes,
            }.items():
                settings = with_setting(settings, key, value)
            cells.append(
                Cell(
                    name,
                    line.name,
                    {axis: place.get(axis) for axis in sweep.grid},
                    seed,
                    make_recipe(settings, origin),
                )
            )
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        raise BadConfig(
            "Two runs of the sweep would have the same name; the names of its lines are too much alike."
        )
    return cells


def _filled(settings: Mapping[str, Any], place: Mapping[str, Any], line: str) -> dict[str, Any]:
    """Settings with the place on each axis: put in where a setting has its name in braces, else a setting itself."""
    filled, used = {}, set()
    for key, value in settings.items():
        names = re.findall(r"{([^{}]*)}", value) if isinstance(value, str) else []
        for axis in names:
            if axis not in place:
                raise BadConfig(
                    f"lines: {line}: {key}={value!r} needs the axis {axis!r}, and these runs don't vary over it."
                )
            value = value.replace(f"{{{axis}}}", str(place[axis]))
        used |= set(names)
        filled[key] = value
    return filled | {axis: value for axis, value in place.items() if axis not in used}


def _name_of(line: str, place: Mapping[str, Any], seed: int) -> str:
    """A name that a folder can have: `mpt-1-32_conv4_prune0.8_seed0`."""
    parts = [
        line,
        *(
            f"{'' if axis == 'model' else axis.rpartition('.')[2]}{value}"
            for axis, value in place.items()
        ),
        f"seed{seed}",
    ]
    return "_".join(
        re.sub(r"[^A-Za-z0-9.]+", "-", str(part).rpartition(":")[2]).strip("-").lower()
        for part in parts
    )


# -- running it ------------------------------------------------------------------------------------------------------------------


def run_sweep(
    sweep: Sweep,
    cells: list[Cell],
    folder: Path,
    jobs: int | None = None,
    threads: int | None = None,
    tell: Callable[[Cell, dict[str, Any]], None] = lambda cell, row: None,
) -> list[dict[str, Any]]:
    """Run what is not done yet, `jobs` at a time (as many as there are GPUs, or one), and return the rows of results.csv.

    A run that was stopped goes on; one that fails is noted, and the others go on. `tell` hears of each run that ends.
    """
    import torch

    devices = torch.cuda.device_count()
    jobs = jobs or max(1, devices)
    _require_same(sweep, cells, folder)
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    write_whole(
        folder / "sweep.yaml",
        yaml.safe_dump(sweep.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
    )
    rows = {cell.name: row_of(cell, folder) for cell in cells}
    write_results(folder, list(rows.values()))
    waiting = [cell for cell in cells if rows[cell.name]["state"] != "done"]
    free = list(range(jobs))  # places, each with a GPU of its own as far as there are some
    running: dict[Future[str], tuple[Cell, int]] = {}
    alive: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while waiting or running:
                while waiting and free:
                    cell, place = waiting.pop(0), free.pop(0)
                    device = str(place % devices) if devices else None
                    running[pool.submit(_search, cell, folder, threads, device, alive)] = (
                        cell,
                        place,
                    )
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    cell, place = running.pop(future)
                    free.append(place)
                    rows[cell.name] = row_of(cell, folder, future.result())
                    write_results(folder, list(rows.values()))
                    tell(cell, rows[cell.name])
        except BaseException:
            for process in list(alive):
                process.terminate()  # which saves, so that it can go on
            raise
    return list(rows.values())


def _search(
    cell: Cell,
    folder: Path,
    threads: int | None,
    device: str | None,
    alive: set[subprocess.Popen[bytes]],
) -> str:
    """One run in a process of its own, which is among those `alive` meanwhile; what it said last, if it failed."""
    run, log, recipe = (folder / "runs" / f"{cell.name}{end}" for end in ("", ".log", ".yaml"))
    command = [sys.executable, "-m", "mptify", "search", "--out", str(run)]
    if (run / "recipe.yaml").exists():
        command.append("--resume")
    else:
        write_whole(recipe, to_yaml(cell.recipe))
        command += ["--recipe", str(recipe)]
    if threads is not None:
        command += ["--threads", str(threads)]
    with log.open("ab") as output:
        environment = os.environ | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        alive.add(process)
        try:
            code = process.wait()
        finally:
            alive.discard(process)
    recipe.unlink(missing_ok=True)
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    return (
        ""
        if code == 0
        else (last[0] if last else f"ended with code {code}").removeprefix("mptify: ")
    )


def _require_same(sweep: Sweep, cells: list[Cell], folder: Path) -> None:
    """Raise before anything runs if the folder holds runs of the same names with other settings."""
    if folder.exists() and not (folder / "sweep.yaml").exists() and any(folder.iterdir()):
        raise MptifyError(
            f"{folder} is not empty, and a sweep needs a folder of its own; choose another --out."
        )
    for cell in cells:
        run = Run(folder / "runs" / cell.name)
        if run.recipe.exists():
            try:
                run.require_same(cell.recipe.model_dump(mode="json"))
            except MptifyError as error:
                raise MptifyError(f"{error} Choose another --out, or remove that folder.") from None


# -- results ---------------------------------------------------------------------------------------------------------------------


def row_of(cell: Cell, folder: Path, error: str = "") -> dict[str, Any]:
    """What results.csv says of a run: its place in the sweep, and what came of it so far."""
    row: dict[str, Any] = {
        "run": cell.name,
        "line": cell.line,
        **cell.place,
        "seed": cell.seed,
        **dict.fromkeys(_RESULTS),
    }
    run = Run(folder / "runs" / cell.name)
    metrics = run.read_metrics()
    state = (
        "done"
        if run.recipe.exists() and run.has_summary
        else "failed"
        if error
        else "begun"
        if metrics
        else "waiting"
    )
    row |= {"state": state, "error": error or None, "epochs": len(metrics)}
    if metrics:
        row |= {
            "top1": round(100 * metrics[-1]["val_accuracy"], 4),
            "best": round(100 * max(one["val_accuracy"] for one in metrics), 4),
            "loss": round(metrics[-1]["val_loss"], 6),
            "seconds": round(sum(one["seconds"] for one in metrics), 1),
        }
    if state == "done" and not cell.recipe.trains_weights:
        from mptify.ticket import read

        ticket = read(run.ticket("last"))
        row |= {"kept": ticket.kept, "weights": ticket.count}
    return row


def write_results(folder: Path, rows: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / "results.csv", text.getvalue())


def read_results(path: Path) -> tuple[list[dict[str, str]], Figure | None, list[str]]:
    """The rows of a results.csv, or of a sweep's folder; how the sweep says that they are drawn; and its axes."""
    path = path / "results.csv" if path.is_dir() else path
    if not path.is_file():
        raise MptifyError(f"{path}: there is no such file; `mptify sweep` writes it.")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = list(rows[0]) if rows else []
    missing = [name for name in ("line", "seed", "state", "top1") if name not in columns]
    if missing:
        raise MptifyError(
            f"{path}: this is no table of a sweep's results; it has no column {missing[0]!r}."
        )
    beside = path.with_name("sweep.yaml")
    figure = find_sweep(str(beside)).figure if beside.is_file() else None
    return rows, figure, columns[columns.index("line") + 1 : columns.index("seed")]
