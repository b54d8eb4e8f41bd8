"""`mptify bench ...`: measure ratios of speeds, side by side in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Measure speed as ratios, side by side.", no_args_is_help=True)

_AsJson = Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")]
_Batches = Annotated[
    list[int] | None,
    typer.Option(min=1, help="Batch sizes; 128 and 32 by default. May be repeated."),
]
_Bits = Annotated[
    str, typer.Option("--bits", help="For a network: bits per weight / bits per activation.")
]
_Calls = Annotated[int, typer.Option(min=1, help="Calls of each to time.")]
_Pairs = Annotated[int, typer.Option(min=1, help="Pairs of steps to time.")]
_Threads = Annotated[int, typer.Option(min=1, help="Threads for torch.")]
_ThreadsOfAll = Annotated[int, typer.Option(min=1, help="Threads for each.")]


@app.callback()
def _group() -> None:
    """Measure speed as ratios, side by side."""


@app.command("surgery")
def surgery(
    rounds: _Pairs = 15,
    batch: _Batches = None,
    threads: _Threads = 2,
    commands: Annotated[
        bool, typer.Option(help="Time `mptify convert resnet18` against its imports too.")
    ] = True,
    as_json: _AsJson = False,
) -> None:
    """Time a training step of a ticket ResNet-18 against dense training, with 32×32 images.

    The command also times `mptify convert` against its imports.
    """
    from mptify.cli import bench_run

    bench_run.bench_surgery(rounds, batch, threads, commands=commands, as_json=as_json)


@app.command("search")
def search(
    rounds: _Pairs = 15,
    batch: _Batches = None,
    bits: Annotated[
        list[str] | None,
        typer.Option(
            "--bits", help="1/32, 1/8, 1/4, 1/2 or 1/1; 1/32 and 1/1 by default. May be repeated."
        ),
    ] = None,
    threads: _Threads = 2,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    as_json: _AsJson = False,
) -> None:
    """Compare time and peak memory of a search step with dense training by the same loop.

    The network is ResNet-18, with 32×32 images.
    """
    from mptify.cli import bench_run

    bench_run.bench_search(rounds, batch, bits, threads, memory=memory, as_json=as_json)


@app.command("ticket")
def ticket(
    rounds: Annotated[int, typer.Option(min=1, help="How often to save and load ResNet-50.")] = 5,
    as_json: _AsJson = False,
) -> None:
    """Compare the size of ticket files with their entropy and with other formats.

    The command also times saving and loading.
    """
    from mptify.cli import bench_run

    bench_run.bench_ticket(rounds, as_json=as_json)


@app.command("inference")
def inference(
    name: Annotated[
        str, typer.Argument(metavar="[FILE|MODEL]", help="A ticket file, or a network to convert.")
    ] = "resnet18",
    bits: _Bits = "1/1",
    prune: Annotated[
        float, typer.Option(min=0, max=0.999, help="For a network: the fraction to remove.")
    ] = 0.75,
    size: Annotated[
        int | None,
        typer.Option(min=8, help="Pixels of the image; the network's input size by default."),
    ] = None,
    rounds: _Calls = 15,
    threads: _ThreadsOfAll = 1,
    nodes: Annotated[bool, typer.Option(help="List the steps of the program.")] = True,
    as_json: _AsJson = False,
) -> None:
    """Time a packed ticket on one image, step by step.

    Torch and onnxruntime run the same architecture in float32 for comparison.
    """
    from mptify.cli import bench_run

    bench_run.bench_inference(
        name, bits, prune, size, rounds, threads, nodes=nodes, as_json=as_json
    )


@app.command("layers")
def layers(
    bits: _Bits = "1/1",
    prune: Annotated[
        list[float] | None,
        typer.Option(min=0, max=0.999, help="Fractions to remove; 0.75 and 0.9 by default."),
    ] = None,
    rounds: _Calls = 51,
    threads: _ThreadsOfAll = 1,
    as_json: _AsJson = False,
) -> None:
    """Time the 3×3 layers of ResNet-18's stages, packed, against torch's float32 convolution.

    The packed layers run on one image; with 1-bit activations they include their thresholds.
    "ratio" compares medians, "undisturbed" the lowest tenths: the ratio when nothing else uses the
    core.
    """
    from mptify.cli import bench_run

    bench_run.bench_layers(bits, prune, rounds, threads, as_json=as_json)


@app.command("prune")
def prune_rates(
    model: Annotated[str, typer.Argument(help="The network.")] = "resnet18",
    bits: _Bits = "1/1",
    plot: Annotated[
        Path | None, typer.Option(help="Plot the times to this .png or .svg file.")
    ] = None,
    rounds: _Calls = 15,
    threads: _ThreadsOfAll = 1,
    as_json: _AsJson = False,
) -> None:
    """Time a packed network at several prune rates, and its float32 network."""
    from mptify.cli import bench_run

    bench_run.bench_prune_rates(model, bits, plot, rounds, threads, as_json=as_json)
