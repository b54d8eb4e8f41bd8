"""What was searched and how good it is: the title, the figures, the settings and the curves."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from mptify.config import DataConfig, Recipe, SearchConfig, TicketConfig
from mptify.registry import methods
from mptify.report.charts import Chart, Line, line_chart
from mptify.report.collect import ReportData, TicketFile
from mptify.report.templating import in_bytes, in_percent

__all__ = ["curves_context", "facts_of", "place_name", "tiles_of", "title_of", "versions"]

_SHOWN_ELSEWHERE = {"accuracy", "epoch", "method", "data", "labels", "input", "recipe"}  # of notes
Tile = tuple[str, str, str]


def title_of(data: ReportData) -> str:
    name = data.network.rpartition(":")[2]
    if data.file is not None:
        summary = data.file.summary
        pruned = in_percent(1 - summary.kept / summary.weights)
        return f"{name}, {summary.config['bits']} ticket, {pruned} pruned"
    if data.is_dense:
        return f"{name}, dense training"
    if data.recipe is None:
        return name
    config = data.recipe.ticket
    return f"{name}, search for a {config.bits} ticket, {in_percent(config.prune)} pruned"


def place_name(place: Path) -> str:
    """The last two parts of the path: who reads the page need not know the rest."""
    return "/".join(place.resolve().parts[-2:])


def versions() -> str:
    from mptify import __version__

    others = [f"{name} {metadata.version(name)}" for name in ("torch", "timm", "torchvision")]
    return ", ".join([f"mptify {__version__}", *others, f"Python {platform.python_version()}"])


# -- figures ---------------------------------------------------------------------------------


def tiles_of(data: ReportData) -> list[Tile]:
    """The few figures that a reader asks for first: (name, figure, remark)."""
    tiles: list[Tile] = []
    if data.accuracy is not None:
        tiles.append(("top-1", f"{100 * data.accuracy:.2f} %", _when(data)))
    if data.baseline is not None and data.baseline.accuracy is not None:
        dense = f"{100 * data.baseline.accuracy:.2f} %"
        tiles.append(("top-1, trained densely", dense, _compared(data)))
    if data.file is not None:
        tiles += _ticket_tiles(data.file)
    elif data.recipe is not None and not data.is_dense:
        config = data.recipe.ticket
        tiles.append(("bits", config.bits, "per weight / per activation"))
        tiles.append(("to prune", in_percent(config.prune), "there is no ticket yet"))
    if data.curve is not None:
        state = "finished" if data.curve.finished else "stopped or still running"
        tiles.append(("epochs", f"{len(data.curve.rows)} of {data.curve.epochs}", state))
    return tiles


def _when(data: ReportData) -> str:
    if data.curve is None:
        return "on validation images, as its search measured"
    best = max(value for _, value in data.curve.values("val_accuracy"))
    epoch = data.curve.rows[-1]["epoch"]
    return f"after epoch {epoch}, on validation images; {100 * best:.2f} % at best"


def _compared(data: ReportData) -> str:
    dense = data.baseline
    assert dense is not None
    words = "the same network and data"
    if not dense.finished:
        words += f", after {len(dense.rows)} of {dense.epochs} epochs"
    if data.accuracy is None or dense.accuracy is None:
        return words
    points = 100 * (data.accuracy - dense.accuracy)
    side = "above" if points >= 0 else "below"
    return f"{words}; the ticket is {abs(points):.2f} points {side}"


def _ticket_tiles(file: TicketFile) -> list[Tile]:
    summary = file.summary
    drawn = summary.config["init"] != "keep"
    origin = "random weights, never trained" if drawn else "given weights"
    kept = f"{summary.kept:,} of {summary.weights:,} {origin}"
    smaller = f"{4 * summary.weights / summary.file_bytes:.3g}×"
    return [
        ("kept", in_percent(summary.kept / summary.weights), kept),
        ("file", in_bytes(summary.file_bytes), f"{smaller} smaller than its weights as float32"),
        ("bits", str(summary.config["bits"]), "per weight / per activation"),
    ]


# -- settings --------------------------------------------------------------------------------


def facts_of(data: ReportData) -> list[tuple[str, Any]]:
    """(name, value) of everything that says what was searched."""
    recipe, file = data.recipe, data.file
    facts: list[tuple[str, Any]] = [("network", _network(data))]
    if recipe is not None:
        facts += [("method", methods[recipe.method].description), ("data", _data(recipe))]
        facts.append(("training", _training(recipe)))
    elif file is not None:
        words = "unknown: the file names no search"
        facts.append(("method", words))
    if file is not None:
        facts += [("ticket", _settings(file.ticket.config)), ("file", file.path)]
        facts += [("sha256", file.summary.digest), *_notes(file)]
    elif recipe is not None and not data.is_dense:
        facts.append(("ticket", _settings(recipe.ticket)))
    return facts


def _network(data: ReportData) -> str:
    given = data.file.summary.arguments if data.file is not None else {}
    return ", ".join([data.network, *(f"{name} {value}" for name, value in given.items())])


def _data(recipe: SearchConfig) -> str:
    if not isinstance(recipe, Recipe):
        return "given from Python"
    usual = DataConfig.model_validate({})
    changed = [
        f"{name} {value}"
        for name, value in recipe.data
        if name not in ("source", "workers") and value != getattr(usual, name)
    ]
    return ", ".join([recipe.data.source, *changed])


def _training(recipe: SearchConfig) -> str:
    warm = f" after {recipe.warmup:g} epochs of warm-up" if recipe.warmup else ""
    rate = f"{recipe.optimizer} at {recipe.lr:g}, {recipe.schedule}{warm}"
    return f"{recipe.epochs} epochs, {recipe.batch} images per step, {rate}, seed {recipe.seed}"


def _settings(config: TicketConfig) -> str:
    """Those that differ from the defaults, and those that a reader always asks for."""
    usual, always = TicketConfig.model_validate({}), ("bits", "prune", "seed")
    return ", ".join(
        f"{name} {value}"
        for name, value in config
        if name in always or value != getattr(usual, name)
    )


def _notes(file: TicketFile) -> list[tuple[str, str]]:
    """What else the ticket's author wrote down, shortened."""
    rows = []
    for name, value in file.ticket.notes.items():
        if name not in _SHOWN_ELSEWHERE:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append((name[:60], text if len(text) < 400 else text[:400] + " …"))
    return rows


# -- curves ----------------------------------------------------------------------------------


def curves_context(data: ReportData) -> dict[str, Any] | None:
    """Charts over epochs, and how long training took; None for a ticket file alone."""
    curve = data.curve
    if curve is None:
        return None
    charts: list[Chart | None] = [
        line_chart("Loss", _lines("loss", data)),
        line_chart("Accuracy", _lines("accuracy", data), in_percent),
        line_chart(
            "Survivors replaced per epoch",
            [Line("replaced", curve.values("flipped"), "other")],
            in_percent,
        ),
        line_chart(
            "Learning rate at the end of the epoch",
            [Line("learning rate", curve.values("lr"), "other")],
        ),
    ]
    pruned = curve.values("pruned")
    if len({round(value, 4) for _, value in pruned}) > 1:
        charts.append(line_chart("Pruned", [Line("pruned", pruned, "other")], in_percent))
    seconds = sum(value for _, value in curve.values("seconds"))
    return {
        "charts": [chart for chart in charts if chart is not None],
        "took": _duration(seconds) if seconds else None,
        "alone": data.baseline is None and not data.is_dense,
    }


def _lines(key: str, data: ReportData) -> list[Line]:
    """Validation in full strokes, training dashed; the ticket in colour, dense training grey."""
    assert data.curve is not None
    curves = [("", "dense" if data.is_dense else "ticket", data.curve)]
    if data.baseline is not None:
        curves.append(("dense ", "dense", data.baseline))
    lines = []
    for name, style, curve in curves:
        lines.append(Line(f"{name}validation", curve.values(f"val_{key}"), style))
        lines.append(Line(f"{name}training", curve.values(key), f"{style} train"))
    return lines


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
