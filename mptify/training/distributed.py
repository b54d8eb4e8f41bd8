"""Devices and processes. The only module that imports accelerate."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from mptify.config import SearchConfig
from mptify.errors import LostProcess, MptifyError, first_line

__all__ = [
    "Wrapped",
    "accelerator_for",
    "barrier",
    "flat",
    "lost_processes_raise",
    "processes_asked_for",
]


def barrier() -> None:
    """A barrier: wait for all processes."""
    from accelerate import Accelerator

    with lost_processes_raise():
        Accelerator(cpu=_without_devices()).wait_for_everyone()


@contextlib.contextmanager
def lost_processes_raise() -> Iterator[None]:
    """Raise `LostProcess` where another process of the search ends, instead of a network error."""
    try:
        yield
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        raise LostProcess(
            "Another process of this search has ended, and this one can't continue without it."
        ) from None


def _is_lost_connection(error: RuntimeError) -> bool:
    import torch

    if isinstance(error, torch.distributed.DistError):
        return True
    # Gloo's errors have no type of their own.
    return "gloo" in str(error) and torch.distributed.is_initialized()


def _without_devices() -> bool:
    """Whether several processes run on CPUs only, which Accelerate must be told."""
    import torch

    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available()


def processes_asked_for() -> int | None:
    """How many processes `accelerate launch --cpu --num_processes N` was asked for; else 1.

    Accelerate 1.15 starts one process, whatever N is, and does not pass N on. So N is read from the
    launcher's command line. None if there should be several, but their number is unknown.
    """
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    ranked = any(
        name in os.environ
        for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
    )
    if (
        not on_cpu
        or ranked
        or not {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    ):
        return 1
    import psutil

    try:
        parent = psutil.Process().parent()
        command = parent.cmdline() if parent else []
    except psutil.Error:
        command = []
    given: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        key, _, value = word.partition("=")
        given.setdefault(key.replace("-", "_"), value or following)
    count = given.get("__num_processes", "")
    alone = given.get("__num_machines", "1") == "1"
    return int(count) if count.isdecimal() and alone else None


def accelerator_for(config: SearchConfig, out: Any) -> Any:
    """The accelerator for a search.

    Raises:
        MptifyError: The launcher's settings and those of the search do not fit.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    if processes_asked_for() != 1:
        raise MptifyError(
            "`accelerate launch --cpu` starts one process, however many it is asked for; "
            "`ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2` starts two, "
            "on CPUs."
        )
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", config.precision):
        raise MptifyError(
            f"The launcher asks for {asked}, the search for precision={config.precision!r}; set "
            f"precision={asked} there too."
        )
    _require_trackers(config.trackers)
    # An earlier search in this process may have had another precision.
    AcceleratorState._reset_state()
    try:
        accelerator = Accelerator(
            cpu=_without_devices(),
            mixed_precision=config.precision,
            log_with=list(config.trackers) or None,
            project_dir=str(out) if out else None,
        )
    except ValueError as error:
        raise MptifyError(f"Accelerate can't be set up: {first_line(error)}.") from None
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes < started:
        raise MptifyError(
            f"{started} processes were started, and Accelerate connects "
            f"{accelerator.num_processes} of them: "
            "each would search alone, in the same folder; start one, or use `accelerate launch`."
        )
    accelerator.gradient_accumulation_steps = 1  # this loop accumulates gradients itself
    if config.precision == "fp16" and accelerator.device.type == "cpu":
        raise MptifyError("precision='fp16' needs a GPU; bf16 works on CPUs too.")
    sharded = {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM}
    if accelerator.distributed_type in sharded:
        raise MptifyError(
            f"{accelerator.distributed_type.value} shards the scores, and a mask is selected from "
            "all scores of a layer; "
            "a search needs plain data parallelism (`accelerate launch --multi_gpu`)."
        )
    return accelerator


def _require_trackers(names: Collection[str]) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    there = {str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise MptifyError(
                f"trackers={name!r}: Accelerate knows {', '.join(LOGGER_TYPE_TO_CLASS)}."
            )
        if name not in there:
            raise MptifyError(
                f"trackers={name!r}: is not installed; `pip install {name}` may do it."
            )


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings, flattened for trackers."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = (
                value if isinstance(value, (int, float, str, bool)) else str(value)
            )
    return found


class Wrapped(nn.Module):
    """The module that Accelerate wraps and casts; the network in it stays as it is, in float32."""

    def __init__(self, network: Any):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Any:
        return self.network(images)
