"""`mptify search`: search a ticket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mptify.cli.options import with_options_of
from mptify.config import Recipe, TicketConfig

__all__ = ["search"]


@with_options_of(
    Recipe,
    before="out",
    into="recipe_settings",
    without=("ticket", "data", "model", "baseline", "start", "about"),
    panel="Search",
    only_given=True,
)
@with_options_of(
    TicketConfig,
    before="out",
    into="ticket_settings",
    without=("seed",),
    panel="Ticket",
    only_given=True,
)
def search(
    recipe_settings: dict[str, Any],
    ticket_settings: dict[str, Any],
    start: Annotated[
        str | None,
        typer.Argument(
            metavar="[TICKET|MODEL]",
            help="A ticket file to continue from, or a network: resnet18, "
            "timm:vit_tiny_patch16_224.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A built-in recipe, or a YAML file; digits if no network and no data are given."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="digits, arrays:FILE.npz, cifar10:FOLDER, cifar100:…, imagefolder:…, imagenet:…, "
            "timm:NAME:FOLDER."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change any setting: lr=0.05, ticket.seed=1, data.flip=true. May be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the run; a new one in runs/ by default.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the run in --out, or the run in runs/ that was stopped last."
        ),
    ] = False,
    baseline: Annotated[
        bool | None,
        typer.Option(
            "--baseline/--no-baseline",
            help="Also train the dense network for comparison; the recipe decides by default.",
        ),
    ] = None,
) -> None:
    """Search a ticket: train scores that decide which of a network's random weights to keep.

    Without arguments, it searches an 80 %-pruned ticket on scikit-learn's digits, in less than a
    minute. The recipe supplies the options that you leave out. To use several devices, run
    `accelerate launch -m mptify search ...` or `torchrun --nproc-per-node 2 -m mptify search ...`.
    """
    from mptify.cli.search_run import resume_search, start_search
    from mptify.errors import MptifyError

    ticket_changes = {f"ticket.{key}": value for key, value in ticket_settings.items()}
    if not resume:
        start_search(
            start,
            recipe,
            data,
            recipe_settings | ticket_changes,
            changes or [],
            baseline=baseline,
            out=out,
        )
        return
    threads = recipe_settings.pop("threads", None)
    others = (start, recipe, data, changes, recipe_settings, ticket_settings)
    if any(others) or baseline is not None:
        raise MptifyError(
            "--resume takes all settings from the folder of the run; "
            "leave out all options but --out and --threads."
        )
    resume_search(out, threads)
