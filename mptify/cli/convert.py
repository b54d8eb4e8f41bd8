"""`mptify convert MODEL`: make a ticket model of a named network and show what was done to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mptify.cli.options import with_options_of
from mptify.config import TicketConfig, make_config

__all__ = ["convert"]


@with_options_of(TicketConfig, before="num_classes")
def convert(
    model: Annotated[
        str, typer.Argument(help="resnet18, timm:vit_tiny_patch16_224, torchvision:vgg16, ...; `mptify zoo --list` shows all.")
    ],
    settings: dict[str, Any],
    num_classes: Annotated[int | None, typer.Option(help="Classes of the network's head.")] = None,
    in_chans: Annotated[int | None, typer.Option(help="Channels of the input images.")] = None,
    input_size: Annotated[int | None, typer.Option(help="Pixels of a square input, for networks built for one size.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    graph: Annotated[Path | None, typer.Option(help="Write a picture (SVG) of what was changed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the ticket, with its first mask, to this file.")] = None,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="With --out: store the survivors' signs too, so that no seed is needed.")
    ] = False,
    float16: Annotated[bool, typer.Option("--float16", help="With --out: store other floats in 16 bits, at a loss.")] = False,
) -> None:
    """Turn a torchvision or timm network into its multi-prize version and show what was done to it."""
    from mptify.cli.console import console
    from mptify.files import check_writable, write_whole

    make_config(settings)  # a wrong setting is told before anything is built
    for path in (graph, out):
        if path is not None:
            check_writable(path)

    from mptify.models import registry
    from mptify.models.init_mode import InitMode
    from mptify.surgery import transform
    from mptify.surgery.model_summary import summary

    entry = registry.resolve(model)
    if entry.shadowed and ":" not in model:
        typer.echo(f"{model}: torchvision's (timm:{model} is the other one)", err=True)
    arguments = {"num_classes": num_classes, "in_chans": in_chans, "input_size": input_size}
    careful = settings["init"] == "keep" or out is not None
    with InitMode("drawn" if careful else "constant", settings["seed"]):  # what surgery leaves alone, such as position embeddings, counts
        network = registry.build(entry, **arguments)
    ticketed = transform(network, **settings)
    result = summary(ticketed)
    if as_json:
        typer.echo(json.dumps({"model": str(entry), **result.as_dict()}, indent=1, ensure_ascii=False))
    else:
        console().print(result)
    if graph is not None:
        from mptify.report.surgery_drawing import draw

        write_whole(graph, draw(ticketed))
        typer.echo(f"picture: {graph}", err=True)
    if out is not None:
        from mptify.ticket import save

        given = {name: value for name, value in arguments.items() if value is not None}
        ticket = save(ticketed, out, str(entry), arguments=given, standalone=standalone, float16=float16)
        size = f"{out.stat().st_size:,} bytes" + ("" if standalone else "; its masks follow from the seed until a search changes them")
        typer.echo(f"ticket: {out} ({size}; sha256 {ticket.digest[:16]}…)", err=True)
        if float16:
            from mptify.report.verification import rounding_loss

            typer.echo(f"float16: on a fixed input, outputs differ by {100 * rounding_loss(ticketed, out):.2g} % of the largest", err=True)
