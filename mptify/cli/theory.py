"""`mptify theory`: check the paper's theorem on random networks."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["theory"]


def theory(
    depth: Annotated[int | None, typer.Option(help="Layers of the target network.")] = None,
    width: Annotated[
        int | None, typer.Option(help="Neurons in each hidden layer; for one layer, its inputs.")
    ] = None,
    sparsity: Annotated[
        int | None, typer.Option(help="The most weights in a row; rows are dense by default.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="The largest error allowed.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="The largest probability of failure allowed.")
    ] = None,
    inputs: Annotated[
        int | None, typer.Option(help="Inputs of the network; its width by default.")
    ] = None,
    target: Annotated[
        str, typer.Option(help="The weights: random, or extreme, the largest allowed.")
    ] = "random",
    seeds: Annotated[
        int, typer.Option(help="Random networks to draw per target; 0 prints only the bounds.")
    ] = 200,
    points: Annotated[
        int,
        typer.Option(
            help="Random points on the sphere, and as many inside, besides axes and corners."
        ),
    ] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the target network.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Prune random binary networks as the paper's proof does, and check what its theorem promises.

    Without arguments, a table covers depths 1 to 3 and several widths, ε and δ. The exit code is 1
    if a promise is broken.
    """
    from mptify.cli.theory_run import run_theory

    run_theory(
        depth,
        width,
        sparsity,
        epsilon,
        delta,
        inputs,
        target=target,
        seeds=seeds,
        points=points,
        seed=seed,
        as_json=as_json,
    )
