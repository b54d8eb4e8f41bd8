"""`onnx`: a graph for onnxruntime and others, for any batch size."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mptify.errors import MptifyError
from mptify.export.target import Artifact, ExportTarget
from mptify.registry import export_targets
from mptify.surgery import ticket_layers
from mptify.ticket.codec import Ticket

__all__ = ["Onnx", "to_onnx"]


@export_targets.register("onnx")
class Onnx(ExportTarget):
    """An ONNX file, for tickets of any bits."""

    suffix = ".onnx"

    def make(self, ticket: Ticket, model: nn.Module, images: Tensor) -> Artifact:
        try:
            import onnxruntime
            import onnxscript  # noqa: F401
        except ImportError:
            raise MptifyError(
                'ONNX needs its libraries: pip install "mptify[onnx]", or in a clone pip install '
                '".[onnx]".'
            ) from None
        with tempfile.TemporaryDirectory() as folder, _sums_as_they_are(model):
            path = Path(folder) / "ticket.onnx"
            to_onnx(model, images, path, dynamic=True)
            data = path.read_bytes()
            session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

        def run(some: Tensor) -> Tensor:
            return torch.from_numpy(
                session.run(None, {session.get_inputs()[0].name: some.numpy()})[0]
            )

        return Artifact(data, run)


@contextlib.contextmanager
def _sums_as_they_are(model: nn.Module) -> Iterator[None]:
    """Make layers clip their sums to the range of float32.

    Otherwise an optimizer merges the norm after a layer into its weights. Rounding then turns sums
    that should be 0 into other numbers, with another sign.
    """
    layers = {layer for layer in ticket_layers(model).values() if layer.scales_output}
    try:
        for layer in layers:
            layer.finish = partial(_finish_clipped, layer)
        yield
    finally:
        for layer in layers:
            del layer.finish


def _finish_clipped(layer: Any, y: Tensor) -> Tensor:
    return type(layer).finish(layer, y.clamp(-3e38, 3e38))


def to_onnx(model: nn.Module, images: Tensor, path: Path, *, dynamic: bool) -> None:
    """Write a network as one ONNX file; `dynamic` allows any batch size."""
    shapes = ({0: torch.export.Dim("batch", min=1, max=1 << 20)},) if dynamic else None
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (images,),
            str(path),
            dynamo=True,
            dynamic_shapes=shapes,
            external_data=False,
            verbose=False,
        )
