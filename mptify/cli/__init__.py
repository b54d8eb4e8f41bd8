"""The command line: one file per command. The only place that prints or exits."""

from __future__ import annotations

import os
import sys

import typer

from mptify.cli import (
    bench,
    card,
    convert,
    diff,
    evaluate,
    export,
    inspect,
    plot,
    predict,
    recipes,
    report,
    search,
    sweep,
    theory,
    verify,
    zoo,
)
from mptify.errors import MptifyError

__all__ = ["app", "main"]

app = typer.Typer(
    name="mptify",
    help="Multi-prize lottery tickets of any torchvision or timm network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("convert")(convert.convert)
app.command("search")(search.search)
app.command("recipes")(recipes.recipes)
app.command("sweep")(sweep.sweep)
app.command("plot")(plot.plot)
app.command("eval")(evaluate.evaluate)
app.command("report")(report.report)
app.command("predict")(predict.predict)
app.command("export")(export.export)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("diff")(diff.diff)
app.command("card")(card.card)
app.command("zoo")(zoo.zoo)
app.command("theory")(theory.theory)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and stop.", is_eager=True)) -> None:
    if version:
        from mptify import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; an error that a user can act on is one sentence and exit code 1."""
    try:
        app()
    except MptifyError as error:
        rank = os.environ.get("RANK", "0")
        typer.echo(f"mptify: {error}" if rank == "0" else f"mptify (process {rank}): {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("mptify: stopped at once.", err=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        sys.stderr.close()
        sys.exit(0)
