"""`mptify bench ...`: ratios, measured side by side in one process."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Measure speed, as ratios taken side by side.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure speed, as ratios taken side by side."""


@app.command("surgery")
def surgery(
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of steps to time.")] = 15,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes. May be repeated; 128 and 32 unless given.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch.")] = 2,
    commands: Annotated[bool, typer.Option(help="Time `mptify convert resnet18` against its imports too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Step time of a ticket ResNet-18 against dense training of the same network, 32×32 pixels; and of `convert`."""
    import torch
    from rich.progress import Progress
    from rich.table import Table

    from mptify import bench
    from mptify.cli.console import console

    torch.set_num_threads(threads)
    batches = batch or [128, 32]
    cases = [(bits, prune, size) for size in batches for bits, prune in (("1/32", 0.8), ("1/1", 0.75))]
    out = console()
    with Progress(console=out, disable=not out.is_terminal or as_json, transient=True) as progress:
        task = progress.add_task("timing", total=len(cases) * (rounds + 2) + 5 * commands)

        def tick() -> None:
            progress.advance(task)

        steps = [bench.step_ratio(bench.cifar_resnet18, "resnet18 (CIFAR)", bits, prune, size, rounds, tick) for bits, prune, size in cases]
        convert = None
        if commands:
            arguments = ["convert", "resnet18", "--bits", "1/1", "--prune", "0.75"]
            convert = bench.command_ratio(arguments, "import torch, torchvision, pydantic, typer, rich", 5, tick)
    if as_json:
        typer.echo(json.dumps({"steps": [asdict(step) for step in steps], "convert": convert}, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("network", "bits", "batch", "dense ms", "ticket ms", "ratio", "middle half"):
        table.add_column(column, justify="left" if column in ("network", "bits") else "right")
    for step in steps:
        table.add_row(
            step.network,
            step.bits,
            str(step.batch),
            f"{step.dense_ms:.1f}",
            f"{step.ticket_ms:.1f}",
            f"{step.ratio:.3f}",
            f"{step.low:.3f} to {step.high:.3f}",
        )
    out.print(table)
    if convert:
        out.print(f"mptify convert resnet18: {convert[0]:.2f} s, its imports {convert[1]:.2f} s, ratio {convert[2]:.2f}")
