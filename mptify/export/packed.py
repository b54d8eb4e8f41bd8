"""`packed`: a program for mptify, mapped into memory when it is loaded."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mptify.export.target import Artifact, ExportTarget
from mptify.registry import export_targets
from mptify.runtime.loading import as_packed_file, load
from mptify.ticket.codec import Ticket


@export_targets.register("packed")
class Packed(ExportTarget):
    """A packed file, for tickets of any bits."""

    suffix = ".packed"
    takes_rounded_inputs = True

    def make(self, ticket: Ticket, model: nn.Module, images: Tensor) -> Artifact:
        data = as_packed_file(ticket, model, images)

        def run(some: Tensor) -> Any:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "ticket.packed"
                path.write_bytes(data)
                return load(path)(some)

        return Artifact(data, run)
