"""The zoo check: convert models in several modes, check the invariants and write a row for each.

Each row is appended to a JSON-lines file at once, so an interrupted check can continue.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.models.registry import Entry
from mptify.surgery import transform
from mptify.surgery.invariants import (
    bad_gradients,
    lost_layers,
    real_inputs,
    unnormalised_quantizers,
    wrongly_trainable,
)
from mptify.surgery.plans import plan_of
from mptify.tools.zoo_rows import DEFAULT_BITS, PRUNE, Row, as_line, missing_bits, read_rows

__all__ = ["RUN_LIMIT", "check_all", "check_model"]

RUN_LIMIT = 100_000_000  # parameters; of larger models, only the structure is checked
SIZES = (96, 112, 128)  # pixels to try before a network's own input size
TIME_LIMIT = 900.0  # seconds for one model


def check_model(entry: Entry, bits: Sequence[str] = DEFAULT_BITS) -> Row:
    """Convert one model in several modes and check it.

    Args:
        entry: The model.
        bits: The bits of each mode; its prune rate is that of `PRUNE`.

    Returns:
        The row. Errors become a part of it.
    """
    started = time.perf_counter()
    row = _empty_row(entry, bits)
    try:
        model = _build_cheaply(entry)
        row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        for one in bits:
            row["modes"][one] = _check_structure(model, one, PRUNE[one])
        del model
        if row["parameters"] <= RUN_LIMIT:
            _check_runs(entry, row["modes"])
    except Exception as error:
        row["error"] = _describe(error)
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def _empty_row(entry: Entry, bits: Sequence[str]) -> Row:
    row: Row = {"model": str(entry), "parameters": 0, "modes": {}}
    return row if tuple(bits) == DEFAULT_BITS else {**row, "bits": list(bits)}


def _build_cheaply(entry: Entry) -> nn.Module:
    try:
        with torch.device("meta"):
            return registry.build(entry)
    except Exception:  # a few builders read the values of their tensors
        with InitMode("constant"):
            return registry.build(entry)


def _check_structure(model: nn.Module, bits: str, prune: float) -> Row:
    ticketed = transform(model, bits=bits, prune=prune)
    plan = plan_of(ticketed)
    weights = _weights_in(model)
    checks = {
        "I2": unnormalised_quantizers(ticketed),
        "I4": wrongly_trainable(ticketed),
        "I5": lost_layers(ticketed)
        if plan.total >= weights
        else [f"{plan.total} of {weights} weights accounted for"],
    }
    return {
        "parts": len(plan.edits) if plan.untraced else 1,
        "untraced": list(plan.untraced)[:20],
        "weights": plan.total,
        "converted": plan.converted,
        "left": [[layer.name, layer.count, layer.reason] for layer in plan.left_dense],
        "kept_activations": len(plan.kept_activations),
        "exempt": {layer.name: layer.input.value for layer in plan.layers if layer.input.is_exempt},
        "failed": {check: names[:5] for check, names in checks.items() if names},
        "ran": False,
    }


def _weights_in(model: nn.Module) -> int:
    """Count all conv and linear weights by torch's classes, independently of the planner."""
    weights: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
            weights[id(module.weight)] = module.weight.numel()
        if isinstance(module, nn.MultiheadAttention):
            for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                parameter = getattr(module, name)
                if parameter is not None:
                    weights[id(parameter)] = parameter.numel()
        if type(module).__name__ == "CondConv2d":
            weight: Any = module.weight
            weights[id(weight)] = weight.numel()
    return sum(weights.values())


def _check_runs(entry: Entry, modes: dict[str, Row]) -> None:
    """Run a training step and an evaluation per mode, at the smallest input size that works."""
    for size in (*SIZES, None):
        try:
            with InitMode("constant"):
                model = registry.build(entry, input_size=size)
            inputs = registry.example_inputs(entry, model, size)
            with torch.no_grad():
                model.train()(*inputs)
            break
        except Exception:
            if size is None:
                raise
    for bits, row in modes.items():
        prune = PRUNE[bits]
        gc.collect()
        failed, without_gradient = _run(model, bits, prune, inputs, row["exempt"])
        if without_gradient:
            row["dead"] = sorted(without_gradient & _dead_when_dense(entry, size, inputs))
            without_gradient -= set(row["dead"])
        if without_gradient:  # a seed can turn off all ReLUs, say behind a squeeze to four channels
            _, still = _run(model, bits, prune, inputs, row["exempt"], seed=1)
            still &= without_gradient
            if still:
                varied = _of_varied_brightness(inputs)
                still &= _run(model, bits, prune, varied, row["exempt"], seed=1)[1]
            row["unlucky"] = sorted(without_gradient - still)
            failed["I4"] += [f"{name}: zero" for name in sorted(still)]
        row["failed"].update({check: names[:5] for check, names in failed.items() if names})
        row["ran"] = True


def _of_varied_brightness(inputs: tuple) -> tuple:
    """The same images, but each with another contrast and brightness.

    The pooled values of noise differ by less than BatchNorm's epsilon, so behind a BatchNorm they
    round to level 0 of 2 bits.
    """

    def varied(images: Any) -> Any:
        return torch.stack(
            [
                image * (0.5 + number % 4) + (-1.0, 1.5, 0.0, 3.0)[number % 4]
                for number, image in enumerate(images)
            ]
        )

    images, *others = inputs
    # Detectors take a list of images.
    images = varied(images) if isinstance(images, Tensor) else list(varied(images))
    return (images, *others)


def _dead_when_dense(entry: Entry, size: int | None, inputs: tuple) -> set[str]:
    """The layers whose weights get no gradient in the dense network either.

    An example is a layer behind a norm over one channel.
    """
    model = registry.build(entry, input_size=size).train()
    registry.training_loss(model(*inputs)).backward()
    return {
        name.removesuffix(".weight")
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and (parameter.grad is None or not float(parameter.grad.abs().max()))
    }


def _run(
    model: nn.Module, bits: str, prune: float, inputs: tuple, exempt: Iterable[str], seed: int = 0
) -> tuple[dict[str, list[str]], set[str]]:
    """The failures of a run by check, and the layers whose scores get only zeros as gradient."""
    ticketed = transform(model, bits=bits, prune=prune, seed=seed).train()
    for module in ticketed.modules():
        if type(module).__name__ in ("DropPath", "StochasticDepth"):
            module.eval()  # in training, they drop whole blocks, and with them the gradients
    outputs: list[Any] = []
    ran, real = real_inputs(ticketed, lambda: outputs.append(ticketed(*inputs)))
    registry.training_loss(outputs.pop()).backward()
    bad = bad_gradients(ticketed)
    failed = {"I4": [f"{name}: {what}" for name, what in bad.items() if what != "zero"]}
    if not bits.endswith("/32"):
        with torch.no_grad():
            ticketed.eval()
            ran_in_eval, real_in_eval = real_inputs(ticketed, lambda: ticketed(*inputs))
        unseen = (
            {layer.name for layer in plan_of(ticketed).layers if not layer.tied_to}
            - ran
            - ran_in_eval
        )
        failed["I1"] = sorted((real | real_in_eval) - set(exempt)) + [
            f"{name}: never ran" for name in sorted(unseen)
        ]
    return failed, {name for name, what in bad.items() if what == "zero"}


def _describe(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).strip() or "no message").splitlines()[0][:200]
    return f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"


def check_all(
    entries: list[Entry],
    path: Path,
    jobs: int,
    on_row: Callable[[Row], None],
    bits: Sequence[str] = DEFAULT_BITS,
) -> None:
    """Check all models in the modes in which they have no row yet.

    If a process dies or exceeds the time limit, the row of its model says so, and a new process
    takes over.

    Args:
        entries: The models.
        path: The file of rows. New rows are appended.
        jobs: Processes to use.
        on_row: Called with each new row.
        bits: The bits of each mode.
    """
    rows = read_rows(path)
    missing = [(entry, missing_bits(str(entry), bits, rows)) for entry in entries]
    waiting = [(entry, some) for entry, some in missing if some]
    path.parent.mkdir(parents=True, exist_ok=True)
    is_cut = path.exists() and path.read_bytes()[-1:] not in (b"\n", b"")
    with path.open("a") as file:
        if is_cut:
            file.write("\n")  # end the row that an interruption cut short
        for row in _rows(waiting, jobs):
            file.write(as_line(row))
            file.flush()
            on_row(row)


_Task = tuple[Entry, tuple[str, ...]]  # a model and the modes to check


def _rows(waiting: list[_Task], jobs: int) -> Iterator[Row]:
    context = mp.get_context("spawn")
    queue = list(reversed(waiting))
    busy: dict[Any, _Worker] = {}
    try:
        while queue or busy:
            while queue and len(busy) < jobs:
                worker = _Worker(context)
                worker.send(queue.pop())
                busy[worker.pipe] = worker
            for pipe in wait(list(busy), timeout=5) or [
                pipe for pipe, worker in busy.items() if worker.is_overdue
            ]:
                worker = busy[pipe]
                row, alive = worker.receive()
                yield row
                if alive and queue:
                    worker.send(queue.pop())
                else:
                    worker.stop()
                    del busy[pipe]
    finally:
        for worker in busy.values():
            worker.stop()


class _Worker:
    """A process that checks one model after another."""

    def __init__(self, context: Any):
        self.pipe, other_end = context.Pipe()
        self.process = context.Process(target=_work, args=(other_end,), daemon=True)
        self.process.start()
        other_end.close()

    def send(self, task: _Task) -> None:
        self.task, self.since = task, time.monotonic()
        self.pipe.send(task)

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() - self.since > TIME_LIMIT

    def receive(self) -> tuple[Row, bool]:
        """The row and True, or a row that says how the process failed and False."""
        seconds = round(time.monotonic() - self.since, 1)
        failed = {**_empty_row(*self.task), "seconds": seconds}
        if not self.pipe.poll():
            return {**failed, "error": f"exceeded the limit of {TIME_LIMIT:.0f} s"}, False
        try:
            return self.pipe.recv(), True
        except (EOFError, OSError):
            self.process.join(5)
            return {
                **failed,
                "error": f"its process ended with code {self.process.exitcode}",
            }, False

    def stop(self) -> None:
        self.process.kill()
        self.pipe.close()


def _work(pipe: Any) -> None:
    torch.set_num_threads(1)
    while True:
        gc.collect()  # reference cycles between networks and their graphs hold gigabytes of tensors
        try:
            pipe.send(check_model(*pipe.recv()))
        except (EOFError, KeyboardInterrupt, BrokenPipeError):
            return
