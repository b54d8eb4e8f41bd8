"""What `mptify inspect` prints: a table of layers, and fields about the whole ticket."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from mptify.cli.console import console, print_fields
from mptify.cli.tables import Column, make_table
from mptify.config import Recipe, TicketConfig
from mptify.files import check_writable
from mptify.ticket.mask_image import draw_masks
from mptify.ticket.state import read_both
from mptify.ticket.ticket_summary import TicketSummary, summarize

__all__ = ["layer_table", "run_inspect"]

_CSV_COLUMNS = (
    "name",
    "shape",
    "kept",
    "count",
    "sparsest_filter",
    "densest_filter",
    "coded_bytes",
    "entropy_bytes",
    "coded_as",
    "gain",
)
_LONGEST_NOTE = 400
_ALWAYS_SHOWN = ("bits", "prune", "seed")


def run_inspect(file: Path, *, as_json: bool, as_csv: bool, png: Path | None) -> None:
    """Print a ticket's summary as a table, JSON or CSV, and draw its masks to `png` if given."""
    if png is not None:
        check_writable(png)
    ticket, data = read_both(file)
    summary = summarize(ticket, data)
    if as_json:
        typer.echo(json.dumps(summary.as_dict(), indent=1, ensure_ascii=False))
    elif as_csv:
        typer.echo(_layers_csv(summary), nl=False)
    else:
        out = console()
        out.print(layer_table(summary, out.width))
        print_fields(out, _fields(summary))
    if png is not None:
        draw_masks(ticket, png)
        typer.echo(f"image: {png}", err=True)


def layer_table(summary: TicketSummary, width: int) -> Table:
    """The table of a ticket's layers, without the columns that don't fit into `width`."""
    columns = [
        Column("layer", lambda layer: Text(layer.name), left=True, wraps=True),
        Column("shape", lambda layer: _shape(layer.shape), left=True, min_width=95),
        Column("kept", lambda layer: f"{layer.kept:,}"),
        Column("density", lambda layer: f"{100 * layer.density:.1f} %", min_width=80),
        Column("by filter", _filter_densities, min_width=130),
        Column("bits/weight", lambda layer: f"{layer.bits_per_weight:.3f}"),
        Column("of entropy", _share_of_entropy),
        Column("coded as", lambda layer: layer.coded_as, left=True, min_width=115),
        Column("gain", lambda layer: f"{layer.gain:.4g}", min_width=60),
    ]
    return make_table(columns, summary.layers, width=width, header_style="bold")


def _shape(shape: Any) -> str:
    return "×".join(map(str, shape))


def _filter_densities(layer: Any) -> str:
    return f"{100 * layer.sparsest_filter:.0f}–{100 * layer.densest_filter:.0f} %"


def _share_of_entropy(layer: Any) -> str:
    if not layer.entropy_bytes:
        return "–"
    return f"{100 * layer.coded_bytes / layer.entropy_bytes:.1f} %"


def _layers_csv(summary: TicketSummary) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV_COLUMNS)
    for layer in summary.layers:
        row = {name: getattr(layer, name) for name in _CSV_COLUMNS}
        writer.writerow((row | {"shape": _shape(layer.shape)}).values())
    return out.getvalue()


def _fields(summary: TicketSummary) -> list[tuple[str, str]]:
    """The names and values that are printed below the table."""
    arguments = "".join(f", {key}={value}" for key, value in summary.arguments.items())
    network = summary.architecture or "not named in the file; pass yours to mptify.load"
    kept = 100 * summary.kept / summary.weights
    share = 100 * summary.mask_bytes / summary.entropy_bytes if summary.entropy_bytes else 100.0
    gains = len(summary.layers)
    fields = [
        ("network", network + arguments),
        ("made with", _ticket_settings(summary.config)),
        ("kept", f"{summary.kept:,} of {summary.weights:,} weights ({kept:.2f} %)"),
        ("masks", f"{summary.mask_bytes:,} bytes, {share:.2f} % of n·H(kept/n)"),
        (
            "floats",
            f"{summary.stored_floats:,} stored, of {summary.floats + gains:,} ({gains:,} gains); "
            f"computes in {summary.dtype}",
        ),
        (
            "file",
            f"{summary.file_bytes:,} bytes; the weights as float32 take {4 * summary.weights:,}",
        ),
    ]
    for name, value in summary.notes.items():
        fields.append((repr(name)[1:-1], _printable(_note(name, value))))
    return [*fields, ("sha256", summary.digest)]


def _printable(text: str) -> str:
    """The text without control characters, which a file from elsewhere may hold, and shortened."""
    shortened = text if len(text) < _LONGEST_NOTE else text[:_LONGEST_NOTE] + " …"
    return "".join(one if one.isprintable() else "�" for one in shortened)


def _ticket_settings(config: dict[str, Any]) -> str:
    """The settings of a ticket that differ from the defaults, and the most important ones."""
    defaults = TicketConfig.model_validate({}).model_dump(mode="json")
    shown = {
        key: value
        for key, value in config.items()
        if value != defaults[key] or key in _ALWAYS_SHOWN
    }
    return ", ".join(f"{key}={value}" for key, value in shown.items())


def _note(name: str, value: Any) -> str:
    """A note as text. Notes that a search wrote are shortened to their essentials."""
    if name == "accuracy" and isinstance(value, float) and 0 <= value <= 1:
        return f"{100 * value:.2f} %"
    if name == "recipe" and isinstance(value, dict):
        return f"{_recipe_changes(value)} (--json shows all)"
    return _as_text(_rounded(value) if name == "input" else value)


def _recipe_changes(recipe: dict[str, Any]) -> str:
    """The settings of a recipe that differ from the defaults, except those of the ticket."""
    defaults = Recipe.model_validate({}).model_dump(mode="json")
    settings = {
        key: (value, defaults.get(key))
        for key, value in recipe.items()
        if key not in ("ticket", "data", "about")
    }
    data = recipe.get("data")
    if isinstance(data, dict):
        for key, value in data.items():
            settings[f"data.{key}"] = value, defaults["data"].get(key)
    changed = [
        f"{key}={_as_text(value)}" for key, (value, default) in settings.items() if value != default
    ]
    return ", ".join(changed) or "the defaults"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return {key: _rounded(one) for key, one in value.items()} if isinstance(value, dict) else value
