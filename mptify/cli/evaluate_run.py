"""What `mptify eval` does with its options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import typer
from rich.progress import Progress

from mptify.cli.console import console
from mptify.cli.validation_images import labelled_as, validation_images
from mptify.runtime.loading import load
from mptify.ticket.state import read
from mptify.training.evaluation import evaluate

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
    images = validation_images(file, ticket, source, changes)
    model = load(file, device=device)
    images = labelled_as(images, ticket, model, device)
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
