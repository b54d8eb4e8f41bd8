"""`mptify bench ...`: ratios, measured side by side in one process."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

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

    from mptify import models
    from mptify.cli.console import console
    from mptify.tools import bench

    torch.set_num_threads(threads)
    batches = batch or [128, 32]
    cases = [(bits, prune, size) for size in batches for bits, prune in (("1/32", 0.8), ("1/1", 0.75))]
    out = console()
    with Progress(console=out, disable=not out.is_terminal or as_json, transient=True) as progress:
        task = progress.add_task("timing", total=len(cases) * (rounds + 2) + 5 * commands)

        def tick() -> None:
            progress.advance(task)

        steps = [
            bench.step_ratio(models.resnet18_cifar, "resnet18 (CIFAR)", bits, prune, size, rounds, tick) for bits, prune, size in cases
        ]
        convert = None
        if commands:
            arguments = ["convert", "resnet18", "--bits", "1/1", "--prune", "0.75"]
            convert = bench.command_ratio(arguments, "import torch, torchvision, pydantic, typer, rich", 5, tick)
    if as_json:
        typer.echo(json.dumps({"steps": [asdict(step) for step in steps], "convert": convert}, indent=1))
        return
    out.print(_step_table(steps))
    if convert:
        out.print(f"mptify convert resnet18: {convert[0]:.2f} s, its imports {convert[1]:.2f} s, ratio {convert[2]:.2f}")


def _step_table(steps: list[Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("network", "bits", "batch", "dense ms", "ticket ms", "ratio", "middle half"):
        table.add_column(column, justify="left" if column in ("network", "bits") else "right")
    for step in steps:
        times = f"{step.dense_ms:.1f}", f"{step.ticket_ms:.1f}", f"{step.ratio:.3f}", f"{step.low:.3f} to {step.high:.3f}"
        table.add_row(step.network, step.bits, str(step.batch), *times)
    return table


@app.command("search")
def search(
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of steps to time.")] = 15,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes. May be repeated; 128 and 32 unless given.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch.")] = 2,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Step time and peak memory of `mptify search` on ResNet-18, 32×32 pixels, against dense training by the same loop."""
    import torch
    from rich.progress import Progress
    from rich.table import Table

    from mptify.cli.console import console
    from mptify.tools import bench

    torch.set_num_threads(threads)
    batches = batch or [128, 32]
    kinds = (("1/32", 0.8), ("1/1", 0.75))
    out = console()
    with Progress(console=out, disable=not out.is_terminal or as_json, transient=True) as progress:
        task = progress.add_task("timing", total=len(batches) * (len(kinds) * (rounds + 2) + 3 * memory))

        def tick() -> None:
            progress.advance(task)

        steps = [bench.search_ratio(bits, prune, size, rounds, tick) for size in batches for bits, prune in kinds]
        peaks = []
        for size in batches if memory else []:
            for method, bits, prune in (("dense", "1/32", 0.8), *(("biprop", *kind) for kind in kinds)):
                peaks.append((method, bits, size, bench.peak_memory(method, bits, prune, size)))
                tick()
    if as_json:
        typer.echo(json.dumps({"steps": [asdict(step) for step in steps], "peaks": peaks}, indent=1))
        return
    out.print(_step_table(steps))
    if peaks:
        table = Table(box=None, pad_edge=False)
        for column in ("peak memory", "batch", "MB", "of dense"):
            table.add_column(column, justify="left" if column == "peak memory" else "right")
        for method, bits, size, peak in peaks:
            dense = next(one[3] for one in peaks if one[0] == "dense" and one[2] == size)
            table.add_row(method if method == "dense" else f"{method} {bits}", str(size), f"{peak / 1e6:,.0f}", f"{peak / dense:.3f}")
        out.print(table)


@app.command("ticket")
def ticket(
    rounds: Annotated[int, typer.Option(min=1, help="How often to save and load ResNet-50.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Size of ticket files beside their entropy and other ways to write them, and the time to save and load one."""
    from rich.progress import Progress
    from rich.table import Table

    from mptify.cli.console import console
    from mptify.errors import MptifyError
    from mptify.tools import bench

    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise MptifyError("The comparison with zstd needs its library: pip install zstandard.") from None
    names = ("resnet18", "timm:mobilenetv3_large_100", "torchvision:vit_b_16", "torchvision:convnext_tiny")
    cases = [(name, bits, prune) for name in names for bits in ("1/32", "1/1") for prune in (0.5, 0.8, 0.95)]
    out = console()
    sizes = []
    with Progress(console=out, disable=not out.is_terminal or as_json, transient=True) as progress:
        task = progress.add_task("measuring", total=len(cases) + 1)
        for case in cases:
            sizes.append(bench.ticket_size(*case))
            progress.advance(task)
        speed = bench.ticket_speed("torchvision:resnet50", "1/32", 0.8, rounds)
    if as_json:
        typer.echo(json.dumps({"sizes": [asdict(size) for size in sizes], "speed": asdict(speed)}, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("network", "bits", "pruned", "file", "limit", "entropy", "2 bits", "zstd -19", "xz", "float32", "weights+scores"):
        table.add_column(column, justify="left" if column in ("network", "bits") else "right")
    for size in sizes:
        counts = (size.file, size.limit, size.entropy, size.two_bits, size.zstd, size.xz, size.float32, size.checkpoint)
        table.add_row(size.network, size.bits, f"{100 * size.prune:.0f} %", *(f"{count:,.0f}" for count in counts))
    out.print(table)
    out.print(f"{speed.network}: saved in {speed.save:.2f} s; loaded in {speed.load:.2f} s, {speed.build:.2f} s of which build the network")


@app.command("inference")
def inference(
    what: Annotated[str, typer.Argument(metavar="[FILE|MODEL]", help="A 1/1 ticket file, or a network to make one of.")] = "resnet18",
    prune: Annotated[float, typer.Option(min=0, max=0.999, help="Of a network: the fraction to remove.")] = 0.75,
    size: Annotated[int | None, typer.Option(min=8, help="Pixels of the image; what the network is made for unless given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often to run each.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Threads for all of them.")] = 1,
    nodes: Annotated[bool, typer.Option(help="List the program's steps.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """One image through a packed 1/1 ticket: step by step, and beside torch and onnxruntime on the same architecture in float32."""
    from rich.progress import Progress
    from rich.table import Table

    from mptify.cli.console import console
    from mptify.tools import bench_inference as measure

    out = console()
    _set_threads(threads)
    with Progress(console=out, disable=not out.is_terminal or as_json, transient=True) as progress:
        task = progress.add_task("timing", total=rounds + 2)
        dense, ticketed, image = measure.from_file(what, size) if _is_file(what) else measure.ready_network(what, prune, size)
        times = measure.network_times(dense, ticketed, image, rounds, lambda: progress.advance(task))
    if as_json:
        typer.echo(json.dumps(asdict(times) | {"float_share": times.float_share}, indent=1))
        return
    if nodes:
        table = Table(box=None, pad_edge=False)
        for column in ("step", "by", "ms", "share"):
            table.add_column(column, justify="left" if column in ("step", "by") else "right")
        total = sum(node.ms for node in times.nodes)
        for node in times.nodes:
            table.add_row(node.name, node.kernel, f"{node.ms:.3f}", f"{100 * node.ms / total:.1f} %")
        out.print(table)
    table = Table(box=None, pad_edge=False)
    for column in (f"{what}, {image.shape[-1]} pixels, {threads} thread{'s' * (threads > 1)}", "ms", "packed is faster by"):
        table.add_column(column, justify="left" if column.startswith(what) else "right")
    labels = {"eager": "torch float32", "channels_last": "torch float32, channels_last", "onnxruntime": "onnxruntime float32"}
    table.add_row("packed", f"{times.packed:.2f}", "")
    for name, label in labels.items():
        ms = getattr(times, name)
        table.add_row(label, *(("not installed", "") if ms is None else (f"{ms:.2f}", f"{ms / times.packed:.1f}")))
    out.print(table)
    if times.speedup is not None:
        out.print(
            f"With {threads} threads the program is {times.speedup:.2f} times as fast as with one. "
            f"As many programs at once, with one thread each, do {times.at_once:.2f} times as many images."
        )
    out.print(
        f"Packed layers hold {times.survivors:,} of {times.weights:,} weights in {times.weight_bytes / 1e6:.2f} MB "
        f"({8 * times.weight_bytes / max(times.survivors, 1):.1f} bits each); {100 * times.float_share:.0f} % of the time is torch's."
    )


@app.command("layers")
def layers(
    prune: Annotated[list[float] | None, typer.Option(min=0, max=0.999, help="Fractions to remove; 0.75 and 0.9 unless given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often to run each.")] = 51,
    threads: Annotated[int, typer.Option(min=1, help="Threads for both.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """The 3×3 layers of ResNet-18's four stages on one image, packed, thresholds included, beside torch's float32 convolution.

    Ratios of medians, and of the lowest tenth of both: what they are when no neighbour uses the core.
    """
    from rich.progress import Progress
    from rich.table import Table

    from mptify.cli.console import console
    from mptify.tools import bench_inference as measure

    out = console()
    _set_threads(threads)
    cases = [(*stage, rate) for rate in prune or [0.75, 0.9] for stage in measure.STAGES]
    with Progress(console=out, disable=not out.is_terminal or as_json, transient=True) as progress:
        task = progress.add_task("timing", total=len(cases) * (rounds + 2))
        found = [measure.layer_time(*case, rounds, lambda: progress.advance(task)) for case in cases]
    if as_json:
        typer.echo(json.dumps([asdict(one) | {"ratio": one.ratio, "undisturbed": one.undisturbed} for one in found], indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("channels", "pixels", "pruned", "packed ms", "float32 ms", "ratio", "undisturbed"):
        table.add_column(column, justify="right")
    for one in found:
        figures = f"{100 * one.prune:.0f} %", f"{one.packed:.3f}", f"{one.dense:.2f}", f"{one.ratio:.1f}", f"{one.undisturbed:.1f}"
        table.add_row(str(one.channels), f"{one.size}×{one.size}", *figures)
    out.print(table)


@app.command("prune")
def prune_rates(
    model: Annotated[str, typer.Argument(help="The network.")] = "resnet18",
    plot: Annotated[Path | None, typer.Option(help="Draw it: a .png or .svg file.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often to run each.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Threads for both.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Time of a packed 1/1 network against the fraction that is pruned, beside float32."""
    from rich.progress import Progress
    from rich.table import Table

    from mptify.cli.console import console
    from mptify.errors import BadConfig
    from mptify.files import check_writable
    from mptify.tools import bench_inference as measure

    out = console()
    if plot is not None:
        check_writable(plot)
        if plot.suffix not in (".png", ".svg"):
            raise BadConfig(f"--plot {plot}: a .png or .svg file is drawn.")
    _set_threads(threads)
    rates = [0.0, 0.25, 0.5, 0.625, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98]
    with Progress(console=out, disable=not out.is_terminal or as_json, transient=True) as progress:
        task = progress.add_task("timing", total=rounds + 2)
        rows = measure.prune_times(model, rates, None, rounds, lambda: progress.advance(task))
    if plot is not None:
        from mptify.report.plots import draw_prune_times

        draw_prune_times(rows, model, plot)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("pruned", "packed ms", "float32 ms", "ratio"):
        table.add_column(column, justify="right")
    for rate, dense, packed in rows:
        table.add_row(f"{100 * rate:.1f} %", f"{packed:.2f}", f"{dense:.1f}", f"{dense / packed:.1f}")
    out.print(table)


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _is_file(what: str) -> bool:
    return Path(what).suffix != "" or Path(what).is_file()
