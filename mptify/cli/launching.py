"""Several processes: how they start, which one prints, and the command that resumes a run."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import typer

__all__ = [
    "is_main_process",
    "print_from_main",
    "process_count",
    "relaunch_with_torchrun",
    "resume_command",
]


def is_main_process() -> bool:
    """Whether this process is the only one, or the first of those that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def process_count() -> int:
    """The number of processes that `accelerate launch` or `torchrun` started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def print_from_main(text: str) -> None:
    """Print one line to stderr in the main process, and nothing in the others."""
    if is_main_process():
        typer.echo(text, err=True)


def resume_command(folder: Path) -> str:
    """The command that resumes the run in `folder` with the launcher that started this process."""
    count, program = process_count(), "mptify"
    if count > 1 and "ACCELERATE_MIXED_PRECISION" in os.environ:
        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
        device = "--cpu" if on_cpu else "--multi_gpu"
        program = f"accelerate launch {device} --num_processes {count} -m mptify"
    elif count > 1:
        local_count = os.environ.get("LOCAL_WORLD_SIZE", count)
        program = f"torchrun --nproc-per-node {local_count} -m mptify"
    return f"{program} search --resume --out {shlex.quote(str(folder))}"


def relaunch_with_torchrun() -> None:
    """Start all processes of `accelerate launch --cpu --num_processes N`.

    On CPUs, Accelerate starts only one process. This function replaces it by torchrun, which
    starts N.
    """
    if "ACCELERATE_USE_CPU" not in os.environ:
        return
    from mptify.training.distributed import processes_asked_for

    count = processes_asked_for() or 1  # if the number is unknown, the search raises an error
    if count > 1:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)]
        address = ["--master-addr", os.environ["MASTER_ADDR"]]
        port = ["--master-port", os.environ["MASTER_PORT"]]
        program = ["-m", "mptify", *sys.argv[1:]]
        os.execv(sys.executable, [sys.executable, *torchrun, *address, *port, *program])
