"""Write all settings as a page of the docs.

Run `python -m mptify.tools.settings_page > docs/settings.md`. A test compares the file.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import BaseModel

from mptify.config import DataConfig, Recipe, SearchConfig, TicketConfig

__all__ = ["page"]

_START = """# Settings

All settings of a recipe and their defaults. On the command line, `--set key=value` changes one.
`python -m mptify.tools.settings_page > docs/settings.md` writes this page.
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


def _section(title: str, prefix: str, model: type[BaseModel], omitted: tuple[str, ...]) -> str:
    values = model.model_validate({}).model_dump(mode="json")
    rows = []
    for name, field in model.model_fields.items():
        if name not in omitted:
            description = (field.description or "").replace("|", "\\|")
            rows.append(f"| `{prefix}{name}` | `{_as_text(values[name])}` | {description} |")
    return (
        f"\n## {title}\n\n| key | default | description |\n| --- | --- | --- |\n"
        + "\n".join(rows)
        + "\n"
    )


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    sys.stdout.write(page())
