"""Which devices and processes there are. The only importer of accelerate."""

from __future__ import annotations

from typing import Any

from mptify.errors import MptifyError
from mptify.recipe import SearchSpec

__all__ = ["accelerator_for", "flat", "meet"]


def meet() -> None:
    """Wait for all processes, if there are several."""
    from accelerate import Accelerator

    Accelerator().wait_for_everyone()


def accelerator_for(spec: SearchSpec, out: Any) -> Any:
    """Accelerate's view of the devices, or one sentence on what is wrong with it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state()  # of an earlier search in this process, which may have had another precision
    try:
        accelerator = Accelerator(
            mixed_precision=spec.precision, log_with=list(spec.trackers) or None, project_dir=str(out) if out else None
        )
    except ValueError as error:
        raise MptifyError(f"Accelerate can't be set up: {error}") from None
    accelerator.gradient_accumulation_steps = 1  # whatever the launcher says: this loop does it itself
    if len(accelerator.log_with) != len(spec.trackers):
        raise MptifyError(f"trackers: not all of {', '.join(spec.trackers)} are installed.")
    if spec.precision == "fp16" and accelerator.device.type == "cpu":
        raise MptifyError("precision='fp16' needs a GPU; bf16 works on CPUs too.")
    sharded = {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM}
    if accelerator.distributed_type in sharded:
        raise MptifyError(
            f"{accelerator.distributed_type.value} shards the scores, and a mask is chosen from all scores of a layer; "
            "a search needs plain data parallelism (`accelerate launch --multi_gpu`)."
        )
    return accelerator


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings as trackers take them."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return found
