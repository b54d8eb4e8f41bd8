"""`mptify eval FILE`: how good a ticket is on labelled images."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["evaluate"]


def evaluate(
    file: Annotated[Path, typer.Argument(help="A ticket file.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Where the images come from; what the ticket was searched on unless given."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting of the data: size=192, val_images=1000.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images per step.")] = 256,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads for torch.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Top-1, top-5, loss and throughput of a ticket on the validation images of a data set.

    Classes are matched by name: a folder may hold only some of those that the ticket was searched on.
    """
    from rich.progress import Progress

    from mptify.cli.console import console
    from mptify.config import DataConfig, checked
    from mptify.errors import MptifyError
    from mptify.recipe_files import with_settings
    from mptify.runtime.loading import load
    from mptify.ticket.state import read
    from mptify.training.evaluation import evaluate as measure
    from mptify.training.labels import as_seen, with_labels_of
    from mptify.training.setup import classes_of
    from mptify.training.sources import is_in_files, load_data

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    ticket = read(file)
    recipe = ticket.notes.get("recipe")
    settings: dict[str, Any] = (
        dict(recipe.get("data", {}))
        if isinstance(recipe, dict) and isinstance(recipe.get("data"), dict)
        else {}
    )
    seen = ticket.notes.get("input")
    if data is not None:
        settings = {"source": data} | (
            {"workers": settings["workers"]} if "workers" in settings else {}
        )
        shape = seen.get("shape") if isinstance(seen, dict) else None
        if is_in_files(data) and isinstance(shape, list) and shape:
            settings["size"] = shape[-1]
    if "source" not in settings:
        raise MptifyError(f"{file}: does not say what it was searched on; --data names the images.")
    _, images = load_data(
        checked(DataConfig, with_settings(settings, changes or [])), only_val=True
    )
    model = load(file, device=device)
    images = with_labels_of(
        as_seen(images, ticket.notes), ticket.notes, classes_of(model, images, device)
    )
    out = console()
    with Progress(console=out, disable=not out.is_terminal or as_json, transient=True) as progress:
        task = progress.add_task("evaluating", total=len(images))
        found = measure(
            model, images, batch, device, tick=lambda count: progress.advance(task, count)
        )
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1))
        return
    typer.echo(
        f"{file}: {found.in_words(images.classes)}; {found.images:,} images, {found.images_per_second:,.0f} per second"
    )
