"""The zoo check: convert every model in both modes, check the invariants and write a row for each.

Each row is appended to a JSON-lines file at once, so an interrupted check can continue.
"""

from __future__ import annotations

import gc
import json
import multiprocessing as mp
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mptify.errors import MptifyError
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

__all__ = [
    "MODES",
    "RUN_LIMIT",
    "Row",
    "as_line",
    "check_all",
    "check_model",
    "passed",
    "read_rows",
    "was_run",
]

MODES = {"1/32": 0.8, "1/1": 0.75}  # bits -> the paper's usual prune rate
RUN_LIMIT = 100_000_000  # parameters; of larger models, only the structure is checked
SIZES = (96, 112, 128)  # pixels to try before a network's own input size
TIME_LIMIT = 900.0  # seconds for one model

Row = dict[str, Any]


def check_model(entry: Entry) -> Row:
    """Convert one model in every mode and check it.

    Args:
        entry: The model.

    Returns:
        The row. Errors become a part of it.
    """
    started = time.perf_counter()
    row: Row = {"model": str(entry), "parameters": 0, "modes": {}}
    try:
        model = _build_cheaply(entry)
        row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        for bits, prune in MODES.items():
            row["modes"][bits] = _check_structure(model, bits, prune)
        del model
        if row["parameters"] <= RUN_LIMIT:
            _check_runs(entry, row["modes"])
    except Exception as error:
        row["error"] = _describe(error)
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


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
    for bits, prune in MODES.items():
        row = modes[bits]
        gc.collect()
        failed, without_gradient = _run(model, bits, prune, inputs, row["exempt"])
        if without_gradient:
            row["dead"] = sorted(without_gradient & _dead_when_dense(entry, size, inputs))
            without_gradient -= set(row["dead"])
        if without_gradient:  # a seed can turn off all ReLUs, say behind a squeeze to four channels
            _, with_other_seed = _run(model, bits, prune, inputs, row["exempt"], seed=1)
            row["unlucky"] = sorted(without_gradient - with_other_seed)
            failed["I4"] += [f"{name}: zero" for name in sorted(without_gradient & with_other_seed)]
        row["failed"].update({check: names[:5] for check, names in failed.items() if names})
        row["ran"] = True


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


def passed(row: Row) -> bool:
    """Whether the model converts in every mode and passes every check."""
    return (
        "error" not in row
        and len(row["modes"]) == len(MODES)
        and not any(mode["failed"] for mode in row["modes"].values())
    )


def was_run(row: Row) -> bool:
    """Whether the model ran forward and backward in every mode."""
    return bool(row["modes"]) and all(mode["ran"] for mode in row["modes"].values())


def check_all(entries: list[Entry], path: Path, jobs: int, on_row: Callable[[Row], None]) -> None:
    """Check all models that have no row yet.

    If a process dies or exceeds the time limit, the row of its model says so, and a new process
    takes over.

    Args:
        entries: The models.
        path: The file of rows. New rows are appended.
        jobs: Processes to use.
        on_row: Called with each new row.
    """
    checked = {row["model"] for row in read_rows(path)}
    waiting = [entry for entry in entries if str(entry) not in checked]
    path.parent.mkdir(parents=True, exist_ok=True)
    is_cut = path.exists() and path.read_bytes()[-1:] not in (b"\n", b"")
    with path.open("a") as file:
        if is_cut:
            file.write("\n")  # end the row that an interruption cut short
        for row in _rows(waiting, jobs):
            file.write(as_line(row))
            file.flush()
            on_row(row)


def _rows(waiting: list[Entry], jobs: int) -> Iterator[Row]:
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

    def send(self, entry: Entry) -> None:
        self.entry, self.since = entry, time.monotonic()
        self.pipe.send(entry)

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() - self.since > TIME_LIMIT

    def receive(self) -> tuple[Row, bool]:
        """The row and True, or a row that says how the process failed and False."""
        failed = {
            "model": str(self.entry),
            "parameters": 0,
            "modes": {},
            "seconds": round(time.monotonic() - self.since, 1),
        }
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
            pipe.send(check_model(pipe.recv()))
        except (EOFError, KeyboardInterrupt, BrokenPipeError):
            return


def as_line(row: Row) -> str:
    """A row as one line of JSON."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_rows(path: Path) -> list[Row]:
    """Read the rows of an earlier check.

    Args:
        path: The file of rows, which need not exist.

    Returns:
        The rows. A row that an interruption cut short is skipped.

    Raises:
        MptifyError: The file can't be read, or a line is not a row.
    """
    try:
        lines = path.read_bytes().decode().splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise MptifyError(f"{path}: can't be read as rows of a zoo check ({reason}).") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            _ = row["model"], row["modes"]
            rows.append(row)
        except (json.JSONDecodeError, KeyError, TypeError):
            if not '{"model": '.startswith(line[:10]):
                raise MptifyError(
                    f"{path}: line {number} is not a row of a zoo check; choose another file."
                ) from None
    return rows
