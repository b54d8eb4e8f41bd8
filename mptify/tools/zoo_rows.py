"""The rows of a zoo check: JSON lines, each with what was found of one model in some modes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mptify.errors import MptifyError

__all__ = [
    "DEFAULT_BITS",
    "PRUNE",
    "Row",
    "as_line",
    "bits_of",
    "merged",
    "missing_bits",
    "passed",
    "read_rows",
    "was_run",
]

# The modes of a zoo check: bits, and the prune rate that is usual with them.
PRUNE = {"1/32": 0.8, "1/8": 0.8, "1/4": 0.8, "1/2": 0.8, "1/1": 0.75}
DEFAULT_BITS = ("1/32", "1/1")

Row = dict[str, Any]


def bits_of(row: Row) -> tuple[str, ...]:
    """The modes in which the model of a row was to be checked; a row names others than usual."""
    return tuple(row.get("bits", DEFAULT_BITS))


def missing_bits(model: str, bits: Sequence[str], rows: Iterable[Row]) -> tuple[str, ...]:
    """Those of `bits` in which the rows do not hold a check of `model`, passed or failed."""
    checked = {one for row in rows if row["model"] == model for one in bits_of(row)}
    return tuple(one for one in bits if one not in checked)


def merged(rows: Iterable[Row]) -> list[Row]:
    """One row per model, with the modes of all of its rows."""
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row["model"], []).append(row)
    return [_merged(some) if len(some) > 1 else some[0] for some in models.values()]


def _merged(rows: list[Row]) -> Row:
    """The rows of one model as one row; of errors, the first."""
    found = {one: mode for row in rows for one, mode in row["modes"].items()}
    asked = {one for row in rows for one in bits_of(row)}
    row: Row = {
        "model": rows[0]["model"],
        "parameters": max(row["parameters"] for row in rows),
        "modes": {one: found[one] for one in PRUNE if one in found},
        "bits": [one for one in PRUNE if one in asked],
    }
    errors = [row["error"] for row in rows if "error" in row]
    if errors:
        row["error"] = errors[0]
    return {**row, "seconds": round(sum(row["seconds"] for row in rows), 1)}


def passed(row: Row) -> bool:
    """Whether the model converts in every mode and passes every check."""
    return (
        "error" not in row
        and len(row["modes"]) == len(bits_of(row))
        and not any(mode["failed"] for mode in row["modes"].values())
    )


def was_run(row: Row) -> bool:
    """Whether the model ran forward and backward in every mode."""
    return bool(row["modes"]) and all(mode["ran"] for mode in row["modes"].values())


def as_line(row: Row) -> str:
    """A row as one line of JSON."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_rows(path: Path) -> list[Row]:
    """Read the rows of an earlier check.

    Args:
        path: The file of rows, which need not exist.

    Returns:
        The rows. A row that an interruption cut short is skipped.

    Raises:
        MptifyError: The file can't be read, or a line is not a row.
    """
    try:
        lines = path.read_bytes().decode().splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise MptifyError(f"{path}: can't be read as rows of a zoo check ({reason}).") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            _ = row["model"], row["modes"]
            rows.append(row)
        except (json.JSONDecodeError, KeyError, TypeError):
            if not '{"model": '.startswith(line[:10]):
                raise MptifyError(
                    f"{path}: line {number} is not a row of a zoo check; choose another file."
                ) from None
    return rows
