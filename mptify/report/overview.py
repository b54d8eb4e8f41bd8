"""The page's frame: what was searched and how good it is, the curves, and the commands to do it again."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from mptify.config import DataConfig, Recipe, SearchConfig, TicketConfig
from mptify.recipe_files import to_yaml
from mptify.registry import methods
from mptify.report.charts import Line, in_percent, lines
from mptify.report.collect import Course, Cut, Findings
from mptify.report.commands import convert_command, quoted, search_command
from mptify.report.markup import Markup, joined, tag

__all__ = ["commands_section", "curves_section", "in_bytes", "place_name", "searched_section", "tiles", "title_of", "versions"]

_TOLD = {"accuracy", "epoch", "method", "data", "labels", "input", "recipe"}  # notes that the page shows elsewhere


def in_bytes(count: float) -> str:
    return f"{count / 1e6:,.2f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB" if count >= 1e4 else f"{count:,.0f} bytes"


def title_of(findings: Findings) -> str:
    name = findings.network.rpartition(":")[2]
    if findings.cut is not None:
        summary = findings.cut.summary
        return f"{name}, {summary.config['bits']} ticket, {100 * (1 - summary.kept / summary.weights):.4g} % pruned"
    if findings.is_dense:
        return f"{name}, dense training"
    config = findings.recipe.ticket if findings.recipe is not None else None
    return name if config is None else f"{name}, search for a {config.bits} ticket, {100 * config.prune:.4g} % pruned"


# -- the figures first -----------------------------------------------------------------------------------------------------


def tiles(findings: Findings) -> Markup:
    """The few numbers that one asks for first."""
    found: list[tuple[str, str, str]] = []
    if findings.accuracy is not None:
        found.append(("top-1", f"{100 * findings.accuracy:.2f} %", _when(findings)))
    if findings.baseline is not None and findings.baseline.accuracy is not None:
        found.append(("top-1, trained densely", f"{100 * findings.baseline.accuracy:.2f} %", _beside(findings)))
    if findings.cut is not None:
        found += _ticket_tiles(findings.cut)
    elif findings.recipe is not None and not findings.is_dense:
        config = findings.recipe.ticket
        found.append(("bits", config.bits, "per weight / per activation"))
        found.append(("to prune", f"{100 * config.prune:.4g} %", "there is no ticket yet"))
    if findings.course is not None:
        course = findings.course
        state = "finished" if course.finished else "stopped, or still going"
        found.append(("epochs", f"{len(course.rows)} of {course.epochs}", state))
    across = {1: 1, 2: 2, 4: 4}.get(len(found), 3)
    boxes = [tag("div", tag("dt", name), tag("dd", value), tag("dd", words)) for name, value, words in found]
    return tag("dl", *boxes, class_="tiles", style=f"--across:{across}")


def _when(findings: Findings) -> str:
    course = findings.course
    if course is None:
        return "on validation images, as its search noted"
    best = max(value for _, value in course.values("val_accuracy"))
    return f"after epoch {course.rows[-1]['epoch']}, on validation images; {100 * best:.2f} % at best"


def _beside(findings: Findings) -> str:
    dense = findings.baseline
    assert dense is not None
    end = "" if dense.finished else f", after {len(dense.rows)} of {dense.epochs} epochs"
    if findings.accuracy is None or dense.accuracy is None:
        return f"the same network and data{end}"
    points = 100 * (findings.accuracy - dense.accuracy)
    return f"the same network and data{end}; the ticket is {abs(points):.2f} points {'above' if points >= 0 else 'below'}"


def _ticket_tiles(cut: Cut) -> list[tuple[str, str, str]]:
    summary = cut.summary
    float32 = 4 * summary.weights
    origin = "given weights" if summary.config["init"] == "keep" else "random weights, never trained"
    return [
        ("kept", f"{100 * summary.kept / summary.weights:.4g} %", f"{summary.kept:,} of {summary.weights:,} {origin}"),
        ("file", in_bytes(summary.file_bytes), f"{float32 / summary.file_bytes:.3g}× smaller than its weights as float32"),
        ("bits", str(summary.config["bits"]), "per weight / per activation"),
    ]


# -- what was searched -----------------------------------------------------------------------------------------------------


def searched_section(findings: Findings) -> Markup:
    recipe, cut = findings.recipe, findings.cut
    facts: list[tuple[str, Any]] = [("network", _network(findings))]
    if recipe is not None:
        facts += [("method", methods[recipe.method].description), ("data", _data(recipe)), ("training", _training(recipe))]
    elif cut is not None:
        facts.append(("method", "none that the file tells of: its mask is as surgery or its author left it"))
    config = cut.ticket.config if cut is not None else recipe.ticket if recipe is not None and not findings.is_dense else None
    if config is not None:
        facts.append(("ticket", _settings(config)))
    if cut is not None:
        facts += [("file", cut.file), ("sha256", tag("code", cut.summary.digest)), *_notes(cut)]
    listed = tag("dl", *(part for name, value in facts for part in (tag("dt", name), tag("dd", value))), class_="facts")
    warnings = [tag("p", text, class_="warning") for course in (findings.course,) if course for text in course.warnings]
    whole = tag("details", tag("summary", "The whole recipe"), tag("pre", to_yaml(recipe))) if recipe is not None else None
    what = "What was trained" if findings.is_dense else "What was searched" if recipe is not None else "What the ticket is"
    return tag("section", tag("h2", what), listed, *warnings, whole, id="searched")


def _network(findings: Findings) -> str:
    given = findings.cut.summary.arguments if findings.cut is not None else {}
    return findings.network + "".join(f", {name} {value}" for name, value in given.items())


def _data(recipe: SearchConfig) -> str:
    if not isinstance(recipe, Recipe):
        return "given from Python"
    usual = DataConfig.model_validate({})
    changed = [f"{name} {value}" for name, value in recipe.data if name not in ("source", "workers") and value != getattr(usual, name)]
    return ", ".join([recipe.data.source, *changed])


def _training(recipe: SearchConfig) -> str:
    warm = f" after {recipe.warmup:g} epochs of warm-up" if recipe.warmup else ""
    rate = f"{recipe.optimizer} at {recipe.lr:g}, {recipe.schedule}{warm}"
    return f"{recipe.epochs} epochs, {recipe.batch} images per step, {rate}, seed {recipe.seed}"


def _settings(config: TicketConfig) -> str:
    """Those that differ from the usual ones, and those that one always asks for."""
    plain = TicketConfig.model_validate({})
    shown = [(name, value) for name, value in config if name in ("bits", "prune", "seed") or value != getattr(plain, name)]
    return ", ".join(f"{name} {value}" for name, value in shown)


def _notes(cut: Cut) -> list[tuple[str, str]]:
    """What else the ticket's author wrote down, shortened."""
    rows = []
    for name, value in cut.ticket.notes.items():
        if name not in _TOLD:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append((name[:60], text if len(text) < 400 else text[:400] + " …"))
    return rows


# -- curves ----------------------------------------------------------------------------------------------------------------


def curves_section(findings: Findings) -> Markup:
    """Loss and accuracy over epochs, with the baseline's beside; the learning rate, and what happened to the masks."""
    heading = tag("h2", "Curves")
    course, beside = findings.course, findings.baseline
    if course is None:
        return tag("section", heading, tag("p", "A ticket file holds no curves; the folder of its run does."), id="curves")
    if not course.rows and not (beside and beside.rows):
        return tag("section", heading, tag("p", "No epoch has ended yet."), id="curves")
    drawn = [
        lines("Loss", _both("loss", course, beside, findings.is_dense)),
        lines("Accuracy", _both("accuracy", course, beside, findings.is_dense), in_percent),
        lines("Survivors replaced in the epoch", [Line("replaced", course.values("flipped"), "other")], in_percent),
        lines("Learning rate at the end of the epoch", [Line("learning rate", course.values("lr"), "other")]),
    ]
    pruned = course.values("pruned")
    if len({round(value, 4) for _, value in pruned}) > 1:
        drawn.append(lines("Pruned", [Line("pruned", pruned, "other")], in_percent))
    seconds = sum(value for _, value in course.values("seconds"))
    took = f"Training took {_duration(seconds)}, without validation." if seconds else None
    alone = beside is None and not findings.is_dense
    hint = joined(["No dense training was run beside it: ", tag("code", "--baseline"), " does that."]) if alone else None
    words = [part for part in (took, hint) if part is not None]
    return tag("section", heading, tag("p", joined(words, " ")) if words else None, tag("div", *drawn, class_="charts"), id="curves")


def _both(key: str, course: Course, beside: Course | None, dense: bool) -> list[Line]:
    """Validation in full strokes, training dashed; the ticket in colour, dense training grey."""
    found = [("dense" if dense else "ticket", course)] + ([] if beside is None else [("dense", beside)])
    drawn = []
    for what, one in found:
        name = "" if one is course else f"{what} "
        drawn.append(Line(f"{name}validation", one.values(f"val_{key}"), what))
        drawn.append(Line(f"{name}training", one.values(key), f"{what} train"))
    return drawn


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


# -- again -----------------------------------------------------------------------------------------------------------------


def commands_section(findings: Findings) -> Markup:
    """Exact commands, and the versions that this page was made with."""
    recipe, cut, place = findings.recipe, findings.cut, findings.place
    parts: list[Any] = []
    if isinstance(recipe, Recipe):
        folder = place if place.is_dir() else place.with_suffix("")
        again = folder.with_name(f"{folder.name or 'run'}-again")
        parts.append(_step("Train it again" if findings.is_dense else "Search it again", search_command(recipe, again)))
    elif recipe is not None:
        code = "settings = yaml.safe_load(open('recipe.yaml'))\nmptify.search(model, train, val, settings, out='again')"
        words = "It was searched from Python, with a network or data of the author’s own. With the recipe above in recipe.yaml"
        parts.append(_step(words, code))
    elif cut is not None:
        command = convert_command(cut.ticket, cut.file.with_name(f"{cut.file.stem}-again.ticket"))
        words = "No registry knows its network, so it is cut from Python: mptify.transform with the settings above, and mptify.save."
        parts.append(_step("Cut it again", command) if command is not None else tag("p", words))
    if findings.course is not None and not findings.course.finished:
        parts.append(_step("Go on with it where it was stopped", quoted("search", "--resume", "--out", place)))
    if cut is not None:
        data = [] if isinstance(recipe, Recipe) else ["--data", "SOURCE"]
        looks = [quoted("eval", cut.file, *data), quoted("inspect", cut.file), quoted("verify", cut.file)]
        parts.append(_step("Judge it, look into it, check it", "\n".join(looks)))
    parts.append(_step("Write this page again", quoted("report", place)))
    same = "The same machine, versions and number of threads (--threads) give the same bytes."
    return tag("section", tag("h2", "Commands to do it again"), *parts, tag("p", same, class_="quiet"), id="again")


def versions() -> str:
    from mptify import __version__

    others = [f"{name} {metadata.version(name)}" for name in ("torch", "timm", "torchvision")]
    return ", ".join([f"mptify {__version__}", *others, f"Python {platform.python_version()}"])


def _step(words: str, command: str) -> Markup:
    return joined([tag("p", f"{words}:"), tag("pre", tag("code", command), tabindex="0")])


def place_name(place: Path) -> str:
    """The last two parts of where it lies: the rest is nobody's business who is shown the page."""
    return "/".join(place.resolve().parts[-2:])
