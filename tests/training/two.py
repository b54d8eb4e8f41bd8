"""Run by `ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 tests/training/two.py FOLDER WHAT`, or by python alone.

`search` searches a network without BatchNorm and saves its masks; `tamper` changes scores behind process 1's back;
`stop` asks one of the processes to stop, in the middle of an epoch; `norm` searches one with BatchNorm and 8-bit inputs, and
saves after each of the first process's steps that takes long enough.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from torch import nn

import mptify
from mptify.config import DataConfig
from mptify.errors import MptifyError
from mptify.training.sources import load_data

SPEC = {
    "epochs": 3,
    "batch": 50,
    "optimizer": "sgd",
    "lr": 0.05,
    "ticket": {"bits": "1/32", "prune": 0.7},
}


def network():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8) if sys.argv[2] == "norm" else nn.Identity()
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        norm,
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


class Stop(mptify.Callback):
    def on_step_end(self, search, metrics):
        if search.is_main and (search.epoch, search.step) == (1, 5):
            os.kill(os.getpid(), signal.SIGTERM)


def main():
    folder, what = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    data = load_data(DataConfig(train_images=503, val_images=101, crop=1))
    rank = os.environ.get("RANK", "0")
    if what == "tamper" and rank == "1":
        step = torch.optim.SGD.step

        def tampered(self, *args, **kwargs):
            found = step(self, *args, **kwargs)
            with torch.no_grad():
                self.param_groups[0]["params"][1].add_(torch.randn(32, 288), alpha=0.01)
            return found

        torch.optim.SGD.step = tampered
    try:
        often: dict = {}
        if what == "norm":
            often = {"checkpoint_minutes": 2e-4, "ticket": SPEC["ticket"] | {"bits": "1/8"}}
        result = mptify.search(
            network(),
            *data,
            SPEC | often,
            out=folder / "run",
            resume=what == "resume",
            callbacks=[Stop()] if what == "stop" else [],
        )
    except MptifyError as error:
        print(f"process {rank}: {type(error).__name__}: {error}")
        raise SystemExit(1) from None
    print(f"process {rank}: finished={result.finished}")
    statistics = {name: tensor.numpy() for name, tensor in result.model.named_buffers()}
    masks = {name: layer.mask.numpy() for name, layer in mptify.ticket_layers(result.model).items()}
    np.savez(folder / f"masks{rank}.npz", **statistics, **masks)


if __name__ == "__main__":
    try:
        main()
    finally:
        # Else the interpreter's end now and then meets a communication thread: "terminate called without an active exception".
        PartialState().destroy_process_group()
