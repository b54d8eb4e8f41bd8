"""The command line, one file per command. Only this package prints or exits.

`mptify --help` must start fast. So a command's file holds its options and imports its
implementation, and with it torch, inside the function.
"""

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
    help="Find multi-prize lottery tickets in any torchvision or timm network.",
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
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
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
    """Run the command line and exit.

    An error that the user can fix prints one sentence and exits with code 1. A wrong command line
    exits with code 2.
    """
    try:
        code = _run(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except MptifyError as error:
        rank = os.environ.get("RANK", "0")
        code = _fail(f"mptify: {error}" if rank == "0" else f"mptify (process {rank}): {error}", 1)
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe; our output is incomplete
        code = 1
    except OSError as error:
        if error.errno not in _WRITE_ERRORS:
            raise
        code = _fail(
            f"mptify: {error.filename or 'the output'} can't be written ({error.strerror}).", 1
        )
    _discard_unwritten_output()
    if _is_distributed():
        # At exit, Python stops each thread that waits for its lock. One of torch's communication
        # threads may then abort the process ("terminate called without an active exception"),
        # although the search succeeded.
        os._exit(code)
    sys.exit(code)


def _is_distributed() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return (
        distributed is not None
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


_WRITE_ERRORS = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO}
# The class is click's, or that of the copy of click inside typer.
_ClickException: Any = typer.BadParameter.__mro__[2]


def _run(arguments: list[str]) -> int:
    """Run a command as typer does, but let Ctrl-C through and print usage errors as one line."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("mptify", arguments or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except _ClickException as error:
        failed = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError" and failed is not None:
            typer.echo(failed.get_help())
            return 2
        path = failed.command_path if failed is not None else "mptify"
        message = " ".join(error.format_message().split()).rstrip(".")
        hint = "" if message.endswith("?") else f"; `{path} --help` lists the options."
        return _fail(f"{path}: {message}{hint}", 2)
    return 0


def _fail(text: str, code: int) -> int:
    """Print one line to stderr if possible, and return the exit code."""
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)
    return code


def _discard_unwritten_output() -> None:
    """Redirect streams that can't be flushed, or Python reports the same error again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
