"""The commands that lead to a ticket once more: what differs from the defaults, spelt out."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mptify.config import Recipe, TicketConfig, make_recipe
from mptify.recipe_files import with_settings
from mptify.report.collect import ReportData
from mptify.ticket.codec import Ticket

__all__ = ["command_steps", "convert_command", "search_command"]

_FROM_PYTHON = """\
settings = yaml.safe_load(open('recipe.yaml'))
mptify.search(model, train, val, settings, out='again')"""


def command_steps(data: ReportData) -> list[tuple[str, str | None]]:
    """(What for, command) for everything one can do again; without a command, a sentence."""
    recipe, file, place = data.recipe, data.file, data.place
    steps: list[tuple[str, str | None]] = []
    if isinstance(recipe, Recipe):
        folder = place if place.is_dir() else place.with_suffix("")
        again = folder.with_name(f"{folder.name or 'run'}-again")
        what = "Train it again" if data.is_dense else "Search it again"
        steps.append((what, search_command(recipe, again)))
    elif recipe is not None:
        words = "It was searched from Python, with a network or data of the author’s own."
        steps.append((f"{words} With the recipe above in recipe.yaml", _FROM_PYTHON))
    elif file is not None:
        again = file.path.with_name(f"{file.path.stem}-again.ticket")
        command = convert_command(file.ticket, again)
        words = (
            "The model registry does not know its network. Convert it from Python: "
            "mptify.transform with the settings above, and mptify.save."
        )
        steps.append((words, None) if command is None else ("Convert it again", command))
    if data.curve is not None and not data.curve.finished:
        resume = _quoted("search", "--resume", "--out", place)
        steps.append(("Resume it", resume))
    if file is not None:
        given = [] if isinstance(recipe, Recipe) else ["--data", "SOURCE"]
        commands = [_quoted("eval", file.path, *given)]
        commands += [_quoted(command, file.path) for command in ("inspect", "verify")]
        steps.append(("Evaluate, inspect and verify it", "\n".join(commands)))
    return [*steps, ("Write this page again", _quoted("report", place))]


def search_command(recipe: Recipe, out: Path) -> str:
    """`mptify search ...` for this recipe; it needs no file but those that the recipe names."""
    settings = recipe.model_dump(mode="json")
    base: dict[str, Any] = {"model": recipe.model, "data": {"source": recipe.data.source}}
    usual = make_recipe(base).model_dump(mode="json")
    decisive = {"method": recipe.method, "optimizer": recipe.optimizer}
    bits = {"ticket": {"bits": recipe.ticket.bits}}
    usual["lr"] = make_recipe(base | decisive | bits).lr  # which depends on these
    words = ["search", recipe.model, "--data", recipe.data.source]
    changes = []
    for key, value in settings.items():
        if key in ("ticket", "data"):
            changed = [name for name in value if value[name] != usual[key][name]]
            changes += [f"{key}.{name}={_value(value[name])}" for name in changed]
        elif key not in ("about", "model", "baseline") and value != usual[key]:
            changes.append(f"{key}={_value(value)}")
    if recipe.baseline:
        changes.append(f"baseline={_value(recipe.baseline)}")
    elif recipe.baseline is not None:
        words.append("--baseline")
    for change in changes:
        words += ["--set", change]
    return _quoted(*words, "--out", out)


def convert_command(ticket: Ticket, out: Path) -> str | None:
    """`mptify convert ...` for a ticket that nobody searched.

    None if the model registry does not know its network.
    """
    built, config = ticket.architecture, ticket.config
    if built is None:
        return None
    words: list[Any] = ["convert", str(built), "--bits", config.bits]
    words += ["--prune", f"{config.prune:.15g}"]
    usual = TicketConfig.model_validate({})
    for name, value in config:
        option = f"--{name.replace('_', '-')}"
        if name in ("bits", "prune") or value == getattr(usual, name):
            continue
        if isinstance(value, dict):
            for pattern, number in value.items():
                words += [option, f"{pattern}={number:.15g}"]
        elif isinstance(value, tuple):
            words += [word for one in value for word in (option, one)]
        elif isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        else:
            words += [option, value]
    for name, value in built.arguments.items():
        words += [f"--{name.replace('_', '-')}", value]
    layers = ticket.layers.values()
    stored = any(layer.signs is not None or layer.values is not None for layer in layers)
    if config.init != "keep" and stored:
        words.append("--standalone")
    if any(value.dtype == np.float16 for value in ticket.floats.values()):
        words.append("--float16")
    return _quoted(*words, "--out", out)


def _quoted(*words: Any) -> str:
    """A command of mptify's as a shell takes it, an option to a line where there are many."""
    text = [shlex.quote(str(word)) for word in words]
    options = [place for place, word in enumerate(text) if word.startswith("--")]
    if len(options) <= 2:
        return " ".join(["mptify", *text])
    edges = [*options, len(text)]
    lines = [" ".join(text[start:end]) for start, end in itertools.pairwise(edges)]
    return " \\\n    ".join(["mptify " + " ".join(text[: options[0]]), *lines])


def _value(value: Any) -> str:
    """As `--set` reads it: plain where that says the same, else as JSON, which is YAML too."""
    text = str(value)
    is_plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    if is_plain and with_settings({}, [f"value={text}"])["value"] == value:
        return text
    said = json.dumps(value, ensure_ascii=False)
    return said if yaml.safe_load(said) == value else json.dumps(value)
