"""What `mptify theory` does with its options."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from fractions import Fraction

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mptify.cli.console import console, print_fields
from mptify.cli.tables import Column, make_table
from mptify.errors import BadConfig
from mptify.tools.theory import (
    Bound,
    Finding,
    Target,
    check,
    extreme_target,
    lemma1,
    lemma2,
    lemma3,
    random_target,
    theorem,
)

__all__ = ["run_theory"]

_TARGETS: dict[str, Callable[..., Target]] = {"random": random_target, "extreme": extreme_target}
# Without options, each depth, width and sparsity is checked with each ε and δ.
_NETWORKS = [
    (depth, width, sparsity) for depth in (1, 2, 3) for width, sparsity in ((4, 4), (8, 8), (16, 4))
]
_PROMISES = [(0.5, 0.1), (0.1, 0.01)]


def run_theory(
    depth: int | None,
    width: int | None,
    sparsity: int | None,
    epsilon: float | None,
    delta: float | None,
    inputs: int | None,
    *,
    target: str,
    seeds: int,
    points: int,
    seed: int,
    as_json: bool,
) -> None:
    """Check the theorem on one network, or on the default table if no size is given.

    Args:
        depth: Layers of the target network.
        width: Neurons in each hidden layer.
        sparsity: The most weights in a row.
        epsilon: The largest error allowed.
        delta: The largest probability of failure allowed.
        inputs: Inputs of the target network.
        target: The kind of weights: `"random"` or `"extreme"`.
        seeds: Random networks to draw per target; 0 computes only the bounds.
        points: Random points on the sphere, and inside it, at which the error is measured.
        seed: Seed of the target network.
        as_json: Whether to print JSON.

    Raises:
        typer.Exit: With code 1, if a promise is broken.
    """
    if target not in _TARGETS:
        raise BadConfig(f"target={target!r}: should be random or extreme.")
    options = (depth, width, sparsity, epsilon, delta, inputs)
    is_single = seeds == 0 or any(option is not None for option in options)
    networks = [(_or(depth, 2), _or(width, 8), sparsity)] if is_single else _NETWORKS
    promises = [(_or(epsilon, 0.1), _or(delta, 0.01))] if is_single else _PROMISES
    targets = [
        (_TARGETS[target](*network, inputs=inputs, seed=seed), *promise)
        for network in networks
        for promise in promises
    ]
    bounds = _bounds(*targets[0]) if is_single else {}
    out = console()
    with Progress(console=out, disable=not out.is_terminal or as_json, transient=True) as progress:
        task = progress.add_task("drawing", total=len(targets) * seeds)
        findings = [
            check(
                network, *promise, seeds=seeds, points=points, tick=lambda: progress.advance(task)
            )
            for network, *promise in (targets if seeds else [])
        ]
    if as_json:
        results = {
            "target": target,
            "bounds": {name: asdict(bound) for name, bound in bounds.items()},
            "findings": [asdict(finding) | {"holds": finding.holds} for finding in findings],
        }
        typer.echo(json.dumps(results, indent=1))
    else:
        _print_results(out, bounds, findings)
    if not all(finding.holds for finding in findings):
        raise typer.Exit(1)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _bounds(network: Target, epsilon: float, delta: float) -> dict[str, Bound]:
    arguments = epsilon, delta, network.sparsity
    return {
        "lemma 1": lemma1(*arguments),
        "lemma 2": lemma2(*arguments),
        "lemma 3": lemma3(*arguments, network.width),
        "theorem": theorem(*arguments, network.width, network.depth),
    }


def _print_results(out: Console, bounds: dict[str, Bound], findings: list[Finding]) -> None:
    if bounds:
        out.print(_bound_table(bounds))
        out.print()
    if not findings:
        return
    out.print(_finding_table(findings))
    out.print()
    out.print(_fraction_table(findings))
    out.print()
    most_points = max(finding.points for finding in findings)
    broken = ["→".join(map(str, finding.shape)) for finding in findings if not finding.holds]
    fields = [
        (
            "error",
            f"the largest at up to {most_points:,} points and along ascents from the worst of them",
        ),
        ("certified", "an upper bound of the error over the whole ball"),
        ("failed", f"of {findings[0].seeds} draws"),
        (
            f"{_fraction_headings(findings)[0]} …",
            "% of draws that fail with that fraction of k, and the exact probability",
        ),
        ("least/k", "the width at which the exact probability falls to δ"),
        ("promises", f"not kept: {', '.join(broken)}" if broken else "all kept"),
    ]
    print_fields(out, fields)


def _bound_table(bounds: dict[str, Bound]) -> Table:
    columns = [
        Column("statement", lambda row: row[0], left=True),
        Column("neurons k", lambda row: f"{row[1].width:,}"),
        Column("gain", lambda row: f"{row[1].gain:.4g}"),
        Column("non-zeros at most", lambda row: f"{int(row[1].nonzeros):,}"),
    ]
    return _table(columns, list(bounds.items()))


_CASE_COLUMNS = [
    Column("network", lambda finding: "→".join(map(str, finding.shape)), left=True),
    Column("s", lambda finding: str(finding.sparsity)),
    Column("ε", lambda finding: f"{finding.epsilon:g}"),
    Column("δ", lambda finding: f"{finding.delta:g}"),
    Column("k", lambda finding: f"{finding.neurons:,}"),
]


def _finding_table(findings: list[Finding]) -> Table:
    columns = [
        *_CASE_COLUMNS,
        Column("error", lambda finding: _error(finding.worst_error)),
        Column("certified", lambda finding: _error(finding.certified_error)),
        Column("‖M‖₀", lambda finding: f"{finding.nonzeros:,}"),
        Column("at most", lambda finding: f"{int(finding.nonzeros_allowed):,}"),
        Column("failed", lambda finding: str(finding.failed)),
    ]
    return _table(columns, findings)


def _error(error: float | None) -> str:
    return "–" if error is None else f"{error:.2g}"


def _fraction_table(findings: list[Finding]) -> Table:
    def rate(place: int) -> Callable[[Finding], str]:
        def cell(finding: Finding) -> str:
            at = finding.fractions[place]
            return f"{100 * at.failed / finding.seeds:.0f} ({100 * at.probability:.0f})"

        return cell

    headings = _fraction_headings(findings)
    columns = [
        *_CASE_COLUMNS,
        *(Column(heading, rate(place)) for place, heading in enumerate(headings)),
        Column("least/k", lambda finding: f"{finding.least / finding.neurons:.2f}"),
    ]
    return _table(columns, findings)


def _fraction_headings(findings: list[Finding]) -> list[str]:
    return [f"{Fraction(at.fraction)} k" for at in findings[0].fractions]


def _table(columns: list[Column], rows: list) -> Table:
    return make_table(columns, rows, padding=(0, 1, 0, 0), header_style="bold")
