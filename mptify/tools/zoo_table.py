"""The results of the zoo check: totals, and a page in Markdown."""

from __future__ import annotations

from typing import Any

from mptify.tools.zoo_check import RUN_LIMIT
from mptify.tools.zoo_rows import DEFAULT_BITS, PRUNE, Row, bits_of, passed, was_run

__all__ = ["markdown", "modes_in_words", "summary"]

_GRADIENT_NOTES = {
    "dead": "get no gradient in the dense network either",
    "unlucky": "get a gradient with another seed or other images only",
}


def summary(rows: list[Row]) -> dict[str, Any]:
    """Sum up all rows.

    Args:
        rows: One row per model.

    Returns:
        The modes, the numbers of models, of those that are converted, passed, run and traced as a
        whole, and the share of weights that is converted.
    """
    asked = {bits for row in rows for bits in bits_of(row)}
    modes = [mode for row in rows for mode in row["modes"].values()]
    weights = sum(mode["weights"] for mode in modes)
    return {
        "bits": [bits for bits in PRUNE if bits in asked] or list(DEFAULT_BITS),
        "models": len(rows),
        "converted": sum(len(row["modes"]) == len(bits_of(row)) for row in rows),
        "passed": sum(passed(row) for row in rows),
        "run": sum(was_run(row) for row in rows),
        "whole": sum(all(mode["parts"] == 1 for mode in row["modes"].values()) for row in rows),
        "share": sum(mode["converted"] for mode in modes) / weights if weights else 0.0,
    }


def modes_in_words(bits: list[str]) -> str:
    """How to speak of several modes: "both modes"."""
    numbers = {1: "this mode", 2: "both modes", 3: "all three modes", 4: "all four modes"}
    return numbers.get(len(bits), "all five modes")


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def markdown(rows: list[Row]) -> str:
    """The rows as a page of the docs, `docs/coverage.md`.

    Args:
        rows: One row per model.
    """
    totals = summary(rows)
    bits = totals["bits"]
    modes = [f"to {one} at {100 * PRUNE[one]:.0f} %" for one in bits]
    few_bits = [one for one in bits if one != "1/32"]
    evaluated = f", and one evaluation in {_listed(few_bits)}" if few_bits else ""
    rows = sorted(rows, key=lambda row: (row["model"].startswith("timm:"), row["model"]))
    lines = [
        "# Zoo check",
        "",
        f"`mptify zoo` converts {totals['models']:,} models of torchvision and timm "
        f"{_listed(modes)}.",
        "",
        f"- {totals['converted']:,} convert in {modes_in_words(bits)}; {totals['passed']:,} of "
        "them pass every check.",
        f"- {100 * totals['share']:.4f} % of all weights are converted; a table below lists the "
        "rest.",
        f"- {totals['whole']:,} are traced as a whole, the others in parts.",
        f"- {totals['run']:,} have at most {RUN_LIMIT // 10**6} M parameters and also ran: one "
        f"training step per mode{evaluated}.",
        "",
        "The structure of every model is checked: every quantizer in place of an activation has a "
        "normalized input (I2), only the parameters that the config names require grad (I4), and "
        "every conv and linear weight is accounted for (I5). Runs check more: every ticket layer "
        "that is not exempt sees only the levels of its quantizer, which are ±1 in 1/1 (I1), and "
        "the scores of every layer get a finite, non-zero gradient (I4).",
        "",
        *_dense_table(rows),
        f"| model | parameters | traced | {' | '.join(f'converted {one}' for one in bits)} "
        "| checks |",
        f"| --- | ---: | --- | {'---: | ' * len(bits)}--- |",
    ]
    return "\n".join(lines + [_table_row(row, bits) for row in rows]) + "\n"


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


def _table_row(row: Row, bits: list[str]) -> str:
    cells = [row["model"], f"{row['parameters'] / 1e6:,.1f} M"]
    if "error" in row and not row["modes"]:
        return "| " + " | ".join([*cells, "–", *("–" for _ in bits), f"**{row['error']}**"]) + " |"
    parts = max(mode["parts"] for mode in row["modes"].values())
    cells.append("whole" if parts == 1 else f"{parts} parts")
    found = [row["modes"].get(one) for one in bits]
    cells += [
        f"{100 * mode['converted'] / mode['weights']:.2f} %" if mode else "–" for mode in found
    ]
    failed = [f"{check} in {one}" for one, mode in row["modes"].items() for check in mode["failed"]]
    if "error" in row or failed:
        verdict = f"**{row.get('error') or ', '.join(failed)}**"
    else:
        verdict = "all" if was_run(row) else "structure; not run"
    for kind, note in _GRADIENT_NOTES.items():
        names = {name for mode in row["modes"].values() for name in mode.get(kind, ())}
        if names:
            verdict += f"; {len(names)} layers {note}"
    return "| " + " | ".join([*cells, verdict]) + " |"
