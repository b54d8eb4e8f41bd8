"""Export tickets to other formats, one file per target."""

from mptify.export import dense, onnx, packed
from mptify.export.target import Artifact, Exported, ExportTarget, export

__all__ = ["Artifact", "ExportTarget", "Exported", "dense", "export", "onnx", "packed"]
