"""The recipe of `mptify search`: recipe file, ticket or network, data, options and `--set`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mptify.config import Recipe, make_recipe
from mptify.errors import BadConfig
from mptify.recipe_files import find_recipe, with_setting, with_settings
from mptify.ticket.state import read
from mptify.training.run_folder import Run

__all__ = ["recipe_from_options", "recipe_of_run"]

_QUESTIONS = {
    "model": "which network? For instance mptify:conv4 or timm:resnet18.",
    "data": "which images? For instance --data imagefolder:photos.",
}


def recipe_from_options(
    start: str | None,
    recipe: str | None,
    data: str | None,
    options: Mapping[str, Any],
    changes: Sequence[str],
    baseline: bool | None,
) -> Recipe:
    """Build the recipe of a new search. Later arguments override earlier ones.

    Args:
        start: A ticket file to continue from, or the name of a network.
        recipe: The name or the file of a recipe.
        data: The source of the images.
        options: Settings by key, such as `{"ticket.prune": 0.9}`.
        changes: Settings as text, such as `["lr=0.05"]`.
        baseline: Whether to train the dense network too; None leaves that to the recipe.

    Returns:
        The checked recipe.

    Raises:
        BadConfig: A setting is missing or invalid.
    """
    settings: dict[str, Any] = {}
    origin = ""
    if recipe is not None or (start is None and data is None):
        settings, origin = find_recipe(recipe or "digits")
    if start is not None and Path(start).is_file():
        settings, origin = _continue_ticket(start, settings, origin, has_recipe=recipe is not None)
    elif start is not None:
        settings = {**settings, "model": _require_network_name(start)}
    if data is not None:
        current = settings.get("data") or {}
        kept = {} if isinstance(current, str) else current
        settings = {**settings, "data": {**kept, "source": data}}
    if baseline is not None:
        settings = {**settings, "baseline": (settings.get("baseline") or {}) if baseline else None}
    for key, value in options.items():
        settings = with_setting(settings, key, value)
    settings = with_settings(settings, changes)
    _require_complete(settings, origin)
    return make_recipe(settings, origin)


def recipe_of_run(folder: Path) -> Recipe:
    """Read the recipe of the run in `folder`, to resume it."""
    settings, origin = find_recipe(str(Run.again(folder).recipe))
    _require_complete(
        settings, f"{origin} (mptify.search(..., resume=True) continues a run that it began)"
    )
    return make_recipe(settings, origin)


def _continue_ticket(
    path: str, settings: dict[str, Any], origin: str, *, has_recipe: bool
) -> tuple[dict[str, Any], str]:
    """Settings that continue from a ticket, with the recipe of its own search if none is given."""
    ticket = read(path)
    searched = ticket.notes.get("recipe")
    if not has_recipe and isinstance(searched, dict):
        settings, origin = {**searched, "baseline": None}, path
    if ticket.architecture is None:
        raise BadConfig(
            f"{path}: the ticket does not name its network; "
            f"mptify.search(model, ...) continues from a ticket model."
        )
    settings = {
        **settings,
        "model": str(ticket.architecture),
        "ticket": ticket.config.model_dump(mode="json"),
        "start": str(Path(path).resolve()),
    }
    if ticket.config.weight_bits != 1:
        settings["method"] = "edgepopup"
    return settings, origin


def _require_network_name(name: str) -> str:
    if re.match(r"[\w.]+=", name):
        raise BadConfig(f"{name} is not a network; --set {name} changes a setting.")
    if "/" in name or name.endswith(".ticket"):
        if Path(name).is_dir():
            read(name)  # raises, and names the ticket in the folder
        raise BadConfig(f"{name}: there is no such file.")
    return name


def _require_complete(settings: Mapping[str, Any], origin: str) -> None:
    for key, question in _QUESTIONS.items():
        if key not in settings:
            raise BadConfig(f"{origin + ': ' if origin else ''}{key} is missing: {question}")
