"""The folder of a run: recipe, metrics, tickets, and the checkpoint to resume from.

recipe.yaml              every setting
metrics.jsonl            one line per epoch
curves.png               loss and accuracy
best.ticket, last.ticket (of dense training: best.safetensors, last.safetensors)
checkpoint.safetensors   everything the next step depends on
summary.json             written at the end of a run
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import yaml
from torch import Tensor, nn

from mptify.errors import MptifyError, RunExists
from mptify.files import write_whole

__all__ = ["Run", "free_folder", "newest_unfinished"]

_KEY = "mptify-checkpoint"


class Run:
    """The files of one run, each written atomically."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock: Any = None

    @classmethod
    def begin(cls, folder: Path, recipe: str) -> Run:
        """Start a new run in a folder that holds none."""
        run = cls(folder)
        run.require_free()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MptifyError(f"{folder}: can't be created ({error.strerror}).") from None
        write_whole(run.recipe, recipe)
        return run

    def require_free(self) -> None:
        """Raise `RunExists` if the folder is not free."""
        if self.recipe.exists():
            state = "a finished run" if self.is_finished else "a run"
            hint = (
                ""
                if self.is_finished
                else f", or `mptify search --resume --out {self.folder}` to go on with it"
            )
            raise RunExists(f"{self.folder} already holds {state}; choose another folder{hint}.")
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise RunExists(f"{self.folder} is not empty, and a run needs an empty folder.")

    @classmethod
    def again(cls, folder: Path) -> Run:
        """Open a run that was started before."""
        run = cls(folder)
        if not run.recipe.is_file():
            raise MptifyError(f"{folder} holds no run to resume.")
        return run

    def lock(self) -> None:
        """Lock the folder until this process ends, or until `unlock`."""
        with contextlib.suppress(ImportError):  # not every platform has this lock
            import fcntl

            handle = self.recipe.open("r+b")  # over NFS, a lock needs a file that may be written
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.close()
                raise RunExists(f"{self.folder}: another process is searching there.") from None
            except OSError:  # a file system without locks
                handle.close()
                return
            self._lock = handle
            # So that workers which outlive a killed run don't keep the lock.
            os.register_at_fork(after_in_child=handle.close)

    def sweep(self) -> None:
        """Remove temporary files of a killed writer; needs the lock."""
        for torn in self.folder.glob(".mptify-*.part"):
            torn.unlink(missing_ok=True)

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def require_same(self, settings: dict[str, Any]) -> None:
        """Raise unless the run was started with these settings, except for saving and threads."""
        begun = yaml.safe_load(self.recipe.read_text(encoding="utf-8"))
        may_change = ("checkpoint_minutes", "checkpoint_steps", "trackers", "threads")
        other = [
            key
            for key, value in settings.items()
            if begun.get(key) != value and key not in may_change
        ]
        if other:
            raise MptifyError(
                f"{self.folder}: this run was started with another {other[0]}, see its recipe.yaml."
            )

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def has_summary(self) -> bool:
        return (self.folder / "summary.json").exists()

    @property
    def is_finished(self) -> bool:
        """Whether the search is finished, and its baseline if the recipe asks for one."""
        wanted = yaml.safe_load(self.recipe.read_text(encoding="utf-8")).get("baseline") is not None
        return self.has_summary and (not wanted or Run(self.folder / "baseline").has_summary)

    def ticket(self, which: str) -> Path:
        return self.folder / f"{which}.ticket"

    def write_dense(self, which: str, network: nn.Module) -> None:
        """Write the state dict of a densely trained network."""
        # Safetensors stores tied tensors separately.
        state = {
            name: tensor.detach().cpu().contiguous().clone()
            for name, tensor in network.state_dict().items()
        }
        write_whole(self.folder / f"{which}.safetensors", safetensors.torch.save(state))

    # -- metrics -----------------------------------------------------------------------------------

    def write_metrics(self, rows: list[dict[str, Any]]) -> None:
        write_whole(self.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def read_metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")

    def read_summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    # -- checkpoints -------------------------------------------------------------------------------

    def write_checkpoint(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_whole(
            self.folder / "checkpoint.safetensors",
            safetensors.torch.save(plain, {_KEY: json.dumps(state)}),
        )

    def read_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and state of the last checkpoint, or None if there is none."""
        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            return None
        try:
            with safetensors.safe_open(path, "pt") as file:
                state = json.loads(file.metadata()[_KEY])
                return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise MptifyError(
                f"{path}: this checkpoint can't be read ({error}); remove it to start the run "
                "again."
            ) from None


def free_folder(parent: Path, name: str) -> Path:
    """`parent/name`, with a number appended if that is taken."""
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def newest_unfinished(parent: Path) -> Path:
    """The run below `parent` that was stopped last."""
    runs = [Run(path.parent) for path in parent.glob("*/recipe.yaml")]
    waiting = [run for run in runs if not run.is_finished]
    if not waiting:
        raise MptifyError(f"{parent} holds no unfinished run; --out names one elsewhere.")
    return max(waiting, key=lambda run: run.folder.stat().st_mtime).folder
