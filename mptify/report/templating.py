"""The Jinja2 environment of the report: everything a template shows is escaped."""

from __future__ import annotations

from functools import cache
from typing import Any

import jinja2
import markupsafe

__all__ = ["in_bytes", "in_percent", "render"]


def render(template: str, **context: Any) -> str:
    """Fill in a file of `templates/`; a name that the context lacks is an error."""
    return _environment().get_template(template).render(context)


def in_percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def in_bytes(count: float) -> str:
    if count >= 1e6:
        return f"{count / 1e6:,.2f} MB"
    return f"{count / 1e3:,.1f} kB" if count >= 1e4 else f"{count:,.0f} bytes"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mptify.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        {"bytes": in_bytes, "percent": in_percent, "thousands": "{:,.0f}".format, "shape": _shape}
    )
    return environment


def _printable(value: Any) -> Any:
    """Replace what can't be seen or would turn a line around, such as U+202E."""
    if isinstance(value, markupsafe.Markup):
        return value
    return "".join(
        one if one.isprintable() or one in "\n\u00a0" else "\ufffd" for one in str(value)
    )


def _shape(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes))
