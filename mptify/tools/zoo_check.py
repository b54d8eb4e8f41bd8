"""The sweep over the zoo: convert every model in both modes, check the invariants, keep a row for each.

Rows go to a JSON-lines file as they are made, so a sweep that was interrupted goes on where it was.
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
    unnormalised_signs,
    wrongly_trainable,
)
from mptify.surgery.plan import plan_of

__all__ = ["MODES", "RUN_LIMIT", "check_model", "markdown", "read_rows", "summary", "sweep"]

MODES = {"1/32": 0.8, "1/1": 0.75}  # bits -> the paper's usual prune rate
RUN_LIMIT = 100_000_000  # parameters; larger models are checked for structure only
SIZES = (96, 112, 128)  # pixels to try before a network's own input size
TIME_LIMIT = 900.0  # seconds for one model

Row = dict[str, Any]


def check_model(entry: Entry) -> Row:
    """Convert one model in every mode and check it; what goes wrong is part of the row, never an exception."""
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
        row["error"] = _sentence(error)
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def _build_cheaply(entry: Entry) -> nn.Module:
    try:
        with torch.device("meta"):
            return registry.build(entry)
    except Exception:  # a few builders compute with their tensors
        with InitMode("constant"):
            return registry.build(entry)


def _check_structure(model: nn.Module, bits: str, prune: float) -> Row:
    ticketed = transform(model, bits=bits, prune=prune)
    plan = plan_of(ticketed)
    weights = _weights_in(model)
    checks = {
        "I2": unnormalised_signs(ticketed),
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
    """All conv and linear weights, counted without the planner: by torch's own layer classes and attribute names."""
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
    """One real training step and one evaluation per mode, at the smallest input size that the network takes."""
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
        failed, idle = _run(model, bits, prune, inputs, row["exempt"])
        if idle:
            row["dead"] = sorted(idle & _dead_when_dense(entry, size, inputs))
            idle -= set(row["dead"])
        if idle:  # a squeeze to four channels, say, whose ReLUs are all off: that should be this seed's bad luck
            row["unlucky"] = sorted(
                idle - _run(model, bits, prune, inputs, row["exempt"], seed=1)[1]
            )
            failed["I4"] += [f"{name}: zero" for name in sorted(idle - set(row["unlucky"]))]
        row["failed"].update({check: names[:5] for check, names in failed.items() if names})
        row["ran"] = True


def _dead_when_dense(entry: Entry, size: int | None, inputs: tuple) -> set[str]:
    """Layers whose weights get no gradient in the network as it was either, such as those behind a norm over one channel."""
    model = registry.build(entry, input_size=size).train()
    registry.training_loss(model(*inputs)).backward()
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if parameter.dim() > 1
    }
    idle = {
        name
        for name, parameter in parameters.items()
        if parameter.grad is None or not float(parameter.grad.abs().max())
    }
    return {name.removesuffix(".weight") for name in idle}


def _run(
    model: nn.Module, bits: str, prune: float, inputs: tuple, exempt: Iterable[str], seed: int = 0
) -> tuple[dict[str, list[str]], set[str]]:
    """The checks that a run failed, and the layers whose scores got a gradient of nothing but zeros."""
    ticketed = transform(model, bits=bits, prune=prune, seed=seed).train()
    for module in ticketed.modules():
        if type(module).__name__ in ("DropPath", "StochasticDepth"):
            module.eval()  # they may switch a whole block off, and its gradients with it
    outputs: list[Any] = []
    ran, real = real_inputs(ticketed, lambda: outputs.append(ticketed(*inputs)))
    registry.training_loss(outputs.pop()).backward()
    bad = bad_gradients(ticketed)
    failed = {"I4": [f"{name}: {what}" for name, what in bad.items() if what != "zero"]}
    if bits.endswith("/1"):
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


def _sentence(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).strip() or "no text").splitlines()[0][:200]
    return f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"


# -- many models -------------------------------------------------------------------------------------------------------


def sweep(entries: list[Entry], path: Path, jobs: int, done: Callable[[Row], None]) -> None:
    """Check each entry that `path` has no row for, in `jobs` processes; `done(row)` is called for each.

    A process that dies or overruns costs its model a row that says so, and is replaced.
    """
    have = {row["model"] for row in read_rows(path)}
    waiting = [entry for entry in entries if str(entry) not in have]
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.read_bytes()[-1:] not in (b"\n", b"")
    with path.open("a") as file:
        if torn:
            file.write("\n")  # the line that an interruption cut short stays behind, alone
        for row in _rows(waiting, jobs):
            file.write(as_line(row))
            file.flush()
            done(row)


def _rows(waiting: list[Entry], jobs: int) -> Iterator[Row]:
    context = mp.get_context("spawn")
    queue = list(reversed(waiting))
    busy: dict[Any, _Worker] = {}
    try:
        while queue or busy:
            while queue and len(busy) < jobs:
                worker = _Worker(context)
                worker.give(queue.pop())
                busy[worker.pipe] = worker
            for pipe in wait(list(busy), timeout=5) or [p for p, w in busy.items() if w.overdue]:
                worker = busy[pipe]
                row, alive = worker.take()
                yield row
                if alive and queue:
                    worker.give(queue.pop())
                else:
                    worker.stop()
                    del busy[pipe]
    finally:
        for worker in busy.values():
            worker.stop()


class _Worker:
    """A process that checks one model after another."""

    def __init__(self, context: Any):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, entry: Entry) -> None:
        self.entry, self.since = entry, time.monotonic()
        self.pipe.send(entry)

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self.since > TIME_LIMIT

    def take(self) -> tuple[Row, bool]:
        """The finished row and True, or a row that says how the process failed and False."""
        lost = {
            "model": str(self.entry),
            "parameters": 0,
            "modes": {},
            "seconds": round(time.monotonic() - self.since, 1),
        }
        if not self.pipe.poll():
            return {**lost, "error": f"gave up after {TIME_LIMIT:.0f} s"}, False
        try:
            return self.pipe.recv(), True
        except (EOFError, OSError):
            self.process.join(5)
            return {**lost, "error": f"its process ended with code {self.process.exitcode}"}, False

    def stop(self) -> None:
        self.process.kill()
        self.pipe.close()


def _work(pipe: Any) -> None:
    torch.set_num_threads(1)
    while True:
        gc.collect()  # networks hang in cycles with their graphs, and Python sees no hurry in some gigabytes of tensors
        try:
            pipe.send(check_model(pipe.recv()))
        except (EOFError, KeyboardInterrupt, BrokenPipeError):
            return


def as_line(row: Row) -> str:
    """A row as one line of JSON."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_rows(path: Path) -> list[Row]:
    """The rows of an earlier sweep; a row cut short by an interruption is passed over, and any other line refused."""
    try:
        lines = path.read_bytes().decode().splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise MptifyError(f"{path}: can't be read as the rows of a sweep ({reason}).") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            _ = row["model"], row["modes"]
            rows.append(row)
        except (json.JSONDecodeError, KeyError, TypeError):
            if not '{"model": '.startswith(line[:10]):
                raise MptifyError(
                    f"{path}: line {number} is no row of a sweep; choose another file."
                ) from None
    return rows


# -- the table ---------------------------------------------------------------------------------------------------------


def passed(row: Row) -> bool:
    """Converted in every mode with no check failed."""
    return (
        "error" not in row
        and len(row["modes"]) == len(MODES)
        and not any(mode["failed"] for mode in row["modes"].values())
    )


def was_run(row: Row) -> bool:
    """Whether forward and backward passes ran, in every mode."""
    return bool(row["modes"]) and all(mode["ran"] for mode in row["modes"].values())


def summary(rows: list[Row]) -> dict[str, Any]:
    """The totals over all rows, as plain data."""
    modes = [mode for row in rows for mode in row["modes"].values()]
    weights = sum(mode["weights"] for mode in modes)
    return {
        "models": len(rows),
        "converted": sum(len(row["modes"]) == len(MODES) for row in rows),
        "passed": sum(passed(row) for row in rows),
        "run": sum(was_run(row) for row in rows),
        "whole": sum(all(mode["parts"] == 1 for mode in row["modes"].values()) for row in rows),
        "share": sum(mode["converted"] for mode in modes) / weights if weights else 0.0,
    }


def markdown(rows: list[Row]) -> str:
    """The coverage page of the docs."""
    totals = summary(rows)
    rows = sorted(rows, key=lambda row: (row["model"].startswith("timm:"), row["model"]))
    lines = [
        "# Coverage",
        "",
        f"`mptify zoo --all`, {totals['models']:,} models of torchvision and timm, each converted to 1/32 at 80 % and to 1/1 at 75 %.",
        "",
        f"- {totals['converted']:,} convert in both modes; {totals['passed']:,} of them pass every check.",
        f"- {100 * totals['share']:.4f} % of all weights are converted; the rest is named below.",
        f"- {totals['whole']:,} are traced whole; the others in parts, each a region of its own.",
        f"- {totals['run']:,} have at most {RUN_LIMIT // 10**6} M parameters and were also run: one training step per mode, and one "
        "evaluation in 1/1.",
        "",
        "Structure is checked on every model: every sign is fed by a normalised value (I2), only what the config names requires grad (I4), "
        "every conv and linear weight is accounted for (I5). Runs add: every ticket layer that is not exempt sees only ±1 (I1), every "
        "layer's scores get a finite, non-zero gradient (I4).",
        "",
        *_left_table(rows),
        "| model | parameters | traced | converted 1/32 | converted 1/1 | checks |",
        "| --- | ---: | --- | ---: | ---: | --- |",
    ]
    return "\n".join(lines + [_table_row(row) for row in rows]) + "\n"


def _left_table(rows: list[Row]) -> list[str]:
    found = []
    for row in rows:
        left = {
            (name, count, reason): None
            for mode in row["modes"].values()
            for name, count, reason in mode["left"]
        }
        reasons: dict[str, list[tuple[str, int]]] = {}
        for name, count, reason in left:
            reasons.setdefault(reason, []).append((name, count))
        for reason, layers in reasons.items():
            more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
            found.append(
                f"| {row['model']} | `{layers[0][0]}`{more} | {sum(count for _, count in layers):,} | {reason} |"
            )
    if not found:
        return []
    return [
        "## What stays dense",
        "",
        "| model | layers | weights | reason |",
        "| --- | --- | ---: | --- |",
        *found,
        "",
        "## Every model",
        "",
    ]


def _table_row(row: Row) -> str:
    cells = [row["model"], f"{row['parameters'] / 1e6:,.1f} M"]
    if "error" in row and not row["modes"]:
        return "| " + " | ".join([*cells, "–", "–", "–", f"**{row['error']}**"]) + " |"
    parts = max(mode["parts"] for mode in row["modes"].values())
    cells.append("whole" if parts == 1 else f"{parts} parts")
    cells += [
        f"{100 * mode['converted'] / mode['weights']:.2f} %" for mode in row["modes"].values()
    ]
    failed = [
        f"{check} in {bits}" for bits, mode in row["modes"].items() for check in mode["failed"]
    ]
    if "error" in row or failed:
        verdict = f"**{row.get('error') or ', '.join(failed)}**"
    else:
        verdict = "all" if was_run(row) else "structure; not run"
    for kind, why in {
        "dead": "get no gradient in the dense network either",
        "unlucky": "get a gradient with another seed only",
    }.items():
        names = {name for mode in row["modes"].values() for name in mode.get(kind, ())}
        if names:
            verdict += f"; {len(names)} layers {why}"
    return "| " + " | ".join([*cells, verdict]) + " |"
