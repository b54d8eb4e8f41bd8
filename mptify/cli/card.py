"""`mptify card FILE`: write a ticket's README.md for the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["card"]


def card(
    file: Annotated[Path, typer.Argument(help="A ticket file.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write; stdout by default. Existing files are kept."),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(help="The Hub's name of the licence, such as mit; none by default."),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="The Hub's id of the data set, OWNER/NAME. By default, the id of a data set that "
            "mptify knows."
        ),
    ] = None,
) -> None:
    """Write a model card: the Hub's metadata, how the ticket was made and how to load it."""
    from mptify.errors import MptifyError
    from mptify.files import check_writable, write_whole
    from mptify.ticket.card import model_card
    from mptify.ticket.state import read_both
    from mptify.ticket.ticket_summary import summarize

    if out is not None:
        check_writable(out)
        if out.exists():
            raise MptifyError(f"{out} exists; remove it first, or name another file.")
    if license is not None and not license.strip():
        raise MptifyError(
            "--license is empty; write the Hub's short name, such as mit or apache-2.0."
        )
    if dataset is not None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset):
        raise MptifyError(
            f"--dataset {dataset}: the Hub's data sets have ids such as uoft-cs/cifar10."
        )
    text = model_card(summarize(*read_both(file)), file.name, license, dataset)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_whole(out, text)
        typer.echo(f"card: {out}", err=True)
