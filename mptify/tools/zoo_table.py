"""The results of the zoo check: totals, and a page in Markdown."""

from __future__ import annotations

from typing import Any

from mptify.tools.zoo_check import MODES, RUN_LIMIT, Row, passed, was_run

__all__ = ["markdown", "summary"]

_GRADIENT_NOTES = {
    "dead": "get no gradient in the dense network either",
    "unlucky": "get a gradient with another seed only",
}


def summary(rows: list[Row]) -> dict[str, Any]:
    """Sum up all rows.

    Args:
        rows: The rows.

    Returns:
        The numbers of models, of those that are converted, passed, run and traced as a whole, and
        the share of weights that is converted.
    """
    modes = [mode for row in rows for mode in row["modes"].values()]
    weights = sum(mode["weights"] for mode in modes)
    return {
        "models": len(rows),
        "converted": sum(len(row["modes"]) == len(MODES) for row in rows),
        "passed": sum(passed(row) for row in rows),
        "run": sum(was_run(row) for row in rows),
        "whole": sum(all(mode["parts"] == 1 for mode in row["modes"].values()) for row in rows),
        "share": sum(mode["converted"] for mode in modes) / weights if weights else 0.0,
    }


def markdown(rows: list[Row]) -> str:
    """The rows as a page of the docs, `docs/coverage.md`."""
    totals = summary(rows)
    rows = sorted(rows, key=lambda row: (row["model"].startswith("timm:"), row["model"]))
    lines = [
        "# Zoo check",
        "",
        f"`mptify zoo --all` converts {totals['models']:,} models of torchvision and timm to 1/32 "
        "at 80 % and to 1/1 at 75 %.",
        "",
        f"- {totals['converted']:,} convert in both modes; {totals['passed']:,} of them pass "
        "every check.",
        f"- {100 * totals['share']:.4f} % of all weights are converted; a table below lists the "
        "rest.",
        f"- {totals['whole']:,} are traced as a whole, the others in parts.",
        f"- {totals['run']:,} have at most {RUN_LIMIT // 10**6} M parameters and also ran: one "
        "training step per mode, and one evaluation in 1/1.",
        "",
        "The structure of every model is checked: every sign has a normalized input (I2), only the "
        "parameters that the config names require grad (I4), and every conv and linear weight is "
        "accounted for (I5). Runs check more: every ticket layer that is not exempt sees only ±1 "
        "(I1), and the scores of every layer get a finite, non-zero gradient (I4).",
        "",
        *_dense_table(rows),
        "| model | parameters | traced | converted 1/32 | converted 1/1 | checks |",
        "| --- | ---: | --- | ---: | ---: | --- |",
    ]
    return "\n".join(lines + [_table_row(row) for row in rows]) + "\n"


def _dense_table(rows: list[Row]) -> list[str]:
    found = []
    for row in rows:
        left = {
            (name, count, reason): None
            for mode in row["modes"].values()
            for name, count, reason in mode["left"]
        }
        reasons: dict[str, list[tuple[str, int]]] = {}
        for name, count, reason in left:
            reasons.setdefault(reason, []).append((name, count))
        for reason, layers in reasons.items():
            more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
            weights = sum(count for _, count in layers)
            found.append(f"| {row['model']} | `{layers[0][0]}`{more} | {weights:,} | {reason} |")
    if not found:
        return []
    return [
        "## What stays dense",
        "",
        "| model | layers | weights | reason |",
        "| --- | --- | ---: | --- |",
        *found,
        "",
        "## Every model",
        "",
    ]


def _table_row(row: Row) -> str:
    cells = [row["model"], f"{row['parameters'] / 1e6:,.1f} M"]
    if "error" in row and not row["modes"]:
        return "| " + " | ".join([*cells, "–", "–", "–", f"**{row['error']}**"]) + " |"
    parts = max(mode["parts"] for mode in row["modes"].values())
    cells.append("whole" if parts == 1 else f"{parts} parts")
    cells += [
        f"{100 * mode['converted'] / mode['weights']:.2f} %" for mode in row["modes"].values()
    ]
    failed = [
        f"{check} in {bits}" for bits, mode in row["modes"].items() for check in mode["failed"]
    ]
    if "error" in row or failed:
        verdict = f"**{row.get('error') or ', '.join(failed)}**"
    else:
        verdict = "all" if was_run(row) else "structure; not run"
    for kind, note in _GRADIENT_NOTES.items():
        names = {name for mode in row["modes"].values() for name in mode.get(kind, ())}
        if names:
            verdict += f"; {len(names)} layers {note}"
    return "| " + " | ".join([*cells, verdict]) + " |"
