"""`mptify zoo`: convert the models of torchvision and timm and check the results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["zoo"]

_ROWS = Path("zoo/rows.jsonl")


def zoo(
    everything: Annotated[
        bool, typer.Option("--all", help="Check every model of torchvision and timm.")
    ] = False,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--filter",
            help="Check the models whose name matches this pattern, such as 'timm:vit_*'.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to use.")] = os.cpu_count() or 1,
    rows: Annotated[
        Path,
        typer.Option(help="The file with one row per model; models that have a row are skipped."),
    ] = _ROWS,
    table: Annotated[
        Path | None, typer.Option(help="Write a table of all rows to this Markdown file.")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Check failed models again.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the names and exit.")] = False,
) -> None:
    """Convert models in both modes, check the invariants and write a row for each model.

    The same command continues an interrupted check. A model that fails does not stop it. The exit
    code is 1 if any model failed.
    """
    from mptify.cli.zoo_run import matching_models, run_zoo_check
    from mptify.errors import BadConfig

    models = matching_models(pattern)
    if names:
        typer.echo("\n".join(map(str, models)))
    elif everything or pattern is not None:
        run_zoo_check(models, rows, jobs=jobs, table=table, retry=retry)
    else:
        raise BadConfig(
            "Choose models: --all, or --filter PATTERN, such as --filter 'torchvision:resnet*'."
        )
