"""A ticket from within: its layers, its masks as pictures, and where the bytes of its file go."""

from __future__ import annotations

from typing import Any

from mptify.report.charts import Columns, column_chart, in_short, parts_chart
from mptify.report.collect import TicketFile
from mptify.report.mask_images import kernels_picture, mask_picture
from mptify.report.templating import in_bytes, in_percent

__all__ = ["layers_context", "masks_context", "size_context"]

_MOST_PICTURES, _MOST_WHISKERS = 400, 60
_PARTS = {
    "masks": "masks, entropy-coded",
    "signs": "signs of the survivors",
    "values": "values of the survivors",
    "floats": "norms and other floats",
    "gains": "gains, one per layer",
    "description": "description: settings, names, notes",
}


def layers_context(file: TicketFile) -> dict[str, Any]:
    """Four charts with a column per layer, and the layers for the table."""
    layers, is_binary = file.summary.layers, file.ticket.config.weight_bits == 1
    names = [layer.name for layer in layers]
    entropies = [8 * layer.entropy_bytes / layer.count for layer in layers]
    ranges, legend = [], [("the layer", "bar")]
    if len(layers) <= _MOST_WHISKERS:
        ranges = [(layer.sparsest_filter, layer.densest_filter) for layer in layers]
        legend.append(("its sparsest to its densest filter", "thin"))
    charts = [
        column_chart(
            "Density",
            Columns(names, [layer.density for layer in layers], ranges),
            in_percent,
            legend=legend,
        ),
        column_chart(
            "Gain" if is_binary else "Standard deviation of the frozen weights",
            Columns(names, [layer.gain for layer in layers]),
        ),
        column_chart(
            "Bits per weight of the mask",
            Columns(names, [layer.bits_per_weight for layer in layers], marks=entropies),
            legend=[("stored", "bar"), ("entropy", "stroke-mark")],
        ),
        column_chart(
            "Bytes of the mask",
            Columns(names, [float(layer.coded_bytes) for layer in layers]),
            in_short,
        ),
    ]
    scale = "gain" if is_binary else "std. dev."
    return {"charts": charts, "rows": list(zip(layers, entropies, strict=True)), "scale": scale}


def masks_context(file: TicketFile) -> dict[str, Any]:
    """A picture of each layer's mask, and of the first layer's kernels if it sees images."""
    layers = list(file.ticket.layers.values())
    shown = layers[:_MOST_PICTURES]
    return {
        "pictures": [(layer, mask_picture(layer, len(layers))) for layer in shown],
        "left": len(layers) - len(shown),
        "first": layers[0],
        "kernels": kernels_picture(layers[0], file.ticket.config),
        "is_binary": file.ticket.config.weight_bits == 1,
    }


def size_context(file: TicketFile) -> dict[str, Any]:
    """What each part of the file takes, beside the entropy of the masks."""
    summary = file.summary
    sizes = dict(file.sections)
    sizes["description"] = summary.file_bytes - sum(sizes.values())
    parts = [(words, sizes[name], name) for name, words in _PARTS.items() if sizes.get(name)]
    entropy = [("entropy of the masks", summary.entropy_bytes, "entropy")]
    rows = [
        *parts,
        ("the file", summary.file_bytes, ""),
        ("n·H(kept/n), summed over the layers", summary.entropy_bytes, ""),
        ("its weights as float32", 4 * summary.weights, ""),
    ]
    chart = parts_chart([("the file", parts), ("n·H(kept/n)", entropy)], in_bytes)
    return {"summary": summary, "chart": chart, "rows": rows}
