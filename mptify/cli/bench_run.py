"""What the commands of `mptify bench` do: measure, then print a table or JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mptify import models
from mptify.cli.console import console
from mptify.cli.tables import Column, make_table
from mptify.cli.zoo_run import checked_bits
from mptify.errors import BadConfig, MptifyError
from mptify.files import check_writable
from mptify.report.plots import draw_prune_times
from mptify.tools import bench
from mptify.tools import bench_inference as inference
from mptify.tools.bench_inference import NetworkTimes
from mptify.tools.zoo_rows import DEFAULT_BITS, PRUNE

__all__ = [
    "bench_inference",
    "bench_layers",
    "bench_prune_rates",
    "bench_search",
    "bench_surgery",
    "bench_ticket",
]

_BATCHES = (128, 32)
_MODES = tuple((bits, PRUNE[bits]) for bits in DEFAULT_BITS)  # bits and prune rate
_TICKET_NETWORKS = (
    "resnet18",
    "timm:mobilenetv3_large_100",
    "torchvision:vit_b_16",
    "torchvision:convnext_tiny",
)
_PRUNE_RATES = [0.0, 0.25, 0.5, 0.625, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98]


def bench_surgery(
    rounds: int, batches: Sequence[int] | None, threads: int, *, commands: bool, as_json: bool
) -> None:
    """Compare steps of ticket and dense training, and `mptify convert` with its imports."""
    torch.set_num_threads(threads)
    cases = [(*mode, size) for size in batches or _BATCHES for mode in _MODES]
    out = console()
    with _progress(out, "timing", len(cases) * (rounds + 2) + 5 * commands, as_json) as tick:
        steps = [
            bench.step_ratio(models.resnet18_cifar, "resnet18 (CIFAR)", *case, rounds, tick)
            for case in cases
        ]
        convert = None
        if commands:
            arguments = ["convert", "resnet18", "--bits", "1/1", "--prune", "0.75"]
            imports = "import torch, torchvision, pydantic, typer, rich"
            convert = bench.command_ratio(arguments, imports, 5, tick)
    if as_json:
        _print_json({"steps": [asdict(step) for step in steps], "convert": convert})
        return
    out.print(_step_table(steps))
    if convert:
        whole, imports_alone, ratio = convert
        out.print(
            f"mptify convert resnet18: {whole:.2f} s, its imports {imports_alone:.2f} s, "
            f"ratio {ratio:.2f}"
        )


def bench_search(
    rounds: int,
    batches: Sequence[int] | None,
    bits: Sequence[str] | None,
    threads: int,
    *,
    memory: bool,
    as_json: bool,
) -> None:
    """Compare time and peak memory of search steps with dense training."""
    modes = [(one, PRUNE[one]) for one in checked_bits(bits)]
    torch.set_num_threads(threads)
    sizes = batches or _BATCHES
    out = console()
    peaks = []
    peak_cases = [("dense", *_MODES[0]), *(("biprop", *mode) for mode in modes)] if memory else []
    total = len(sizes) * (len(modes) * (rounds + 2) + len(peak_cases))
    with _progress(out, "timing", total, as_json) as tick:
        steps = [bench.search_ratio(*mode, size, rounds, tick) for size in sizes for mode in modes]
        for size in sizes:
            for case in peak_cases:
                peaks.append(bench.peak_memory(*case, size))
                tick()
    if as_json:
        _print_json(
            {"steps": [asdict(step) for step in steps], "peaks": [asdict(one) for one in peaks]}
        )
        return
    out.print(_step_table(steps))
    if peaks:
        out.print(_peak_table(peaks))


def bench_ticket(rounds: int, *, as_json: bool) -> None:
    """Compare ticket files with other formats, and time saving and loading."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise MptifyError("The comparison with zstd needs `pip install zstandard`.") from None
    cases = [
        (name, bits, prune)
        for name in _TICKET_NETWORKS
        for bits in ("1/32", "1/1")
        for prune in (0.5, 0.8, 0.95)
    ]
    out = console()
    sizes = []
    with _progress(out, "measuring", len(cases) + 1, as_json) as tick:
        for case in cases:
            sizes.append(bench.ticket_size(*case))
            tick()
        speed = bench.ticket_speed("torchvision:resnet50", "1/32", 0.8, rounds)
    if as_json:
        _print_json({"sizes": [asdict(size) for size in sizes], "speed": asdict(speed)})
        return
    columns = [
        Column("network", lambda size: size.network, left=True),
        Column("bits", lambda size: size.bits, left=True),
        Column("pruned", lambda size: f"{100 * size.prune:.0f} %"),
        Column("file", lambda size: f"{size.file:,.0f}"),
        Column("limit", lambda size: f"{size.limit:,.0f}"),
        Column("entropy", lambda size: f"{size.entropy:,.0f}"),
        Column("2 bits", lambda size: f"{size.two_bits:,.0f}"),
        Column("zstd -19", lambda size: f"{size.zstd:,.0f}"),
        Column("xz", lambda size: f"{size.xz:,.0f}"),
        Column("float32", lambda size: f"{size.float32:,.0f}"),
        Column("weights+scores", lambda size: f"{size.checkpoint:,.0f}"),
    ]
    out.print(make_table(columns, sizes, wrap_all=True))
    out.print(
        f"{speed.network}: saved in {speed.save:.2f} s; loaded in {speed.load:.2f} s, "
        f"{speed.build:.2f} s of which build the network"
    )


def bench_inference(
    name: str,
    bits: str,
    prune: float,
    size: int | None,
    rounds: int,
    threads: int,
    *,
    nodes: bool,
    as_json: bool,
) -> None:
    """Time a packed program beside torch and onnxruntime."""
    out = console()
    torch.set_num_threads(threads)
    is_file = Path(name).suffix != "" or Path(name).is_file()
    with _progress(out, "timing", rounds + 2, as_json) as tick:
        if is_file:
            dense, ticketed, image = inference.networks_of_ticket(name, size)
        else:
            dense, ticketed, image = inference.networks_by_name(name, bits, prune, size)
        times = inference.network_times(dense, ticketed, image, rounds, tick)
    if as_json:
        _print_json(asdict(times))
        return
    if nodes:
        out.print(_node_table(times))
    heading = f"{name}, {image.shape[-1]} pixels, {threads} thread{'s' * (threads > 1)}"
    out.print(_runtime_table(times, heading))
    if times.speedup is not None:
        out.print(
            f"With {threads} threads the program is {times.speedup:.2f} times as fast as with one. "
            f"{threads} programs at once, with one thread each, process {times.at_once:.2f} times "
            f"as many images."
        )
    bits_each = 8 * times.weight_bytes / max(times.survivors, 1)
    out.print(
        f"Packed layers hold {times.survivors:,} of {times.weights:,} weights in "
        f"{times.weight_bytes / 1e6:.2f} MB ({bits_each:.1f} bits each); torch takes "
        f"{100 * times.float_share:.0f} % of the time."
    )


def bench_layers(
    bits: str, prune: Sequence[float] | None, rounds: int, threads: int, *, as_json: bool
) -> None:
    """Time packed layers beside torch's float32 convolution."""
    out = console()
    torch.set_num_threads(threads)
    cases = [(*stage, bits, rate) for rate in prune or [0.75, 0.9] for stage in inference.STAGES]
    with _progress(out, "timing", len(cases) * (rounds + 2), as_json) as tick:
        times = [inference.layer_time(*case, rounds, tick) for case in cases]
    if as_json:
        _print_json(
            [asdict(one) | {"ratio": one.ratio, "undisturbed": one.undisturbed} for one in times]
        )
        return
    columns = [
        Column("channels", lambda layer: str(layer.channels)),
        Column("pixels", lambda layer: f"{layer.size}×{layer.size}"),
        Column("pruned", lambda layer: f"{100 * layer.prune:.0f} %"),
        Column("packed ms", lambda layer: f"{layer.packed:.3f}"),
        Column("float32 ms", lambda layer: f"{layer.dense:.2f}"),
        Column("ratio", lambda layer: f"{layer.ratio:.1f}"),
        Column("undisturbed", lambda layer: f"{layer.undisturbed:.1f}"),
    ]
    out.print(make_table(columns, times, wrap_all=True))


def bench_prune_rates(
    model: str, bits: str, plot: Path | None, rounds: int, threads: int, *, as_json: bool
) -> None:
    """Time a packed network at several prune rates."""
    out = console()
    if plot is not None:
        check_writable(plot)
        if plot.suffix not in (".png", ".svg"):
            raise BadConfig(f"--plot {plot}: the name of a plot ends in .png or .svg.")
    torch.set_num_threads(threads)
    with _progress(out, "timing", rounds + 2, as_json) as tick:
        rows = inference.prune_times(model, bits, _PRUNE_RATES, None, rounds, tick)
    if plot is not None:
        draw_prune_times(rows, model, plot)
    if as_json:
        _print_json(rows)
        return
    columns = [
        Column("pruned", lambda row: f"{100 * row[0]:.1f} %"),
        Column("packed ms", lambda row: f"{row[2]:.2f}"),
        Column("float32 ms", lambda row: f"{row[1]:.1f}"),
        Column("ratio", lambda row: f"{row[1] / row[2]:.1f}"),
    ]
    out.print(make_table(columns, rows, wrap_all=True))


@contextlib.contextmanager
def _progress(out: Console, title: str, total: int, as_json: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal, unless JSON is printed; yields a function that advances it."""
    with Progress(console=out, disable=not out.is_terminal or as_json, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def _print_json(measured: Any) -> None:
    typer.echo(json.dumps(measured, indent=1))


def _step_table(steps: list[bench.StepRatio]) -> Table:
    columns = [
        Column("network", lambda step: step.network, left=True),
        Column("bits", lambda step: step.bits, left=True),
        Column("batch", lambda step: str(step.batch)),
        Column("dense ms", lambda step: f"{step.dense_ms:.1f}"),
        Column("ticket ms", lambda step: f"{step.ticket_ms:.1f}"),
        Column("ratio", lambda step: f"{step.ratio:.3f}"),
        Column("middle half", lambda step: f"{step.low:.3f} to {step.high:.3f}"),
    ]
    return make_table(columns, steps, wrap_all=True)


def _peak_table(peaks: list[bench.PeakMemory]) -> Table:
    """Peak memory, also as a multiple of dense training's, with and without libraries."""
    dense = {one.batch: one for one in peaks if one.method == "dense"}

    def own_ratio(one: bench.PeakMemory) -> float:
        other = dense[one.batch]
        return (one.peak - one.libraries) / (other.peak - other.libraries)

    columns = [
        Column(
            "peak memory",
            lambda one: one.method if one.method == "dense" else f"{one.method} {one.bits}",
            left=True,
        ),
        Column("batch", lambda one: str(one.batch)),
        Column("MB", lambda one: f"{one.peak / 1e6:,.0f}"),
        Column("of dense", lambda one: f"{one.peak / dense[one.batch].peak:.3f}"),
        Column("libraries MB", lambda one: f"{one.libraries / 1e6:,.0f}"),
        Column("of dense without", lambda one: f"{own_ratio(one):.3f}"),
    ]
    return make_table(columns, peaks, wrap_all=True)


def _node_table(times: NetworkTimes) -> Table:
    total = sum(node.ms for node in times.nodes)
    columns = [
        Column("step", lambda node: node.name, left=True),
        Column("by", lambda node: node.kernel, left=True),
        Column("ms", lambda node: f"{node.ms:.3f}"),
        Column("share", lambda node: f"{100 * node.ms / total:.1f} %"),
    ]
    return make_table(columns, times.nodes, wrap_all=True)


def _runtime_table(times: NetworkTimes, heading: str) -> Table:
    rows: list[tuple[str, float | None]] = [
        ("torch float32", times.eager),
        ("torch float32, channels_last", times.channels_last),
        ("onnxruntime float32", times.onnxruntime),
    ]
    cells = [("packed", f"{times.packed:.2f}", "")]
    for label, ms in rows:
        if ms is None:
            cells.append((label, "not installed", ""))
        else:
            cells.append((label, f"{ms:.2f}", f"{ms / times.packed:.1f}"))
    columns = [
        Column(heading, lambda row: row[0], left=True),
        Column("ms", lambda row: row[1]),
        Column("packed is faster by", lambda row: row[2]),
    ]
    return make_table(columns, cells, wrap_all=True)
