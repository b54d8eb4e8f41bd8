"""`mptify convert MODEL`: make a ticket model of a named network and show what was done to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["convert"]


def convert(
    model: Annotated[
        str, typer.Argument(help="resnet18, timm:vit_tiny_patch16_224, torchvision:vgg16, ...; `mptify zoo --list` shows all.")
    ],
    bits: Annotated[str, typer.Option(help="Bits per weight / bits per activation: 1/32, 1/1, 32/32 or 32/1.")] = "1/32",
    prune: Annotated[float, typer.Option(help="The fraction of weights removed, at least 0 and below 1.")] = 0.5,
    prune_at: Annotated[list[str] | None, typer.Option(help="Another fraction for some layers: PATTERN=FRACTION. May be repeated.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="Convert only layers that match this pattern. May be repeated.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave layers dense that match this pattern. May be repeated.")] = None,
    dense: Annotated[list[str] | None, typer.Option(help="Leave these dense: first, last, depthwise. May be repeated.")] = None,
    residual: Annotated[str, typer.Option(help="With 1-bit activations, what shortcuts carry: binary or real.")] = "binary",
    bn: Annotated[
        str, typer.Option(help="With 32-bit activations: insert puts a BatchNorm before each activation; keep does not.")
    ] = "keep",
    scope: Annotated[str, typer.Option(help="Prune each layer by its share (layer), or all by one threshold (global).")] = "layer",
    floor: Annotated[float, typer.Option(help="With --scope global: the share that every layer keeps at least.")] = 0.01,
    learn_bn: Annotated[bool, typer.Option("--learn-bn", help="Learn the norms' weight and bias.")] = False,
    bias: Annotated[str, typer.Option(help="Biases of converted layers: drop or learn.")] = "drop",
    other: Annotated[str, typer.Option(help="Parameters that no mask covers: learn or freeze.")] = "learn",
    init: Annotated[str, typer.Option(help="Frozen weights: a registered scheme, or keep.")] = "kaiming_normal",
    score_grad: Annotated[str, typer.Option(help="Scale of the scores' gradient: biprop (|W|) or alpha (the gain).")] = "biprop",
    sign_width: Annotated[float, typer.Option(help="Width t of the estimator behind each sign.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the frozen weights and of the first scores.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if a conv or linear weight would stay dense.")] = False,
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
    from mptify.config import make_config
    from mptify.files import check_writable, write_whole

    settings: dict[str, Any] = {
        "bits": bits, "prune": prune, "prune_overrides": _overrides(prune_at or []), "include": tuple(include or ()),
        "exclude": tuple(exclude or ()), "dense": tuple(dense or ()), "residual": residual, "bn": bn, "scope": scope, "floor": floor,
        "learn_bn": learn_bn, "bias": bias, "other": other, "init": init, "score_grad": score_grad, "sign_width": sign_width,
        "seed": seed, "strict": strict,
    }  # fmt: skip
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
    careful = init == "keep" or out is not None
    with InitMode("drawn" if careful else "constant", seed):  # what surgery leaves alone, such as position embeddings, counts
        network = registry.build(entry, **arguments)
    ticketed = transform(network, **settings)
    result = summary(ticketed)
    if as_json:
        typer.echo(json.dumps({"model": str(entry), **result.as_dict()}, indent=1, ensure_ascii=False))
    else:
        console().print(result)
    if graph is not None:
        from mptify.report.drawing import draw

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


def _overrides(given: list[str]) -> dict[str, float]:
    from mptify.errors import BadConfig

    overrides = {}
    for one in given:
        pattern, equals, fraction = one.rpartition("=")
        try:
            overrides[pattern] = float(fraction)
        except ValueError:
            equals = ""
        if not equals:
            raise BadConfig(f"--prune-at {one!r}: write PATTERN=FRACTION, for instance 'layer1.*=0.5'.")
    return overrides
