"""`mptify recipes`: the recipes that come with mptify, and what each of them reproduces."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

__all__ = ["facts_of", "recipes"]


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Print this recipe, and the command that runs it."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the facts as JSON; of one recipe, with all its settings."
        ),
    ] = False,
) -> None:
    """List the recipes: network, bits, what of the paper they reproduce, and the top-1 that it reports."""
    from mptify.cli.console import console
    from mptify.config import make_recipe
    from mptify.recipe_files import find_recipe, recipe_names, recipe_text

    if name is None:
        listed = [facts_of(one, make_recipe(*find_recipe(one))) for one in recipe_names()]
        if as_json:
            typer.echo(json.dumps(listed, indent=1, ensure_ascii=False))
        else:
            out = console()
            out.print(_table(listed, out.width))
            if out.is_terminal:
                out.print(
                    "\nmptify search --recipe NAME runs one; mptify recipes NAME prints it, with its whole command.",
                    highlight=False,
                )
        return
    recipe = make_recipe(*find_recipe(name))
    facts = facts_of(name, recipe)
    if as_json:
        typer.echo(
            json.dumps(
                {**facts, "settings": recipe.model_dump(mode="json")}, indent=1, ensure_ascii=False
            )
        )
    else:  # one YAML file still, if it is sent to one
        typer.echo(f"{recipe_text(name).rstrip()}\n\n# {facts['command']}")


def facts_of(name: str, recipe: Any) -> dict[str, Any]:
    """What is said of a recipe. A dense network has neither bits nor a pruned fraction to speak of."""
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


def _table(listed: list[dict[str, Any]], width: int) -> Any:
    from rich.table import Table
    from rich.text import Text

    from mptify.surgery.model_summary import columns_for

    everything = ("recipe", "network", "bits", "pruned", "reproduces", "top-1")
    columns = columns_for(width, everything, {"network": 80, "pruned": 62, "bits": 54})
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in ("pruned", "top-1") else "left",
            no_wrap=column != "reproduces",
        )
    for facts in listed:
        top1 = facts["about"].get("top1")
        cells = {
            "recipe": facts["name"],
            "network": facts["model"].partition(":")[2],
            "bits": facts["bits"] or "dense",
            "pruned": "–" if facts["prune"] is None else f"{100 * facts['prune']:g} %",
            "reproduces": _places(facts["about"]),
            "top-1": "–" if top1 is None else f"{top1:g}",
        }
        table.add_row(*(Text(cells[column]) for column in columns))
    return table


def _places(about: dict[str, Any]) -> str:
    """`table 1` and `table 8` become `tables 1, 8`."""
    places = [place.split() for place in about.get("reproduces", ())]
    if not places:
        return about.get("what", "–")
    return f"{places[0][0]}{'s' if len(places) > 1 else ''} {', '.join(number for _, number in places)}"
