"""What `mptify eval` does with its options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import typer
from rich.progress import Progress

from mptify.cli.console import console
from mptify.config import DataConfig, checked
from mptify.errors import MptifyError
from mptify.recipe_files import with_settings
from mptify.runtime.loading import load
from mptify.ticket.codec import Ticket
from mptify.ticket.state import read
from mptify.training.evaluation import evaluate
from mptify.training.labels import as_seen, with_labels_of
from mptify.training.setup import classes_of
from mptify.training.sources import is_in_files, load_data

__all__ = ["run_evaluate"]


def run_evaluate(
    file: Path,
    source: str | None,
    changes: Sequence[str],
    *,
    batch: int,
    device: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Evaluate a ticket on validation images and print the results.

    Args:
        file: The ticket file.
        source: The source of the images; None takes the data of the ticket's search.
        changes: Changes of the data's settings, such as `"size=192"`.
        batch: Images per step.
        device: The device to run on.
        threads: Threads for torch; None keeps their number.
        as_json: Whether to print JSON.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    ticket = read(file)
    settings = _data_settings(ticket, source)
    if "source" not in settings:
        raise MptifyError(f"{file} does not say which data it was searched on; pass --data.")
    config = checked(DataConfig, with_settings(settings, changes))
    _, images = load_data(config, only_val=True)
    model = load(file, device=device)
    images = with_labels_of(
        as_seen(images, ticket.notes), ticket.notes, classes_of(model, images, device)
    )
    out = console()
    with Progress(console=out, disable=not out.is_terminal or as_json, transient=True) as progress:
        task = progress.add_task("evaluating", total=len(images))
        result = evaluate(
            model, images, batch, device, tick=lambda count: progress.advance(task, count)
        )
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=1))
        return
    typer.echo(
        f"{file}: {result.in_words(images.classes)}; {result.images:,} images, "
        f"{result.images_per_second:,.0f} per second"
    )


def _data_settings(ticket: Ticket, source: str | None) -> dict[str, Any]:
    """The settings of the ticket's search; for another source, only those that still apply."""
    recipe = ticket.notes.get("recipe")
    searched = recipe.get("data") if isinstance(recipe, dict) else None
    settings: dict[str, Any] = dict(searched) if isinstance(searched, dict) else {}
    if source is None:
        return settings
    settings = {"source": source} | {
        key: value for key, value in settings.items() if key == "workers"
    }
    seen = ticket.notes.get("input")
    shape = seen.get("shape") if isinstance(seen, dict) else None
    if is_in_files(source) and isinstance(shape, list) and shape:
        settings["size"] = shape[-1]
    return settings
