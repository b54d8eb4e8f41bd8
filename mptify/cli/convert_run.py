"""What `mptify convert` does with its options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from torch import nn

from mptify.cli.console import console
from mptify.files import write_whole
from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.models.registry import Entry
from mptify.report.surgery_drawing import draw
from mptify.report.verification import rounding_loss
from mptify.surgery import transform
from mptify.surgery.model_summary import summary
from mptify.ticket import save

__all__ = ["run_convert"]


def run_convert(
    name: str,
    settings: Mapping[str, Any],
    arguments: Mapping[str, int | None],
    *,
    as_json: bool,
    graph: Path | None,
    out: Path | None,
    standalone: bool,
    float16: bool,
) -> None:
    """Build a network, convert it, print a summary and write the requested files.

    Args:
        name: The name of the network.
        settings: The fields of `TicketConfig`.
        arguments: The arguments of the network's builder; None leaves one at its default.
        as_json: Whether to print the summary as JSON.
        graph: The SVG file to draw, if any.
        out: The ticket file to write, if any.
        standalone: Whether the ticket stores the signs of its survivors.
        float16: Whether the ticket stores floats in 16 bits.
    """
    entry = registry.resolve(name)
    if entry.shadowed and ":" not in name:
        typer.echo(f"{name}: using torchvision's; timm:{name} is timm's", err=True)
    # Surgery replaces most weights, so constants suffice to print a summary. Values that it keeps,
    # such as position embeddings, matter as soon as they are stored.
    keeps_values = settings["init"] == "keep" or out is not None
    with InitMode("drawn" if keeps_values else "constant", settings["seed"]):
        network = registry.build(entry, **arguments)
    ticketed = transform(network, **settings)
    result = summary(ticketed)
    if as_json:
        fields = {"model": str(entry), **result.as_dict()}
        typer.echo(json.dumps(fields, indent=1, ensure_ascii=False))
    else:
        console().print(result)
    if graph is not None:
        write_whole(graph, draw(ticketed))
        typer.echo(f"drawing: {graph}", err=True)
    if out is not None:
        _save(ticketed, out, entry, arguments, standalone=standalone, float16=float16)


def _save(
    ticketed: nn.Module,
    out: Path,
    entry: Entry,
    arguments: Mapping[str, int | None],
    *,
    standalone: bool,
    float16: bool,
) -> None:
    given = {name: value for name, value in arguments.items() if value is not None}
    ticket = save(
        ticketed, out, str(entry), arguments=given, standalone=standalone, float16=float16
    )
    size = f"{out.stat().st_size:,} bytes"
    if not standalone:
        size += "; until a search changes them, the seed determines its masks"
    typer.echo(f"ticket: {out} ({size}; sha256 {ticket.digest[:16]}…)", err=True)
    if float16:
        loss = 100 * rounding_loss(ticketed, out)
        typer.echo(
            f"float16: on a fixed input, outputs differ by {loss:.2g} % of the largest", err=True
        )
