"""`mptify search`: find a ticket."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
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
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[TICKET|MODEL]",
            help="A ticket file to continue from, or a network: resnet18, timm:vit_tiny_patch16_224.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A recipe that comes with mptify, or a YAML file. Without anything: digits."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="digits, arrays:FILE.npz, cifar10:FOLDER, cifar100:…, imagefolder:…, imagenet:…, timm:NAME:FOLDER."
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
        Path | None, typer.Option(help="The folder of the run. Without it: a new one below runs/.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in --out, or the run below runs/ that was stopped last.",
        ),
    ] = False,
    baseline: Annotated[
        bool | None,
        typer.Option(
            "--baseline/--no-baseline",
            help="Train the network densely too, to compare; as the recipe says unless given.",
        ),
    ] = None,
) -> None:
    """Search a ticket: train scores that say which of a network's random weights to keep.

    Without arguments, it searches an 80 %-pruned ticket on scikit-learn's digits, in less than a
    minute. On several devices: `accelerate launch -m mptify search ...`, or
    `torchrun --nproc-per-node 2 -m mptify search ...`. An option that is not given is as the recipe
    says.
    """
    from mptify.cli.launching import start_all_processes
    from mptify.errors import MptifyError
    from mptify.training.run_folder import newest_unfinished

    start_all_processes()
    threads = recipe_settings.get("threads")
    if resume:
        others = set(recipe_settings) - {"threads"}
        if what or recipe or data or changes or others or ticket_settings or baseline is not None:
            raise MptifyError(
                "--resume takes everything but --out and --threads from the folder of the run; leave out the other options."
            )
        out = out or newest_unfinished(Path("runs"))
    settings = recipe_settings | {f"ticket.{key}": one for key, one in ticket_settings.items()}
    checked = _settings(
        what, recipe, data, settings, changes or [], baseline, out if resume else None
    )
    if threads is not None:
        checked = checked.model_copy(update={"threads": threads})  # the run's folder records it
    if checked.threads is not None:
        import torch

        torch.set_num_threads(checked.threads)
    _run(checked, out, resume)


def _settings(
    what: str | None,
    recipe: str | None,
    data: str | None,
    options: dict[str, Any],
    changes: list[str],
    baseline: bool | None,
    folder: Path | None,
) -> Any:
    """The checked recipe."""
    from mptify.config import make_recipe
    from mptify.errors import BadConfig
    from mptify.recipe_files import find_recipe, with_setting, with_settings
    from mptify.ticket.state import read
    from mptify.training.run_folder import Run

    if folder is not None:
        settings, origin = find_recipe(str(Run.again(folder).recipe))
        _require_whole(
            settings, f"{origin} (mptify.search(..., resume=True) continues a run that it began)"
        )
        return make_recipe(settings, origin)
    nothing = what is None and data is None
    settings, origin = find_recipe(recipe or "digits") if recipe or nothing else ({}, "")
    if what is not None and Path(what).is_file():
        ticket = read(what)
        searched = ticket.notes.get("recipe")
        if recipe is None and isinstance(searched, dict):  # as it was found
            settings, origin = {**searched, "baseline": None}, what
        if ticket.architecture is None:
            raise BadConfig(
                f"{what}: is a ticket of a model that no registry knows; mptify.search(model, ...) takes yours."
            )
        config = ticket.config.model_dump(mode="json")
        method = {} if ticket.config.weight_bits == 1 else {"method": "edgepopup"}
        settings = {
            **settings,
            **method,
            "model": str(ticket.architecture),
            "ticket": config,
            "start": str(Path(what).resolve()),
        }
    elif what is not None and re.match(r"[\w.]+=", what):
        raise BadConfig(f"{what}: is no network; settings are changed with --set {what}.")
    elif what is not None and ("/" in what or what.endswith(".ticket")):
        if Path(what).is_dir():
            read(what)  # which says where in the folder its ticket is
        raise BadConfig(f"{what}: there is no such file.")
    elif what is not None:
        settings = {**settings, "model": what}
    if data is not None:
        given = settings.get("data") or {}
        settings = {
            **settings,
            "data": {**({} if isinstance(given, str) else given), "source": data},
        }
    if baseline is not None:
        settings = {**settings, "baseline": (settings.get("baseline") or {}) if baseline else None}
    for key, value in options.items():
        settings = with_setting(settings, key, value)
    settings = with_settings(settings, changes)
    _require_whole(settings, origin)
    return make_recipe(settings, origin)


def _require_whole(settings: dict[str, Any], origin: str) -> None:
    from mptify.errors import BadConfig

    for key, question in _QUESTIONS.items():
        if key not in settings:
            raise BadConfig(f"{origin + ': ' if origin else ''}{key} is missing: {question}")


_QUESTIONS = {
    "model": "which network? For instance mptify:conv4 or timm:resnet18.",
    "data": "which images? For instance --data imagefolder:photos.",
}


_BUSY = "This machine's cores were busy in the last minute. If they still are, `--threads 1` may be faster by far."


def _is_busy() -> bool:
    """Whether half of the cores were at work in the last minute, on a machine whose cores are to search."""
    import torch

    try:
        return not torch.cuda.is_available() and os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)
    except (OSError, AttributeError):  # not every system says
        return False


def _run(recipe: Any, out: Path | None, resume: bool) -> None:
    from mptify.cli.progress import Progress, is_main, say
    from mptify.config import baseline_of
    from mptify.errors import RunExists
    from mptify.models import registry
    from mptify.training import search as run_search
    from mptify.training.distributed import barrier
    from mptify.training.run_folder import Run, free_folder
    from mptify.training.setup import architecture_of, build_network
    from mptify.training.sources import load_data

    if out is not None and not resume:
        try:
            Run(out).require_free()
        except RunExists:
            if is_main():
                raise
            raise typer.Exit(1) from None  # it is said once
    entry = registry.resolve(recipe.model)
    train, val = load_data(recipe.data)
    built = architecture_of(entry, train)
    network = build_network(built, recipe)
    folder = out or free_folder(
        Path("runs"), f"{entry.name}-{recipe.data.source.partition(':')[0]}"
    )
    done = Run(folder)
    if resume and done.is_finished:
        say(f"{folder}: this run is finished.")
        raise typer.Exit
    below = folder / "baseline"
    searched, again = resume and done.has_summary, (below / "recipe.yaml").exists()
    barrier()  # before any process changes what others look at
    if not searched:
        headlines = [_headline(recipe, entry, train, val, folder)]
        if recipe.threads is None and _is_busy():
            headlines.insert(0, _BUSY)
        with _told_how_to_go_on(folder), Progress(recipe.method, *headlines) as progress:
            result = run_search(
                network,
                train,
                val,
                recipe,
                out=folder,
                resume=resume,
                architecture=built,
                callbacks=[progress],
            )
        if not result.finished or (result.asked and recipe.baseline is not None):
            _stopped(folder)
    if recipe.baseline is not None:
        dense = baseline_of(recipe)
        with _told_how_to_go_on(folder), Progress("dense") as progress:
            network = build_network(built, dense)
            other = run_search(
                network, train, val, dense, out=below, resume=again, callbacks=[progress]
            )
        if not other.finished:
            _stopped(folder)
    if is_main():
        _summary(Run(folder), recipe, train.classes)


@contextlib.contextmanager
def _told_how_to_go_on(folder: Path) -> Iterator[None]:
    """Where another process ends within, the command that goes on with the run."""
    from mptify.cli.launching import resume_command
    from mptify.errors import LostProcess

    try:
        yield
    except LostProcess as error:
        if not (folder / "recipe.yaml").exists():
            raise
        raise LostProcess(
            f"{error} `{resume_command(folder)}` goes on from the last checkpoint."
        ) from None


def _stopped(folder: Path) -> None:
    from mptify.cli.launching import resume_command
    from mptify.cli.progress import say

    say(f"Stopped and saved. `{resume_command(folder)}` goes on, and ends in the same bytes.")
    raise typer.Exit(130)


def _headline(recipe: Any, entry: Any, train: Any, val: Any, folder: Path) -> str:
    from mptify.cli.progress import processes
    from mptify.training.data import sizes

    config = recipe.ticket
    how = (
        "dense training"
        if recipe.trains_weights
        else f"{recipe.method}, {config.bits} bits, {100 * config.prune:g} % pruned"
    )
    together = f"; {processes()} processes" if processes() > 1 else ""
    what = f"{len(train):,} images of {sizes(train.shape())} to train, {len(val):,} to validate, {train.classes} classes"
    return f"{entry}: {how}; {what}; {folder}{together}"


def _summary(run: Any, recipe: Any, classes: int) -> None:
    from mptify.cli.console import Whole, console, print_facts
    from mptify.ticket.state import read

    found = run.read_summary()
    rows = [
        (
            "accuracy",
            f"{100 * found['accuracy']:.2f} % after the last epoch, {100 * found['best']:.2f} % at best",
        )
    ]
    if recipe.baseline is not None:
        beside = type(run)(run.folder / "baseline").read_summary()
        rows.append(
            (
                "dense",
                f"{100 * beside['accuracy']:.2f} % after the last epoch: the same network and data, its weights trained",
            )
        )
    if recipe.trains_weights:
        rows.append(("network", Whole(run.folder / "last.safetensors")))
    else:
        path = run.ticket("last")
        ticket = read(path)
        rows += [
            (
                "kept",
                f"{ticket.kept:,} of {ticket.count:,} random weights, never trained ({100 * ticket.kept / ticket.count:.1f} %)",
            ),
            (
                "size",
                f"{path.stat().st_size:,} bytes; the weights as float32 take {4 * ticket.count:,}",
            ),
            ("ticket", Whole(path)),
            ("", "of the last epoch; best.ticket beside it was the best on the validation images"),
            ("curves", Whole(run.folder / "curves.png")),
            ("next", Whole(f"mptify inspect {path}")),
            ("", Whole(f"mptify report {run.folder}")),
            (
                "",
                Whole(
                    f"mptify search --recipe {run.recipe} --set {_next(recipe, found['accuracy'], classes)}"
                ),
            ),
        ]
    rows += [("warning", warning) for warning in found["warnings"]]
    print_facts(console(), rows)


def _next(recipe: Any, accuracy: float, classes: int) -> str:
    """What to change: fewer survivors, or where the classes are hardly told apart more epochs."""
    if accuracy < min(2 / classes, 0.6):
        return f"epochs={4 * recipe.epochs}"
    return f"ticket.prune={1 - (1 - recipe.ticket.prune) / 4:g}"
