"""The summary of a ticket model: plain data that rich prints as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from mptify.nn.topk import mask_entropy
from mptify.surgery import ticket_layers
from mptify.surgery.plans import plan_of
from mptify.surgery.trainable import parameter_kinds

__all__ = ["LayerSummary", "Summary", "columns_for", "summary", "tables"]


@dataclass(frozen=True)
class LayerSummary:
    """One ticket layer: how many of its weights survive, and what it reads."""

    name: str
    kind: str
    shape: tuple[int, ...]
    bits: str
    kept: int
    count: int
    input: str
    gain: float | None
    tied_to: str


@dataclass(frozen=True)
class Summary:
    """A ticket model in numbers.

    Weights are conv and linear weights. Bytes are those of a ticket file.
    """

    bits: str
    prune: float
    layers: tuple[LayerSummary, ...]
    left_dense: tuple[tuple[str, int, str], ...]
    tables: tuple[tuple[str, tuple[int, ...]], ...]
    dropped: tuple[str, ...]
    untraced: dict[str, str]
    kept_activations: tuple[str, ...]
    trainable: dict[str, int]
    weights: int
    converted: int
    kept: int
    float_bytes: int
    packed_bytes: int
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The summary as dictionaries and lists."""
        return asdict(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Group]:
        yield tables(self, options.max_width)


def summary(model: nn.Module) -> Summary:
    """Summarize a ticket model.

    Args:
        model: A ticket model.

    Returns:
        Plain data, which `rich.print` shows as tables.

    Example:
        rich.print(mptify.summary(mptify.transform("resnet18", prune=0.8)))
    """
    plan = plan_of(model)
    live = ticket_layers(model)
    layers = []
    for planned in plan.layers:
        layer = live[planned.name]
        gain = None if layer.is_meta else round(float(layer.gain), 6)
        kept = (
            layer.mask.sum().item() if layer.scope is not None and not layer.is_meta else layer.kept
        )
        layers.append(
            LayerSummary(
                name=planned.name,
                kind=planned.kind,
                shape=planned.shape,
                bits=plan.config.bits,
                kept=int(kept),
                count=planned.count,
                input=planned.input.value,
                gain=gain,
                tied_to=planned.tied_to,
            )
        )
    own = [layer for layer in layers if not layer.tied_to]
    trainable = _trainable(model)
    floats = _stored_floats(model)
    mask_bits = sum(mask_entropy(layer.count, layer.kept) for layer in own)
    # The seed does not determine these: the survivors' signs, or their values.
    if plan.config.init == "keep":
        mask_bits += plan.config.weight_bits * sum(layer.kept for layer in own)
    return Summary(
        bits=plan.config.bits,
        prune=plan.config.prune,
        layers=tuple(layers),
        left_dense=tuple((left.name, left.count, left.reason) for left in plan.left_dense),
        tables=plan.tables,
        dropped=plan.dropped,
        untraced=plan.untraced,
        kept_activations=tuple(plan.kept_activations),
        trainable=trainable,
        weights=plan.total,
        converted=plan.converted,
        kept=sum(layer.kept for layer in own),
        float_bytes=4 * (plan.total + floats),
        packed_bytes=math.ceil(mask_bits / 8)
        + 4 * (floats + len(own) + sum(left.count for left in plan.left_dense)),
        warnings=tuple(plan.warnings),
    )


def _trainable(model: nn.Module) -> dict[str, int]:
    kinds = parameter_kinds(model)
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            counts[kinds[name]] = counts.get(kinds[name], 0) + parameter.numel()
    return counts


def _stored_floats(model: nn.Module) -> int:
    """Numbers that a file holds besides masks and gains: statistics of norms, and learned ones."""
    kinds = parameter_kinds(model)
    learned = sum(
        p.numel()
        for n, p in model.named_parameters()
        if p.requires_grad and kinds[n] not in ("scores", "dense")
    )
    statistics = sum(
        b.numel() for n, b in model.named_buffers() if n.endswith(("running_mean", "running_var"))
    )
    return learned + statistics


# -- for people ------------------------------------------------------------------------------------


def tables(summary: Summary, width: int) -> Group:
    """One line per layer, then totals and warnings."""
    parts: list[Any] = [_layer_table(summary, width), _totals(summary)]
    parts += [Text(f"! {warning}", style="yellow") for warning in summary.warnings]
    return Group(*parts)


def columns_for(width: int, columns: Sequence[str], least: Mapping[str, int]) -> list[str]:
    """The columns that fit the width; a column may have a `least` width at which it is shown."""
    return [column for column in columns if width >= least.get(column, 0)]


def _layer_table(summary: Summary, width: int) -> Table:
    everything = ("layer", "kind", "shape", "bits", "kept", "share", "input")
    columns = columns_for(width, everything, {"kind": 100, "input": 80, "shape": 65, "bits": 45})
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in ("kept", "share") else "left"
        table.add_column(
            column, justify=justify, no_wrap=column not in ("layer", "input"), overflow="fold"
        )
    for layer in summary.layers:
        shape = _sizes(layer.shape)
        share = f"{100 * layer.kept / layer.count:.1f} %"
        note = f"= {layer.tied_to}" if layer.tied_to else layer.input
        cells = {
            "layer": layer.name,
            "kind": layer.kind,
            "shape": shape,
            "bits": layer.bits,
            "kept": f"{layer.kept:,}",
            "share": share,
            "input": note,
        }
        table.add_row(*(cells[column] for column in columns))
    return table


def _totals(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    share = 100 * summary.converted / summary.weights
    table.add_row("")
    weights = f"{summary.converted:,} of {summary.weights:,} conv and linear weights"
    table.add_row("converted", f"{weights} ({share:.2f} %), {len(summary.layers)} layers")
    table.add_row("kept", f"{summary.kept:,} ({100 * summary.kept / summary.converted:.2f} %)")
    left = [f"{name}: {count:,} weights, {reason}" for name, count, reason in summary.left_dense]
    _add_some(table, "left dense", left, most=10)
    _add_some(
        table,
        "not a weight",
        [f"{name}: {_sizes(shape)}, added, joined or looked up" for name, shape in summary.tables],
    )
    _add_some(
        table,
        "dropped",
        [f"{name}, of an activation that a sign replaces" for name in summary.dropped],
    )
    for path, reason in list(summary.untraced.items())[:3]:
        table.add_row("not traced", f"{path or 'the model itself'}: {reason}")
    if len(summary.untraced) > 3:
        table.add_row(
            "not traced",
            f"... and {len(summary.untraced) - 3} more parts; each keeps its own forward()",
        )
    table.add_row(
        "trainable", ", ".join(f"{count:,} {kind}" for kind, count in summary.trainable.items())
    )
    floats, ticket = _megabytes(summary.float_bytes), _megabytes(summary.packed_bytes)
    table.add_row("size", f"{floats} as float32; as a ticket about {ticket}, or less")
    return table


def _add_some(table: Table, title: str, lines: list[str], most: int = 3) -> None:
    for line in lines[:most]:
        table.add_row(title, line)
    if len(lines) > most:
        table.add_row(title, f"... and {len(lines) - most} more")


def _sizes(shape: tuple[int, ...]) -> str:
    return "×".join(str(size) for size in shape)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB" if count >= 10**5 else f"{count / 1e3:,.1f} kB"
