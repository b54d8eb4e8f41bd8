"""How several processes are started: what `accelerate launch` was asked for, and what goes on with a run."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

__all__ = ["resume_command", "start_all_processes"]


def resume_command(folder: Path) -> str:
    """What goes on with a run, started as this process was."""
    from mptify.cli.progress import processes

    count, start = processes(), "mptify"
    if count > 1 and "ACCELERATE_MIXED_PRECISION" in os.environ:
        where = (
            "--cpu"
            if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
            else "--multi_gpu"
        )
        start = f"accelerate launch {where} --num_processes {count} -m mptify"
    elif count > 1:
        start = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', count)} -m mptify"
    return f"{start} search --resume --out {shlex.quote(str(folder))}"


def start_all_processes() -> None:
    """Of `accelerate launch --cpu --num_processes 2`, Accelerate makes one process: become torch's launcher, which makes two."""
    if "ACCELERATE_USE_CPU" not in os.environ:
        return
    from mptify.training.distributed import processes_asked_for

    count = processes_asked_for() or 1  # where nobody knows how many, the search will say so
    if count > 1:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)]
        place = [
            "--master-addr",
            os.environ["MASTER_ADDR"],
            "--master-port",
            os.environ["MASTER_PORT"],
        ]
        os.execv(sys.executable, [sys.executable, *torchrun, *place, "-m", "mptify", *sys.argv[1:]])
