"""The base class of export targets, and `export`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mptify.errors import BadConfig, MptifyError
from mptify.files import check_writable, write_whole
from mptify.models import registry
from mptify.registry import export_targets
from mptify.runtime.calibration import Batches, Calibration, check_activation_bits, round_inputs
from mptify.runtime.loading import example_of, load
from mptify.ticket.codec import Ticket
from mptify.ticket.state import read

__all__ = ["Artifact", "ExportTarget", "Exported", "export"]

TOLERANCE = 1e-4  # of the largest output


@dataclass(frozen=True)
class Artifact:
    """The bytes of a file, and a function that computes what the file's reader will."""

    data: bytes
    run: Callable[[Tensor], Any]


class ExportTarget:
    """Base class of export targets. Register subclasses with `mptify.registry.export_targets`.

    Attributes:
        suffix: The suffix of the target's files.
        takes_rounded_inputs: Whether `make` takes models of 1/32 tickets whose layers were given
            8-bit inputs.
    """

    suffix: ClassVar[str]
    takes_rounded_inputs: ClassVar[bool] = False

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
    """A written file: its path, size, and the largest relative difference of its outputs.

    `calibration` says what 8-bit inputs cost, if it was given some.
    """

    path: Path
    size: int
    difference: float
    calibration: Calibration | None = None


def export(
    path: str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    activation_bits: int | None = None,
    calibrate: Any = None,
) -> Exported:
    """Export a ticket, after comparing the exported network with it.

    Args:
        path: The ticket file of a named network.
        to: The name of an export target: `dense`, `onnx`, `packed` or one of yours.
        out: The file to write; by default `path` with the target's suffix.
        activation_bits: 8 gives the layers of a 1/32 ticket 8-bit inputs first; see
            [`pack`][mptify.pack]. Only `packed` can hold them.
        calibrate: The images for that.

    Returns:
        The file, and how much its outputs differ from the ticket's.

    Raises:
        BadConfig: There is no such target, or it can't hold 8-bit inputs.
        MptifyError: The target cannot hold this ticket, or its outputs differ by more than 1e-4 of
            the largest. Nothing is written then.
    """
    target = export_targets[to]()
    if activation_bits is not None and not target.takes_rounded_inputs:
        raise BadConfig(f"activation_bits={activation_bits} is for packed files, not for {to}.")
    if calibrate is not None and activation_bits is None:
        raise BadConfig("calibrate=... is for activation_bits=8; pass both, or neither.")
    out = Path(path).with_suffix(target.suffix) if out is None else Path(out)
    check_writable(out)
    ticket = read(path)
    image = example_of(ticket)
    if ticket.architecture is None:
        raise MptifyError(
            f"{path}: holds a ticket of a model that no registry knows; only named networks can be "
            "exported."
        )
    if image is None:
        raise MptifyError(
            f"{path}: {ticket.architecture} does not take one image at a time, and can't be "
            "exported."
        )
    # Inputs whose sums do not depend on the order: rounding could change the sign of a sum.
    images = (
        torch.randint(-24, 25, (2, *image.shape[1:]), generator=torch.Generator().manual_seed(0))
        / 8
    )
    model, calibration = load(path), None
    if activation_bits is not None:
        check_activation_bits(model, activation_bits)
        model, calibration = round_inputs(model, Batches(calibrate))
    artifact = target.make(ticket, model, images)
    # Also another batch size, which the file must not depend on.
    difference = max(
        _difference(model, artifact.run, some) for some in (images, torch.cat([images, images[:1]]))
    )
    if not difference <= TOLERANCE:
        raise MptifyError(
            f"{path}: the exported network's outputs differ from the ticket's (by {difference:.1e} "
            "of the largest); nothing is written."
        )
    write_whole(out, artifact.data)
    return Exported(out, len(artifact.data), difference, calibration)


def _difference(model: nn.Module, other: Any, images: Tensor) -> float:
    """The largest difference of the first outputs, over the largest output."""
    with torch.no_grad():
        one, two = (next(registry.tensors_in(run(images))).double() for run in (model, other))
    if one.shape != two.shape:
        return float("inf")
    return float((one - two).abs().max() / one.abs().max().clamp_min(1e-30))
