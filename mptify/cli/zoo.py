"""`mptify zoo`: convert the models of torchvision and timm in both modes and check the invariants."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["zoo"]

_ROWS = Path("zoo/rows.jsonl")


def zoo(
    everything: Annotated[
        bool, typer.Option("--all", help="Every model of torchvision and timm.")
    ] = False,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--filter",
            help="Only the models whose name this pattern matches, such as 'timm:vit_*'.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to use.")] = os.cpu_count() or 1,
    rows: Annotated[
        Path,
        typer.Option(
            help="Where a row per model is kept; a sweep goes on from what it finds there."
        ),
    ] = _ROWS,
    table: Annotated[
        Path | None, typer.Option(help="Write the coverage table (Markdown) of all rows.")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Check those again that failed.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the names and stop.")] = False,
) -> None:
    """Convert models in both modes, check the invariants and keep a row for each.

    An interrupted sweep goes on where it was; one bad model never stops it. The exit code is 1 if any model failed.
    """
    from mptify.cli.console import console
    from mptify.errors import BadConfig
    from mptify.files import check_writable, write_whole
    from mptify.models import registry
    from mptify.tools import zoo_check

    chosen = [
        entry for entry in registry.all_entries() if pattern is None or _matches(entry, pattern)
    ]
    if not chosen:
        raise BadConfig(
            f"--filter {pattern!r} matches no model; `mptify zoo --list` shows all names."
        )
    if names:
        typer.echo("\n".join(str(entry) for entry in chosen))
        return
    if not everything and pattern is None:
        raise BadConfig(
            "Say which models: --all, or --filter PATTERN, such as --filter 'torchvision:resnet*'."
        )
    if table is not None:
        check_writable(table)
    made_before = zoo_check.read_rows(rows)
    rows.parent.mkdir(parents=True, exist_ok=True)
    check_writable(rows)
    if retry:
        good = [row for row in made_before if zoo_check.passed(row)]
        write_whole(rows, "".join(zoo_check.as_line(row) for row in good))
    wanted = {str(entry) for entry in chosen}
    try:
        _sweep(chosen, rows, jobs, console())
    except KeyboardInterrupt:
        typer.echo(f"Interrupted; the same command goes on from {rows}.", err=True)
        raise typer.Exit(130) from None
    finally:
        made = zoo_check.read_rows(rows)
        if table is not None:
            write_whole(table, zoo_check.markdown(made))
    made = [row for row in made if row["model"] in wanted]
    totals = zoo_check.summary(made)
    typer.echo(
        f"{totals['converted']} of {totals['models']} convert in both modes, {totals['passed']} pass every check, "
        f"{totals['run']} were run; {100 * totals['share']:.4f} % of all weights converted"
    )
    if totals["passed"] < totals["models"]:
        raise typer.Exit(1)


def _matches(entry: Any, pattern: str) -> bool:
    return fnmatchcase(str(entry), pattern) or fnmatchcase(entry.name, pattern)


def _sweep(chosen: list[Any], rows: Path, jobs: int, console: Any) -> None:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from mptify.tools import zoo_check

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    have = {row["model"] for row in zoo_check.read_rows(rows)}
    left = sum(str(entry) not in have for entry in chosen)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(chosen), completed=len(chosen) - left)

        def done(row: dict[str, Any]) -> None:
            verdict = "ok" if zoo_check.passed(row) else row.get("error") or _failures(row)
            progress.update(task, advance=1, description=row["model"])
            if verdict != "ok" or not console.is_terminal:
                progress.console.print(
                    f"{row['model']}: {verdict} ({row['seconds']} s)", markup=False
                )

        zoo_check.sweep(chosen, rows, jobs, done)


def _failures(row: dict[str, Any]) -> str:
    failed = [
        (check, bits, names)
        for bits, mode in row["modes"].items()
        for check, names in mode["failed"].items()
    ]
    return "; ".join(f"{check} in {bits}: {', '.join(names)}" for check, bits, names in failed)
