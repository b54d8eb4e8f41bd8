"""What an export target is, and the export that is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mptify.errors import MptifyError
from mptify.files import check_writable, write_whole
from mptify.models import registry
from mptify.registry import export_targets
from mptify.runtime.loading import example_of, load
from mptify.ticket.codec import Ticket
from mptify.ticket.state import read

__all__ = ["Artifact", "ExportTarget", "Exported", "export"]

TOLERANCE = 1e-4  # of the largest output


@dataclass(frozen=True)
class Artifact:
    """What a target makes of a ticket: the bytes of a file, and a function that computes what the file's reader will."""

    data: bytes
    run: Callable[[Tensor], Any]


class ExportTarget:
    """Base class of export targets: register a subclass with `mptify.registry.export_targets`.

    Attributes:
        suffix: How the target's files end.
    """

    suffix: ClassVar[str]

    def make(self, ticket: Ticket, model: nn.Module, images: Tensor) -> Artifact:
        """The file of a ticket.

        Args:
            ticket: The ticket as its file holds it.
            model: The ticket model, in `eval()`.
            images: Two images of the size that the network takes.

        Raises:
            MptifyError: The target can't hold this ticket.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Exported:
    """A file that was written, its size, and how far its outputs are from the ticket's, as a share of the largest."""

    path: Path
    size: int
    difference: float


def export(path: str | Path, to: str, out: str | Path | None = None) -> Exported:
    """Write the ticket in a file for another program, and compare what that program computes with the ticket first.

    Args:
        path: A ticket file of a named network.
        to: The name of an export target: `dense`, `onnx`, `packed` or one of yours.
        out: What to write; by default `path` with the target's suffix.

    Returns:
        What was written, and how far its outputs are from the ticket's.

    Raises:
        BadConfig: There is no such target.
        MptifyError: The target can't hold this ticket, or its outputs differ by more than a ten-thousandth. Nothing is
            written then.
    """
    target = export_targets[to]()
    out = Path(path).with_suffix(target.suffix) if out is None else Path(out)
    check_writable(out)
    ticket = read(path)
    image = example_of(ticket)
    if ticket.architecture is None:
        raise MptifyError(
            f"{path}: holds a ticket of a model that no registry knows; only named networks can be exported."
        )
    if image is None:
        raise MptifyError(
            f"{path}: {ticket.architecture} does not take one image at a time, and can't be exported."
        )
    # Numbers whose sums are the same in any order: a first layer's sum that is rounded otherwise may have another sign.
    images = (
        torch.randint(-24, 25, (2, *image.shape[1:]), generator=torch.Generator().manual_seed(0))
        / 8
    )
    model = load(path)
    artifact = target.make(ticket, model, images)
    # Another number of images too: a file must not remember how many it was made with.
    difference = max(
        _difference(model, artifact.run, some) for some in (images, torch.cat([images, images[:1]]))
    )
    if not difference <= TOLERANCE:
        raise MptifyError(
            f"{path}: what was exported gives other outputs than the ticket (by {difference:.1e} of the largest); not kept."
        )
    write_whole(out, artifact.data)
    return Exported(out, len(artifact.data), difference)


def _difference(model: nn.Module, other: Any, images: Tensor) -> float:
    """The largest difference of the first outputs, over the largest output."""
    with torch.no_grad():
        one, two = (next(registry.tensors_in(run(images))).double() for run in (model, other))
    if one.shape != two.shape:
        return float("inf")
    return float((one - two).abs().max() / one.abs().max().clamp_min(1e-30))
