"""`mptify convert MODEL`: convert a named network into a ticket model and show the changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mptify.cli.options import with_options_of
from mptify.config import TicketConfig, make_config
from mptify.files import check_writable

__all__ = ["convert"]


@with_options_of(TicketConfig, before="num_classes")
def convert(
    model: Annotated[
        str,
        typer.Argument(
            help="resnet18, timm:vit_tiny_patch16_224, torchvision:vgg16, ...; `mptify zoo --list` "
            "lists all."
        ),
    ],
    settings: dict[str, Any],
    num_classes: Annotated[int | None, typer.Option(help="Classes of the network's head.")] = None,
    in_chans: Annotated[int | None, typer.Option(help="Channels of the input images.")] = None,
    input_size: Annotated[
        int | None,
        typer.Option(help="Pixels of a square input, for networks that take only one size."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    graph: Annotated[Path | None, typer.Option(help="Draw the changes into this SVG file.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the ticket, with its initial mask, to this file.")
    ] = None,
    standalone: Annotated[
        bool,
        typer.Option(
            "--standalone",
            help="With --out: store the survivors' signs too, so that no seed is needed.",
        ),
    ] = False,
    float16: Annotated[
        bool, typer.Option("--float16", help="With --out: round all other floats to 16 bits.")
    ] = False,
) -> None:
    """Convert a torchvision or timm network into a ticket model and show the changes."""
    make_config(settings)  # report a wrong setting before the slow imports
    for path in (graph, out):
        if path is not None:
            check_writable(path)

    from mptify.cli.convert_run import run_convert

    arguments = {"num_classes": num_classes, "in_chans": in_chans, "input_size": input_size}
    run_convert(
        model,
        settings,
        arguments,
        as_json=as_json,
        graph=graph,
        out=out,
        standalone=standalone,
        float16=float16,
    )
