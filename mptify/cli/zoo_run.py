"""What `mptify zoo` does with its options."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mptify.cli.console import console
from mptify.errors import BadConfig
from mptify.files import check_writable, write_whole
from mptify.models import registry
from mptify.models.registry import Entry
from mptify.tools import zoo_check, zoo_rows, zoo_table
from mptify.tools.zoo_rows import Row

__all__ = ["checked_bits", "matching_models", "run_zoo_check"]


def matching_models(pattern: str | None) -> list[Entry]:
    """The models whose name, with or without its source, matches a pattern; all for None."""
    models = [
        entry
        for entry in registry.all_entries()
        if pattern is None or fnmatchcase(str(entry), pattern) or fnmatchcase(entry.name, pattern)
    ]
    if not models:
        raise BadConfig(
            f"--filter {pattern!r} matches no model; `mptify zoo --list` lists all names."
        )
    return models


def checked_bits(given: Sequence[str] | None) -> tuple[str, ...]:
    """The modes to check, each once and in the order of their widths; the usual two for None."""
    if not given:
        return zoo_rows.DEFAULT_BITS
    for bits in given:
        if bits not in zoo_rows.PRUNE:
            raise BadConfig(f"--bits {bits}: should be one of {', '.join(zoo_rows.PRUNE)}.")
    return tuple(bits for bits in zoo_rows.PRUNE if bits in given)


def run_zoo_check(
    models: list[Entry],
    bits: Sequence[str],
    rows: Path,
    *,
    jobs: int,
    table: Path | None,
    retry: bool,
) -> None:
    """Check models, print the totals and write a table, of all modes in the file of rows.

    Args:
        models: The models to check.
        bits: The bits of each mode.
        rows: The file of rows. Models are only checked in the modes in which they have no row.
        jobs: Processes to use.
        table: The Markdown file to write, if any.
        retry: Whether to check failed models again.

    Raises:
        typer.Exit: With code 1 if a model failed, with code 130 after Ctrl-C.
    """
    if table is not None:
        check_writable(table)
    earlier = zoo_rows.read_rows(rows)
    rows.parent.mkdir(parents=True, exist_ok=True)
    check_writable(rows)
    if retry:
        passed = [row for row in earlier if zoo_rows.passed(row)]
        write_whole(rows, "".join(map(zoo_rows.as_line, passed)))
    try:
        _check(models, bits, rows, jobs)
    except KeyboardInterrupt:
        typer.echo(f"Interrupted; the same command continues from {rows}.", err=True)
        raise typer.Exit(130) from None
    finally:
        checked = zoo_rows.merged(zoo_rows.read_rows(rows))
        if table is not None:
            write_whole(table, zoo_table.markdown(checked))
    names = {str(entry) for entry in models}
    totals = zoo_table.summary([row for row in checked if row["model"] in names])
    typer.echo(
        f"{totals['converted']} of {totals['models']} convert in "
        f"{zoo_table.modes_in_words(totals['bits'])}, "
        f"{totals['passed']} pass every check, {totals['run']} were run; "
        f"{100 * totals['share']:.4f} % of all weights converted"
    )
    if totals["passed"] < totals["models"]:
        raise typer.Exit(1)


def _check(models: list[Entry], bits: Sequence[str], rows: Path, jobs: int) -> None:
    """Check the models that lack a mode, with a progress bar on a terminal."""
    out = console()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    earlier = zoo_rows.read_rows(rows)
    skipped = sum(not zoo_rows.missing_bits(str(entry), bits, earlier) for entry in models)
    with Progress(*columns, console=out, disable=not out.is_terminal) as progress:
        task = progress.add_task("", total=len(models), completed=skipped)

        def on_row(row: Row) -> None:
            passed = zoo_rows.passed(row)
            progress.update(task, advance=1, description=row["model"])
            if not passed or not out.is_terminal:
                verdict = "ok" if passed else row.get("error") or _failures(row)
                progress.console.print(
                    f"{row['model']}: {verdict} ({row['seconds']} s)", markup=False
                )

        zoo_check.check_all(models, rows, jobs, on_row, bits)


def _failures(row: Row) -> str:
    return "; ".join(
        f"{check} in {bits}: {', '.join(names)}"
        for bits, mode in row["modes"].items()
        for check, names in mode["failed"].items()
    )
