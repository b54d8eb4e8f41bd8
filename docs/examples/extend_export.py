import tempfile
from pathlib import Path

import numpy as np

import mptify
from mptify.export import Artifact, ExportTarget, export
from mptify.models import conv2
from mptify.registry import export_targets


@export_targets.register("masks")
class Masks(ExportTarget):
    """The masks alone, as packed bits, one layer after the other."""

    suffix = ".bits"

    def make(self, ticket, model, images):
        masks = [np.packbits(layer.mask) for layer in ticket.layers.values()]
        return Artifact(np.concatenate(masks).tobytes(), model)


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "conv2.ticket"
    mptify.save(mptify.transform(conv2(), prune=0.8), path, "mptify:conv2")
    print(export(path, "masks").size, "bytes")
