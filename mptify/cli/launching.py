"""What `accelerate launch` was asked for, where it did something else."""

from __future__ import annotations

import os
import sys

__all__ = ["start_all_processes"]


def start_all_processes() -> None:
    """Of `accelerate launch --cpu --num_processes 2`, Accelerate makes one process: become torch's launcher, which makes two."""
    if "ACCELERATE_USE_CPU" not in os.environ:
        return
    from mptify.training.accelerating import processes_asked_for

    count = processes_asked_for() or 1  # where nobody knows how many, the search will say so
    if count > 1:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)]
        place = ["--master-addr", os.environ["MASTER_ADDR"], "--master-port", os.environ["MASTER_PORT"]]
        os.execv(sys.executable, [sys.executable, *torchrun, *place, "-m", "mptify", *sys.argv[1:]])
