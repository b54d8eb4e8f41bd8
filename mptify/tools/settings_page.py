"""All settings as a page of the docs: `python -m mptify.tools.settings_page > docs/settings.md`, which a test compares."""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import BaseModel

from mptify.config import DataConfig, Recipe, SearchConfig, TicketConfig

__all__ = ["page"]

_START = """# Settings

Everything that a recipe can say, and what it says where it is silent. `--set key=value` changes one on the command line.
This page is made from the program (`python -m mptify.tools.settings_page`).
"""


def page() -> str:
    """The page in Markdown."""
    parts: list[tuple[str, str, type[BaseModel], tuple[str, ...]]] = [
        ("The search", "", SearchConfig, ("ticket",)),
        ("The network, the baseline", "", Recipe, (*SearchConfig.model_fields, "data")),
        ("The data", "data.", DataConfig, ()),
        ("The ticket", "ticket.", TicketConfig, ()),
    ]
    return _START + "".join(_section(*part) for part in parts)


def _section(title: str, prefix: str, model: type[BaseModel], left_out: tuple[str, ...]) -> str:
    values = model.model_validate({}).model_dump(mode="json")
    rows = [
        f"| `{prefix}{name}` | `{_plain(values[name])}` | {(field.description or '').replace('|', chr(92) + '|')} |"
        for name, field in model.model_fields.items()
        if name not in left_out
    ]
    return (
        f"\n## {title}\n\n| key | default | what it is |\n| --- | --- | --- |\n"
        + "\n".join(rows)
        + "\n"
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    sys.stdout.write(page())
