"""What `mptify export` does with its options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import typer

from mptify.cli.validation_images import labelled_as, validation_images
from mptify.errors import MptifyError
from mptify.export import export
from mptify.runtime.loading import load
from mptify.ticket.state import read
from mptify.training.data import Batch, Images, evaluation_batches

__all__ = ["run_export"]

_IMAGES, _BATCH = 1000, 64


def run_export(
    file: Path,
    to: str,
    out: Path | None,
    *,
    activation_bits: int | None,
    source: str | None,
    changes: Sequence[str],
) -> None:
    """Export a ticket and print what was written.

    Args:
        file: The ticket file.
        to: The export target.
        out: The file to write.
        activation_bits: The bits of inputs that the ticket is given; None leaves them.
        source: The source of the images to calibrate on; None takes the data of the search.
        changes: Changes of the data's settings.
    """
    if activation_bits is None and (source is not None or changes):
        raise MptifyError("--data and --set are for --activation-bits 8; pass all, or neither.")
    batches = None if activation_bits is None else _Batches(file, source, changes)
    exported = export(file, to, out, activation_bits=activation_bits, calibrate=batches)
    if exported.calibration is not None:
        typer.echo(str(exported.calibration))
    ticket = (
        "ticket's" if activation_bits is None else f"ticket's with {activation_bits}-bit inputs"
    )
    typer.echo(
        f"{exported.path}: {exported.size / 1e6:,.2f} MB; outputs differ from the {ticket} by "
        f"{exported.difference:.1e} of the largest"
    )


@dataclass(frozen=True)
class _Batches:
    """Images with labels, found when they are wanted and read again each time."""

    file: Path
    source: str | None
    changes: Sequence[str]

    @cached_property
    def images(self) -> Images:
        ticket = read(self.file)
        images = validation_images(self.file, ticket, self.source, self.changes, _IMAGES)
        return labelled_as(images, ticket, load(self.file))

    def __iter__(self) -> Iterator[Batch]:
        return evaluation_batches(self.images, _BATCH, rank=0, world=1, device="cpu")
