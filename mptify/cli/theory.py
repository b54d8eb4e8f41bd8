"""`mptify theory`: the paper's theorem, measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from fractions import Fraction
from typing import Annotated, Any

import typer

__all__ = ["theory"]

# Depth, width and sparsity, each with every pair of ε and δ.
_NETWORKS = [
    (depth, width, sparsity) for depth in (1, 2, 3) for width, sparsity in ((4, 4), (8, 8), (16, 4))
]
_PROMISES = [(0.5, 0.1), (0.1, 0.01)]


def theory(
    depth: Annotated[int | None, typer.Option(help="Layers of the target network.")] = None,
    width: Annotated[
        int | None, typer.Option(help="Neurons in each hidden layer; the inputs of a single layer.")
    ] = None,
    sparsity: Annotated[
        int | None, typer.Option(help="The most weights in a row; dense rows unless given.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="The error that is allowed.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="The chance of failure that is allowed.")
    ] = None,
    inputs: Annotated[
        int | None, typer.Option(help="Inputs of the network; as many as its width unless given.")
    ] = None,
    target: Annotated[
        str, typer.Option(help="Weights: random, or extreme (all as large as is allowed).")
    ] = "random",
    seeds: Annotated[
        int,
        typer.Option(help="Random networks to draw for each target; 0 prints the bounds alone."),
    ] = 200,
    points: Annotated[
        int,
        typer.Option(
            help="Random points on the sphere, and as many inside, beside axes and corners."
        ),
    ] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the target network.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Draw random binary networks, prune them as the paper's proof does, and hold the result against what its theorem promises.

    Without arguments: a table over depths 1 to 3, several widths, ε and δ. The exit code is 1 if a promise was not kept.
    """
    from rich.progress import Progress

    from mptify.cli.console import console
    from mptify.errors import BadConfig
    from mptify.tools.theory import check, extreme_target, random_target

    kinds: dict[str, Any] = {"random": random_target, "extreme": extreme_target}
    if target not in kinds:
        raise BadConfig(f"target={target!r}: should be random or extreme.")
    one = seeds == 0 or any(
        value is not None for value in (depth, width, sparsity, epsilon, delta, inputs)
    )
    networks = [(_given(depth, 2), _given(width, 8), sparsity)] if one else _NETWORKS
    promises = [(_given(epsilon, 0.1), _given(delta, 0.01))] if one else _PROMISES
    targets = [
        (kinds[target](*sizes, inputs=inputs, seed=seed), *promise)
        for sizes in networks
        for promise in promises
    ]
    bounds = _bounds(*targets[0]) if one else []
    out = console()
    findings = []
    with Progress(console=out, disable=not out.is_terminal or as_json, transient=True) as progress:
        task = progress.add_task("drawing", total=len(targets) * seeds)
        for network, *promise in targets if seeds else []:
            findings.append(
                check(
                    network,
                    *promise,
                    seeds=seeds,
                    points=points,
                    tick=lambda: progress.advance(task),
                )
            )
    if as_json:
        rows = [asdict(finding) | {"holds": finding.holds} for finding in findings]
        typer.echo(
            json.dumps(
                {
                    "target": target,
                    "bounds": {name: asdict(bound) for name, bound in bounds},
                    "findings": rows,
                },
                indent=1,
            )
        )
    else:
        _print(out, bounds, findings)
    if not all(finding.holds for finding in findings):
        raise typer.Exit(1)


def _given(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _bounds(network: Any, epsilon: float, delta: float) -> list[tuple[str, Any]]:
    from mptify.tools.theory import lemma1, lemma2, lemma3, theorem

    share = epsilon, delta, network.sparsity
    return [
        ("lemma 1", lemma1(*share)),
        ("lemma 2", lemma2(*share)),
        ("lemma 3", lemma3(*share, network.width)),
        ("theorem", theorem(*share, network.width, network.depth)),
    ]


def _print(out: Any, bounds: list[tuple[str, Any]], findings: list[Any]) -> None:
    from mptify.cli.console import print_facts

    if bounds:
        table = _table("statement", "neurons k", "gain", "non-zeros at most")
        for name, bound in bounds:
            table.add_row(name, f"{bound.width:,}", f"{bound.gain:.4g}", f"{int(bound.nonzeros):,}")
        out.print(table)
        out.print()
    if not findings:
        return
    table = _table("network", "s", "ε", "δ", "k", "error", "certified", "‖M‖₀", "at most", "failed")
    for one in findings:
        errors = (
            "–" if error is None else f"{error:.2g}"
            for error in (one.worst_error, one.certified_error)
        )
        table.add_row(
            *_case(one),
            *errors,
            f"{one.nonzeros:,}",
            f"{int(one.nonzeros_allowed):,}",
            f"{one.failed}",
        )
    out.print(table)
    out.print()
    fractions = [f"{Fraction(at.fraction)} k" for at in findings[0].fractions]
    table = _table("network", "s", "ε", "δ", "k", *fractions, "least/k")
    for one in findings:
        rates = (
            f"{100 * at.failed / one.seeds:.0f} ({100 * at.probability:.0f})"
            for at in one.fractions
        )
        table.add_row(*_case(one), *rates, f"{one.least / one.neurons:.2f}")
    out.print(table)
    out.print()
    broken = ["→".join(map(str, one.shape)) for one in findings if not one.holds]
    rows = [
        (
            "error",
            f"the largest at up to {max(one.points for one in findings):,} points, and where climbs from the worst of them lead",
        ),
        ("certified", "what the error is at most, over the whole ball"),
        ("failed", f"of {findings[0].seeds} draws"),
        (
            f"{fractions[0]} …",
            "% of the draws that fail with that fraction of k, and the exact probability",
        ),
        ("least/k", "the width at which the exact probability falls to δ"),
        ("promises", f"not kept: {', '.join(broken)}" if broken else "all kept"),
    ]
    print_facts(out, rows)


def _case(one: Any) -> tuple[str, ...]:
    return (
        "→".join(map(str, one.shape)),
        str(one.sparsity),
        f"{one.epsilon:g}",
        f"{one.delta:g}",
        f"{one.neurons:,}",
    )


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(
            column, justify="left" if column in ("network", "statement") else "right", no_wrap=True
        )
    return table
