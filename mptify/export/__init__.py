"""Tickets for other programs: one file per target, found by name in `mptify.registry.export_targets`."""

from mptify.export import dense, onnx, packed
from mptify.export.target import Artifact, Exported, ExportTarget, export

__all__ = ["Artifact", "ExportTarget", "Exported", "dense", "export", "onnx", "packed"]
