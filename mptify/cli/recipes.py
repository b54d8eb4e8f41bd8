"""`mptify recipes`: list the built-in recipes, or print one."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["recipes"]


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Print this recipe and the command that runs it."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; for one recipe, with all its settings.")
    ] = False,
) -> None:
    """List the recipes: network, bits, which part of the paper they reproduce, and its top-1."""
    from mptify.cli.recipes_run import print_recipe, print_recipes

    if name is None:
        print_recipes(as_json)
    else:
        print_recipe(name, as_json)
