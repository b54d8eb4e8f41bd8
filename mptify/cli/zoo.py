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
    bits: Annotated[
        list[str] | None,
        typer.Option(
            "--bits",
            help="A mode: 1/32, 1/8, 1/4, 1/2 or 1/1. May be repeated; 1/32 and 1/1 by default.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to use.")] = os.cpu_count() or 1,
    rows: Annotated[
        Path, typer.Option(help="The file of rows; a model is not checked again in modes it has.")
    ] = _ROWS,
    table: Annotated[
        Path | None, typer.Option(help="Write a table of all rows to this Markdown file.")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Check failed models again.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the names and exit.")] = False,
) -> None:
    """Convert models in several modes, check the invariants and write a row for each model.

    1/1 removes 75 % of the weights, the other modes 80 %. The same command continues an interrupted
    check; with other --bits, it adds these modes to the file. Totals, table and exit code are those
    of the whole file. A model that fails does not stop the check; the exit code is then 1.
    """
    from mptify.cli.zoo_run import checked_bits, matching_models, run_zoo_check
    from mptify.errors import BadConfig

    modes = checked_bits(bits)
    models = matching_models(pattern)
    if names:
        typer.echo("\n".join(map(str, models)))
    elif everything or pattern is not None:
        run_zoo_check(models, modes, rows, jobs=jobs, table=table, retry=retry)
    else:
        raise BadConfig(
            "Choose models: --all, or --filter PATTERN, such as --filter 'torchvision:resnet*'."
        )
