"""`mptify inspect FILE`: how a ticket was made, and where its bytes go."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["inspect"]


def inspect(
    file: Annotated[Path, typer.Argument(help="A ticket file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the layers as CSV.")] = False,
    png: Annotated[Path | None, typer.Option(help="Write a picture (PNG) of the masks.")] = None,
) -> None:
    """Show how a ticket was made and, layer by layer, what survives and what it costs. Builds no network."""
    from mptify.cli.console import console, print_facts
    from mptify.files import check_writable
    from mptify.ticket.state import read_both
    from mptify.ticket.summary import summarize

    if png is not None:
        check_writable(png)
    ticket, data = read_both(file)
    summary = summarize(ticket, data)
    if as_json:
        typer.echo(json.dumps(summary.as_dict(), indent=1, ensure_ascii=False))
    elif as_csv:
        typer.echo(_csv(summary), nl=False)
    else:
        out = console()
        out.print(_layer_table(summary, out.width))
        print_facts(out, _facts(summary))
    if png is not None:
        from mptify.ticket.mask_image import draw_masks

        draw_masks(ticket, png)
        typer.echo(f"picture: {png}", err=True)


def _csv(summary: Any) -> str:
    out = io.StringIO()
    names = [
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
    ]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for layer in summary.layers:
        writer.writerow(
            "×".join(map(str, layer.shape)) if name == "shape" else getattr(layer, name)
            for name in names
        )
    return out.getvalue()


def _layer_table(summary: Any, width: int) -> Any:
    from rich.table import Table
    from rich.text import Text

    from mptify.surgery.model_summary import columns_for

    everything = (
        "layer",
        "shape",
        "kept",
        "density",
        "by filter",
        "bits/weight",
        "of entropy",
        "coded as",
        "gain",
    )
    columns = columns_for(
        width,
        everything,
        {"by filter": 130, "coded as": 115, "shape": 95, "density": 80, "gain": 60},
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        words = column in ("layer", "shape", "coded as")
        table.add_column(
            column, justify="left" if words else "right", no_wrap=column != "layer", overflow="fold"
        )
    for layer in summary.layers:
        cells = {
            "layer": Text(layer.name),
            "shape": "×".join(map(str, layer.shape)),
            "kept": f"{layer.kept:,}",
            "density": f"{100 * layer.density:.1f} %",
            "by filter": f"{100 * layer.sparsest_filter:.0f}–{100 * layer.densest_filter:.0f} %",
            "bits/weight": f"{layer.bits_per_weight:.3f}",
            "of entropy": f"{100 * layer.coded_bytes / layer.entropy_bytes:.1f} %"
            if layer.entropy_bytes
            else "–",
            "coded as": layer.coded_as,
            "gain": f"{layer.gain:.4g}",
        }
        table.add_row(*(cells[column] for column in columns))
    return table


def _facts(summary: Any) -> list[tuple[str, str]]:
    given = "".join(f", {key}={value}" for key, value in summary.arguments.items())
    share = 100 * summary.mask_bytes / summary.entropy_bytes if summary.entropy_bytes else 100.0
    gains = len(summary.layers)
    rows = [
        (
            "network",
            (summary.architecture or "a module of the writer's own: pass it to mptify.load")
            + given,
        ),
        ("made with", _settings(summary.config)),
        (
            "kept",
            f"{summary.kept:,} of {summary.weights:,} weights ({100 * summary.kept / summary.weights:.2f} %)",
        ),
        ("masks", f"{summary.mask_bytes:,} bytes, {share:.2f} % of n·H(kept/n)"),
        (
            "floats",
            f"{summary.stored_floats:,} stored, of {summary.floats + gains:,} ({gains:,} gains); computes in {summary.dtype}",
        ),
        (
            "file",
            f"{summary.file_bytes:,} bytes; as float32 its weights took {4 * summary.weights:,}",
        ),
    ]
    for name, value in summary.notes.items():
        text = _note(name, value)
        shown = "".join(
            one if one.isprintable() else "�"
            for one in (text if len(text) < 400 else text[:400] + " …")
        )
        rows.append((repr(name)[1:-1], shown))
    return [*rows, ("sha256", summary.digest)]


def _settings(config: dict[str, Any]) -> str:
    from mptify.config import TicketConfig

    plain = TicketConfig.model_validate({}).model_dump(mode="json")
    changed = {
        key: value
        for key, value in config.items()
        if value != plain[key] or key in ("bits", "prune", "seed")
    }
    return ", ".join(f"{key}={value}" for key, value in changed.items())


def _note(name: str, value: Any) -> str:
    """Notes are whatever their writer liked; of those that a search writes, what a person wants to know."""
    if name == "accuracy" and isinstance(value, float) and 0 <= value <= 1:
        return f"{100 * value:.2f} %"
    if name == "recipe" and isinstance(value, dict):
        return f"{_changed(value)} (--json has it whole)"
    return _plain(_rounded(value) if name == "input" else value)


def _changed(recipe: dict[str, Any]) -> str:
    """A recipe's settings where they are not the usual ones; those of the ticket are said elsewhere."""
    from mptify.config import Recipe

    usual = Recipe.model_validate({}).model_dump(mode="json")
    data = recipe.get("data")
    inside = (
        {f"data.{key}": (value, usual["data"].get(key)) for key, value in data.items()}
        if isinstance(data, dict)
        else {}
    )
    outside = {
        key: (value, usual.get(key))
        for key, value in recipe.items()
        if key not in ("ticket", "data", "about")
    }
    return (
        ", ".join(
            f"{key}={_plain(value)}"
            for key, (value, plain) in (outside | inside).items()
            if value != plain
        )
        or "the defaults"
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return {key: _rounded(one) for key, one in value.items()} if isinstance(value, dict) else value
