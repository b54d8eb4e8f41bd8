"""`packed`: a program on bit planes, mapped into memory when it is loaded."""

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
    """A packed file, for tickets of 1/1 bits."""

    suffix = ".packed"

    def make(self, ticket: Ticket, model: nn.Module, images: Tensor) -> Artifact:
        data = as_packed_file(ticket, "the ticket", images)

        def run(some: Tensor) -> Any:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "ticket.packed"
                path.write_bytes(data)
                return load(path)(some)

        return Artifact(data, run)
