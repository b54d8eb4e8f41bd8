"""What `mptify recipes` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from mptify.cli.console import console
from mptify.cli.tables import Column, make_table
from mptify.config import Recipe, make_recipe
from mptify.recipe_files import find_recipe, recipe_names, recipe_text

__all__ = ["print_recipe", "print_recipes", "recipe_info", "recipe_table"]


def print_recipes(as_json: bool) -> None:
    """Print a table of all recipes, or JSON."""
    infos = [recipe_info(name, make_recipe(*find_recipe(name))) for name in recipe_names()]
    if as_json:
        typer.echo(json.dumps(infos, indent=1, ensure_ascii=False))
        return
    out = console()
    out.print(recipe_table(infos, out.width))
    if out.is_terminal:
        out.print(
            "\n`mptify search --recipe NAME` runs a recipe; `mptify recipes NAME` prints it.",
            highlight=False,
        )


def print_recipe(name: str, as_json: bool) -> None:
    """Print one recipe and its command. The text is valid YAML; with `as_json`, it is JSON."""
    recipe = make_recipe(*find_recipe(name))
    info = recipe_info(name, recipe)
    if as_json:
        settings = recipe.model_dump(mode="json")
        typer.echo(json.dumps({**info, "settings": settings}, indent=1, ensure_ascii=False))
    else:
        typer.echo(f"{recipe_text(name).rstrip()}\n\n# {info['command']}")


def recipe_info(name: str, recipe: Recipe) -> dict[str, Any]:
    """Describe a recipe.

    Args:
        name: Its name.
        recipe: Its settings.

    Returns:
        Its most important settings and its command. Bits, prune rate and `learn_bn` are None for
        dense training.
    """
    dense = recipe.trains_weights
    source = recipe.data.source
    data = "" if ":" in source or source == "digits" else f" --data {source}:FOLDER"
    return {
        "name": name,
        "model": recipe.model,
        "method": recipe.method,
        "bits": None if dense else recipe.ticket.bits,
        "prune": None if dense else recipe.ticket.prune,
        "learn_bn": None if dense else recipe.ticket.learn_bn,
        "data": source,
        "about": recipe.about,
        "command": f"mptify search --recipe {name}{data}",
    }


def recipe_table(infos: Sequence[dict[str, Any]], width: int) -> Table:
    """The table of recipes, without the columns that don't fit into `width`."""
    columns = [
        Column("recipe", lambda info: Text(info["name"]), left=True),
        Column("network", _network, left=True, min_width=80),
        Column("bits", lambda info: Text(info["bits"] or "dense"), left=True, min_width=54),
        Column("pruned", _pruned, min_width=62),
        Column("reproduces", lambda info: Text(_reproduces(info["about"])), left=True, wraps=True),
        Column("top-1", _top1),
    ]
    return make_table(columns, infos, width=width, header_style="bold")


def _network(info: dict[str, Any]) -> Text:
    return Text(info["model"].partition(":")[2])


def _pruned(info: dict[str, Any]) -> str:
    return "–" if info["prune"] is None else f"{100 * info['prune']:g} %"


def _top1(info: dict[str, Any]) -> str:
    top1 = info["about"].get("top1")
    return "–" if top1 is None else f"{top1:g}"


def _reproduces(about: dict[str, Any]) -> str:
    """The tables that a recipe reproduces: `table 1` and `table 8` become `tables 1, 8`."""
    places = [place.split() for place in about.get("reproduces", ())]
    if not places:
        return about.get("what", "–")
    plural = "s" if len(places) > 1 else ""
    return f"{places[0][0]}{plural} {', '.join(number for _, number in places)}"
