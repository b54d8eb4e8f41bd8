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
from mptify.errors import BadConfig, MptifyError
from mptify.files import check_writable
from mptify.report.plots import draw_accuracies, draw_prune_times
from mptify.tools import bench
from mptify.tools import bench_inference as inference
from mptify.tools import bench_layers as layers
from mptify.tools.bench_bits import accuracies_of, bits_times
from mptify.tools.bench_inference import NetworkTimes

__all__ = [
    "bench_bits",
    "bench_inference",
    "bench_layers",
    "bench_prune_rates",
    "bench_search",
    "bench_surgery",
    "bench_ticket",
]

_BATCHES = (128, 32)
_MODES = (("1/32", 0.8), ("1/1", 0.75))  # bits and prune rate
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
    rounds: int, batches: Sequence[int] | None, threads: int, *, memory: bool, as_json: bool
) -> None:
    """Compare time and peak memory of search steps with dense training."""
    torch.set_num_threads(threads)
    sizes = batches or _BATCHES
    out = console()
    peaks = []
    with _progress(
        out, "timing", len(sizes) * (len(_MODES) * (rounds + 2) + 3 * memory), as_json
    ) as tick:
        steps = [bench.search_ratio(*mode, size, rounds, tick) for size in sizes for mode in _MODES]
        for size in sizes if memory else []:
            for method, bits, prune in (
                ("dense", "1/32", 0.8),
                *(("biprop", *mode) for mode in _MODES),
            ):
                peaks.append((method, bits, size, bench.peak_memory(method, bits, prune, size)))
                tick()
    if as_json:
        _print_json({"steps": [asdict(step) for step in steps], "peaks": peaks})
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
    batch: int,
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
            dense, ticketed, image = inference.networks_of_ticket(name, size, batch)
        else:
            dense, ticketed, image = inference.networks_by_name(name, bits, prune, size, batch)
        times = inference.network_times(dense, ticketed, image, rounds, tick)
    if as_json:
        _print_json(asdict(times))
        return
    if nodes:
        out.print(_node_table(times))
    heading = f"{name}, {image.shape[-1]} pixels, {threads} thread{'s' * (threads > 1)}"
    heading += f", batch {batch}" * (batch > 1)
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
    bits: str,
    prune: Sequence[float] | None,
    rounds: int,
    threads: int,
    *,
    which: str,
    as_json: bool,
) -> None:
    """Time packed layers beside torch's float32 convolution."""
    out = console()
    torch.set_num_threads(threads)
    kinds = {"stages": layers.STAGES, "pointwise": layers.POINTWISE, "every": layers.EVERY}
    if which not in kinds:
        raise BadConfig(f"--which {which}: should be {', '.join(kinds)}.")
    cases = [(shape, bits, rate) for rate in prune or [0.75, 0.9] for shape in kinds[which]]
    with _progress(out, "timing", len(cases) * (rounds + 2), as_json) as tick:
        times = [layers.layer_time(*case, rounds, tick) for case in cases]
    if as_json:
        _print_json(
            [
                one.shape._asdict()
                | {key: value for key, value in vars(one).items() if key != "shape"}
                | {"ratio": one.ratio, "undisturbed": one.undisturbed}
                for one in times
            ]
        )
        return
    columns = [
        Column("channels", lambda layer: str(layer.shape.channels)),
        Column("filters", lambda layer: str(layer.shape.filters)),
        Column("kernel", lambda layer: _kernel(layer.shape), left=True),
        Column("pixels", lambda layer: f"{layer.shape.size}×{layer.shape.size}"),
        Column("pruned", lambda layer: f"{100 * layer.prune:.0f} %"),
        Column("packed ms", lambda layer: f"{layer.packed:.3f}"),
        Column("float32 ms", lambda layer: f"{layer.dense:.2f}"),
        Column("ratio", lambda layer: f"{layer.ratio:.1f}"),
        Column("undisturbed", lambda layer: f"{layer.undisturbed:.1f}"),
    ]
    if which == "every":
        columns += [
            Column("estimate", lambda layer: f"{layer.packed_estimate:.3f}"),
            Column("of float32", lambda layer: f"{layer.dense_estimate:.2f}"),
        ]
    out.print(make_table(columns, times, wrap_all=True))


def _kernel(shape: layers.LayerShape) -> str:
    """`3×3, stride 2`."""
    words = [f"{shape.kernel}×{shape.kernel}"]
    words += [f"stride {shape.stride}"] if shape.stride > 1 else []
    words += [f"{shape.groups} groups"] if shape.groups > 1 else []
    return ", ".join(words)


def bench_prune_rates(
    model: str,
    bits: Sequence[str],
    prunes: Sequence[float] | None,
    plot: Path | None,
    rounds: int,
    threads: int,
    *,
    as_json: bool,
) -> None:
    """Time a packed network at several prune rates."""
    out = console()
    _check_plot(plot)
    torch.set_num_threads(threads)
    prunes = sorted(prunes or _PRUNE_RATES)
    with _progress(out, "timing", rounds + 2, as_json) as tick:
        dense, packed = inference.prune_times(model, bits, prunes, None, rounds, tick)
    if plot is not None:
        draw_prune_times(prunes, dense, packed, model, plot)
    if as_json:
        _print_json({"prunes": prunes, "dense": dense, "packed": packed})
        return
    columns = [Column("pruned", lambda number: f"{100 * prunes[number]:.1f} %")]
    for one, times in packed.items():
        columns += _columns_of(one, times, dense)
    out.print(make_table(columns, range(len(prunes)), wrap_all=True))
    out.print(f"The dense network takes {dense:.2f} ms in torch.")


def _columns_of(bits: str, times: Sequence[float], dense: float) -> list[Column]:
    return [
        Column(f"{bits} ms", lambda number: f"{times[number]:.2f}"),
        Column("ratio", lambda number: f"{dense / times[number]:.1f}"),
    ]


def bench_bits(
    model: str,
    bits: Sequence[str],
    prune: float,
    accuracies: Path | None,
    where: Sequence[str],
    plot: Path | None,
    rounds: int,
    threads: int,
    *,
    as_json: bool,
) -> None:
    """Time a packed network at several bits."""
    out = console()
    _check_plot(plot)
    if plot is not None and accuracies is None:
        raise BadConfig("--plot draws accuracy against time; pass --accuracies as well.")
    found = None
    if accuracies is not None:
        found = accuracies_of(accuracies, dict(_as_pair(one) for one in where))
    torch.set_num_threads(threads)
    with _progress(out, "timing", rounds + 2, as_json) as tick:
        times = bits_times(model, bits, prune, None, rounds, tick, found)
    if plot is not None:
        points = [(one.bits, one.ms, one.top1) for one in times if one.top1 is not None]
        draw_accuracies(points, f"{model}, {100 * prune:g} % pruned", plot)
    if as_json:
        _print_json([asdict(one) for one in times])
        return
    columns = [
        Column("bits", lambda time: time.bits, left=True),
        Column("ms", lambda time: f"{time.ms:.3f}"),
        Column("times as fast", lambda time: f"{time.speedup:.1f}"),
    ]
    if found is not None:
        top1 = Column("top-1", lambda time: "–" if time.top1 is None else f"{time.top1:.1f} %")
        columns.append(top1)
    out.print(make_table(columns, times, wrap_all=True))


def _as_pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise BadConfig(f"--where {text}: should be AXIS=VALUE, as in ticket.learn_bn=True.")
    return name, value


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    check_writable(plot)
    if plot.suffix not in (".png", ".svg"):
        raise BadConfig(f"--plot {plot}: the name of a plot ends in .png or .svg.")


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


def _peak_table(peaks: list[tuple[str, str, int, int]]) -> Table:
    """Peak memory by method, bits and batch size, also as a multiple of dense training's."""
    dense = {size: peak for method, _, size, peak in peaks if method == "dense"}
    rows = [
        (method if method == "dense" else f"{method} {bits}", size, peak, peak / dense[size])
        for method, bits, size, peak in peaks
    ]
    columns = [
        Column("peak memory", lambda row: row[0], left=True),
        Column("batch", lambda row: str(row[1])),
        Column("MB", lambda row: f"{row[2] / 1e6:,.0f}"),
        Column("of dense", lambda row: f"{row[3]:.3f}"),
    ]
    return make_table(columns, rows, wrap_all=True)


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
