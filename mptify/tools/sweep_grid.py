"""Sweeps: the grid of settings in a YAML file, and the runs that it stands for."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mptify.config import Recipe, as_tuple, checked, make_recipe
from mptify.errors import BadConfig
from mptify.recipe_files import find_recipe, recipe_folder, with_setting

__all__ = ["Cell", "Figure", "Line", "Sweep", "cells_of", "find_sweep", "sweep_names"]


class Line(BaseModel):
    """One kind of runs, such as `MPT-1/32` or `dense`. A plot draws one or more lines for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, description="Its name in the plot.")
    recipe: str | None = Field(
        None, description="The recipe of these runs; the sweep's by default."
    )
    set: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of these runs: {method: dense, ticket.prune: 0.8}.",
    )
    axes: Annotated[tuple[str, ...] | None, BeforeValidator(as_tuple)] = Field(
        None, description="The axes of the grid along which these runs vary; all by default."
    )


class Figure(BaseModel):
    """How `mptify plot` draws the results."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    x: str = Field(
        description="The axis of the grid on the x-axis. Lines that do not vary along it are drawn "
        "dashed over the whole width."
    )
    panel: str | None = Field(
        None, description="The axis of the grid that gets a panel for each value."
    )
    title: str = Field("", description="The title.")


class Sweep(BaseModel):
    """A grid of searches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str | None = Field(None, description="The recipe of all runs.")
    set: dict[str, Any] = Field(default_factory=dict, description="Settings of all runs.")
    grid: dict[str, list[Any]] = Field(
        default_factory=dict,
        description="Axes: a setting and its values. Or any name and its values, if a setting has "
        "the name in braces: conv{depth}.",
    )
    lines: tuple[Line, ...] = Field(
        min_length=1, description="Kinds of runs; each varies along the grid."
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0,), min_length=1, description="Each combination is run with each of these seeds."
    )
    figure: Figure | None = Field(None, description="How `mptify plot` draws the results.")
    about: dict[str, Any] = Field(
        default_factory=dict, description="What the sweep reproduces; nothing depends on it."
    )


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        name: The name of its folder.
        line: The name of its line.
        place: Its value on each axis; None if its line does not vary along the axis.
        seed: Its seed.
        recipe: Its checked recipe.
    """

    name: str
    line: str
    place: dict[str, Any]
    seed: int
    recipe: Recipe


def sweep_names() -> list[str]:
    """The names of the built-in sweeps."""
    return sorted(path.stem for path in (recipe_folder() / "sweeps").glob("*.yaml"))


def find_sweep(name: str) -> Sweep:
    """Read a sweep.

    Args:
        name: A YAML file, or the name of a built-in sweep.

    Returns:
        The checked sweep.

    Raises:
        BadConfig: There is no such sweep, or it is invalid.
    """
    path = Path(name) if Path(name).is_file() else recipe_folder() / "sweeps" / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(name, sweep_names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"choose {', '.join(sweep_names())}."
        raise BadConfig(f"There is no sweep {name!r}; {hint}")
    settings, _ = find_recipe(str(path))
    try:
        sweep = checked(Sweep, settings)
        _require_consistent(sweep)
    except BadConfig as error:
        raise BadConfig(f"{name}: {error}") from None
    return sweep


def _require_consistent(sweep: Sweep) -> None:
    names = [line.name for line in sweep.lines]
    for name in names:
        if names.count(name) > 1:
            raise BadConfig(f"lines: two lines have the name {name!r}.")
    for axis, values in sweep.grid.items():
        if not values or len({str(value) for value in values}) < len(values):
            raise BadConfig(f"grid.{axis}: should be a list of distinct values.")
    drawn = (sweep.figure.x, sweep.figure.panel) if sweep.figure else ()
    named = [
        (f"lines: {line.name}: axes", axis) for line in sweep.lines for axis in line.axes or ()
    ]
    named += [("figure", axis) for axis in drawn if axis is not None]
    for where, axis in named:
        if axis not in sweep.grid:
            axes = ", ".join(sweep.grid) or "none"
            raise BadConfig(f"{where}: the grid has no axis {axis!r}; its axes are {axes}.")


def cells_of(sweep: Sweep, changes: Mapping[str, Any]) -> list[Cell]:
    """List the runs of a sweep, ordered by seed.

    Args:
        sweep: The sweep.
        changes: Settings that override those of all runs.

    Returns:
        One cell per run.

    Raises:
        BadConfig: A recipe is invalid, or two runs would have the same name.
    """
    cells = []
    for seed, line in itertools.product(sweep.seeds, sweep.lines):
        axes = [axis for axis in sweep.grid if line.axes is None or axis in line.axes]
        for values in itertools.product(*(sweep.grid[axis] for axis in axes)):
            place = dict(zip(axes, values, strict=True))
            name = _name_of(line.name, place, seed)
            base = line.recipe or sweep.recipe
            settings, origin = find_recipe(base) if base else ({}, name)
            own = _filled({**sweep.set, **line.set}, place, line.name)
            fixed = {"seed": seed, "ticket.seed": seed, "baseline": None}
            for key, value in {**own, **fixed, **changes}.items():
                settings = with_setting(settings, key, value)
            whole_place = {axis: place.get(axis) for axis in sweep.grid}
            recipe = make_recipe(settings, origin)
            cells.append(Cell(name, line.name, whole_place, seed, recipe))
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        raise BadConfig("Two runs of the sweep would have the same name; rename one of its lines.")
    return cells


def _filled(settings: Mapping[str, Any], place: Mapping[str, Any], line: str) -> dict[str, Any]:
    """Add a run's place to its settings.

    An axis whose name is in braces in a setting is filled in there. Any other axis is a setting.
    """
    filled, used = {}, set()
    for key, value in settings.items():
        names = re.findall(r"{([^{}]*)}", value) if isinstance(value, str) else []
        for axis in names:
            if axis not in place:
                raise BadConfig(
                    f"lines: {line}: {key}={value!r} needs the axis {axis!r}, "
                    f"but these runs do not vary along it."
                )
            value = value.replace(f"{{{axis}}}", str(place[axis]))
        used |= set(names)
        filled[key] = value
    return filled | {axis: value for axis, value in place.items() if axis not in used}


def _name_of(line: str, place: Mapping[str, Any], seed: int) -> str:
    """The name of a run's folder: `mpt-1-32_conv4_prune0.8_seed0`."""
    values = (
        f"{'' if axis == 'model' else axis.rpartition('.')[2]}{value}"
        for axis, value in place.items()
    )
    return "_".join(
        re.sub(r"[^A-Za-z0-9.]+", "-", part.rpartition(":")[2]).strip("-").lower()
        for part in (line, *values, f"seed{seed}")
    )
