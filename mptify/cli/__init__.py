"""The command line: one file per command. The only place that prints or exits."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Annotated, Any

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
from mptify.registry import import_plugin

__all__ = ["app", "main"]

app = typer.Typer(
    name="mptify",
    help="Multi-prize lottery tickets of any torchvision or timm network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
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
def _before_every_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)
    ] = False,
    plugins: Annotated[
        list[str] | None,
        typer.Option(
            "--plugin",
            metavar="MODULE",
            help="Import a module that registers variants. May be repeated.",
        ),
    ] = None,
) -> None:
    if version:
        from mptify import __version__

        typer.echo(__version__)
        raise typer.Exit
    for plugin in plugins or ():
        import_plugin(plugin)


def main() -> None:
    """Run the command line: an error that a user can act on is one sentence, with exit code 1; a wrong call has 2."""
    try:
        code = _run(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except MptifyError as error:
        rank = os.environ.get("RANK", "0")
        code = _tell(f"mptify: {error}" if rank == "0" else f"mptify (process {rank}): {error}", 1)
    except (
        BrokenPipeError
    ):  # the reader of our output went away, as `| head` does: what was asked for is not done
        code = 1
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        code = _tell(
            f"mptify: {error.filename or 'the output'} can't be written ({error.strerror}).", 1
        )
    _let_go_of_streams()
    if _is_one_of_several():
        # At its end Python stops every thread that asks for its lock, torch's communication threads among them, and now and then
        # one of those takes the process with it ("terminate called without an active exception"): after a search that succeeded.
        os._exit(code)
    sys.exit(code)


def _is_one_of_several() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return (
        distributed is not None
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO}
_ClickException: Any = typer.BadParameter.__mro__[
    2
]  # click's own, or that of the copy which typer has


def _run(arguments: list[str]) -> int:
    """As typer does, but Ctrl-C is left to the caller, and a wrong call is one sentence instead of a box."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("mptify", arguments or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except _ClickException as error:
        where = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError" and where is not None:
            typer.echo(where.get_help())
            return 2
        path = where.command_path if where is not None else "mptify"
        said = " ".join(error.format_message().split()).rstrip(".")
        hint = "" if said.endswith("?") else f"; `{path} --help` shows what it takes."
        return _tell(f"{path}: {said}{hint}", 2)
    return 0


def _tell(text: str, code: int) -> int:
    """One line for the user, if anybody can read it; and the exit code."""
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)
    return code


def _let_go_of_streams() -> None:
    """What could not be written will not be at the interpreter's end either, and need not be said twice."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
