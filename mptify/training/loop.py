"""The search loop, on one process or several.

A step depends on earlier steps only through what a checkpoint holds: the order of images, their
augmentation and dropout are seeded by seed, epoch and step. So a run that was killed and resumed
ends in the same bytes.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mptify.config import Recipe, SearchConfig, make_search_config
from mptify.errors import BadConfig, BadData, Disagreement, MptifyError, shown
from mptify.models.registry import Architecture
from mptify.recipe_files import to_yaml
from mptify.registry import methods
from mptify.surgery import ticket_layers
from mptify.surgery.plans import plan_of
from mptify.ticket.state import ticket_of, write
from mptify.training.callbacks import (
    Callback,
    CallbackList,
    Curves,
    SearchState,
    StepMetrics,
    Trackers,
    check_callbacks,
)
from mptify.training.checkpoint import changing, fingerprint, optimizer_state, restore_optimizer_
from mptify.training.data import (
    Images,
    as_pair,
    batches_of,
    first_images,
    images_in_step,
    mixed,
    training_batches,
)
from mptify.training.diagnostics import Masks, constant_layers, require_agreement
from mptify.training.distributed import Wrapped, accelerator_for, lost_processes_raise
from mptify.training.evaluation import Evaluation, evaluate, evaluating, logits_of
from mptify.training.methods import SearchMethod
from mptify.training.optim import make_optimizer
from mptify.training.run_folder import Run
from mptify.training.schedule import learning_rate, prune_share
from mptify.training.setup import matching_architecture, require_images_fit, start_from_
from mptify.training.signals import keep_freed_memory, stoppable

__all__ = ["Result", "search", "steps_of"]


@dataclass
class Result:
    """The result of a search.

    Attributes:
        model: The ticket model, in `eval()`.
        accuracy: The accuracy on the validation images after the last epoch.
        best: The highest accuracy of all epochs.
        rows: The metrics of each epoch.
        warnings: What looked wrong.
        folder: The folder of the run, if it has one.
        finished: Whether the search ran to its end.
        stop_requested: Whether Ctrl-C or SIGTERM arrived, possibly too late to stop the search.
    """

    model: nn.Module
    accuracy: float
    best: float
    rows: list[dict[str, Any]]
    warnings: list[str] = field(default_factory=list)
    folder: Path | None = None
    finished: bool = True
    stop_requested: bool = False


def search(
    model: nn.Module,
    train: Any,
    val: Any,
    config: SearchConfig | Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    architecture: Architecture | str | None = None,
    callbacks: Sequence[Callback] = (),
    workers: int = 0,
) -> Result:
    """Search a ticket in a network. The network that you pass in stays as it is.

    Args:
        model: A network, or a ticket model, which keeps its settings and scores.
        train: Training images: a pair (uint8 images, labels) or a map-style data set.
        val: Validation images, likewise.
        config: The fields of [`SearchConfig`][mptify.SearchConfig].
        out: A folder for metrics, checkpoints and tickets. With it, Ctrl-C or SIGTERM saves the
            search and returns a result that is not `finished`.
        resume: Whether to continue the search that was stopped in `out`.
        architecture: The network's name, such as `"timm:resnet18"`, by which `load` builds it.
        callbacks: [`Callback`][mptify.Callback] objects.
        workers: How many processes read a data set.

    Returns:
        The ticket model and its accuracy.

    Raises:
        BadConfig: A setting or an argument is invalid.
        BadData: Images or labels can't be used.
        RunExists: `out` holds another search.

    Example:
        config = {"epochs": 5, "ticket": {"bits": "1/32", "prune": 0.8}}
        result = mptify.search(model, train, val, config, out="run")
        mptify.save(result.model, "model.ticket")
    """
    _check_arguments(model, config, out, architecture, workers)
    callbacks = check_callbacks(callbacks)
    if hasattr(model, "ticket_plan"):  # keeps its own settings
        own = {"ticket": plan_of(model).config}
        config = (
            config.model_copy(update=own)
            if isinstance(config, SearchConfig)
            else {**(config or {}), **own}
        )
    config = make_search_config(config)
    pair = as_pair(train, val, workers)
    with lost_processes_raise(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        return _Search(model, *pair, config, out, resume, architecture, callbacks).go()


def _check_arguments(model: Any, config: Any, out: Any, architecture: Any, workers: Any) -> None:
    """Check all arguments but the data."""
    if not isinstance(model, nn.Module):
        hint = f"; `mptify search {model}` takes names" if isinstance(model, str) else ""
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise BadConfig(
                f"model: a network (torch.nn.Module) is needed, not its class {model.__name__}; "
                f"write {model.__name__}()."
            )
        raise BadConfig(f"model: a network (torch.nn.Module) is needed, not {shown(model)}{hint}.")
    if config is not None and not isinstance(config, (SearchConfig, Mapping)):
        raise BadConfig(
            f"config: settings are needed, such as {{'epochs': 5}}, not {shown(config)}."
        )
    if out is not None and not isinstance(out, (str, os.PathLike)):
        raise BadConfig(f"out={shown(out)}: the path of a folder is needed.")
    if architecture is not None and not isinstance(architecture, (str, Architecture)):
        raise BadConfig(
            f"architecture={shown(architecture)}: a name is needed, such as 'timm:resnet18'."
        )
    if not isinstance(workers, int) or workers < 0:
        raise BadConfig(f"workers={shown(workers)}: a number from 0 is needed.")


def steps_of(
    model: nn.Module, train: Any, config: SearchConfig | Mapping[str, Any]
) -> Iterator[None]:
    """The training steps of a search, one per `next`, endlessly, for benchmarks."""
    images, _ = as_pair(train, train)
    search = _Search(model, images, images, make_search_config(config), None, False, None, [])
    search.network.train()
    while True:
        search.state.step = 0
        for pixels, labels in training_batches(
            images,
            search.config.batch,
            search.config.seed,
            0,
            first=0,
            rank=0,
            world=1,
            device=search.device,
        ):
            search._one_step(pixels, labels)
            search.state.step += 1
            yield


class _Search:
    def __init__(
        self,
        model: nn.Module,
        train: Images,
        val: Images,
        config: SearchConfig,
        out: Any,
        resume: bool,
        architecture: Any,
        callbacks: list[Callback],
    ):
        self.config, self.train, self.val, self.architecture = config, train, val, architecture
        self.accelerator = accelerator_for(config, out)
        self.rank, self.world, self.main = (
            self.accelerator.process_index,
            self.accelerator.num_processes,
            self.accelerator.is_main_process,
        )
        self.device = self.accelerator.device
        self.steps = batches_of(len(train), config.batch)
        smallest = len(train) // self.steps
        if smallest < 2 * self.world * config.accumulate:
            raise BadData(
                f"{smallest} images per step are too few for {self.world} processes and "
                f"accumulate={config.accumulate}."
            )
        self.method: SearchMethod = methods[config.method]()
        self.network = self.method.prepare(model, config).to(self.device)
        if isinstance(config, Recipe) and config.start is not None:
            start_from_(self.network, config.start)
        for images in (train, val):
            require_images_fit(self.network, images, self.device)
        if isinstance(architecture, str):
            self.architecture = matching_architecture(
                architecture, self.network, train, config, self.device
            )
        self.sample = first_images(val, 32, self.device)
        self.layers = {layer.ticket_name: layer for layer in ticket_layers(self.network).values()}
        self.masks = Masks(self.network)
        self.averages = (
            {name: layer.scores.detach().clone() for name, layer in self.layers.items()}
            if config.ema
            else {}
        )
        self.state = SearchState(self.network, config, self.steps, is_main=self.main)
        # The loss, correct answers and images of this process. (mps has no float64.)
        sums_device = "cpu" if self.device.type == "mps" else self.device
        self.sums = torch.zeros(3, dtype=torch.float64, device=sums_device)
        self.warnings: list[str] = []
        self.run = self._open(out, resume)
        own: list[Callback] = [Curves(self.run.folder)] if self.run else []
        own += [Trackers(self.accelerator)] if config.trackers else []
        self.callbacks = CallbackList(self.state, [self.method, *own, *callbacks])
        self.identity = fingerprint(self.network) if self.run else ""
        optimizer = make_optimizer(self.network, config)
        whole = Wrapped(torch.compile(self.network) if config.compile else self.network)
        self.forward, self.optimizer = self.accelerator.prepare(whole, optimizer)
        self.resume = resume

    # -- running -----------------------------------------------------------------------------------

    def go(self) -> Result:
        try:
            if self.resume:
                self._restore_()
                self._require_one_place()
            return self._go()
        finally:
            try:
                self.callbacks.search_end()
            finally:
                if self.run:
                    self.run.unlock()

    def _go(self) -> Result:
        config = self.config
        keep_freed_memory()
        self.callbacks.search_begin()
        self.network.train()
        with stoppable(self.run is not None, self.callbacks.interrupt) as stop:
            while self.state.epoch < config.epochs:
                if not self._one_epoch(stop):
                    return self._result(finished=False, stop_requested=True)
                self._end_epoch()
        if self.run and self.main:
            last, method = self.state.rows[-1]["val_accuracy"], config.method
            summary = {
                "accuracy": last,
                "best": self._best(),
                "epochs": config.epochs,
                "method": method,
                "warnings": self.warnings,
            }
            self.run.write_summary(summary)
        self.accelerator.wait_for_everyone()
        return self._result(finished=True, stop_requested=self._agreed(bool(stop), False)[0])

    def _result(self, finished: bool, stop_requested: bool) -> Result:
        last = self.state.rows[-1]["val_accuracy"] if self.state.rows else float("nan")
        self._take_(self.averages)
        folder = self.run.folder if self.run else None
        return Result(
            self.network.eval(),
            last,
            self._best(),
            self.state.rows,
            self.warnings,
            folder,
            finished,
            stop_requested,
        )

    def _one_epoch(self, stop: list[bool]) -> bool:
        """Run the remaining steps of the epoch; return False if the search is to stop."""
        config = self.config
        start, saved, shown, seen = time.perf_counter(), time.monotonic(), 0.0, 0
        if self.state.step == 0:
            self.callbacks.epoch_begin()
        batches = training_batches(
            self.train,
            config.batch,
            config.seed,
            self.state.epoch,
            first=self.state.step,
            rank=self.rank,
            world=self.world,
            device=self.device,
        )
        for pixels, labels in batches:
            self._one_step(pixels, labels)
            self.state.step += 1
            seen += len(labels) * self.world
            now = time.monotonic()
            loss = accuracy = None
            if now - shown > 0.5:
                shown = now
                total, right, count = self.sums.tolist()
                loss, accuracy = self._finite(total / count), right / count
            self.callbacks.step_end(StepMetrics(seen, loss, accuracy))
            stopping, due = self._agreed(
                bool(stop),
                not config.checkpoint_steps and now - saved > 60 * config.checkpoint_minutes,
            )
            due |= (
                config.checkpoint_steps is not None
                and self.state.step % config.checkpoint_steps == 0
            )
            if stopping or (due and self.state.step < self.steps):
                self._save()
                saved = now
            if stopping:
                return False
        self.seconds = time.perf_counter() - start
        self.speed = seen / max(self.seconds, 1e-9)
        return True

    def _finite(self, loss: float) -> float:
        if not math.isfinite(loss):
            raise MptifyError(
                f"The loss is no longer finite (epoch {self.state.epoch + 1}, step "
                f"{self.state.step}); a smaller lr may help."
            )
        return loss

    def _sum_up(self, values: Tensor) -> Tensor:
        """Sum over all processes."""
        return values if self.world == 1 else self.accelerator.reduce(values.to(self.device), "sum")

    def _agreed(self, stop: bool, save: bool) -> tuple[bool, bool]:
        """Whether to stop and whether to save, the same for all processes.

        Any process may ask to stop; the clock of the first decides when to save. Several processes
        synchronize in every eighth step only.
        """
        if self.world > 1 and self.state.step % 8 and self.state.step < self.steps:
            return False, False
        stopping, due = self._sum_up(torch.tensor([int(stop), int(save and self.main)])).tolist()
        return bool(stopping), bool(due)

    def _one_step(self, pixels: Tensor, labels: Tensor) -> None:
        config = self.config
        at = self.state.epoch + (self.state.step + 0.5) / self.steps
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, at) * group["scale"]
        self._set_prune(at)
        # Dropout and other random layers draw from torch's generator.
        torch.manual_seed(mixed(config.seed, self.state.epoch, self.state.step, self.rank))
        image_count = images_in_step(len(self.train), self.steps, self.state.step)
        parts = list(
            zip(
                pixels.tensor_split(config.accumulate),
                labels.tensor_split(config.accumulate),
                strict=True,
            )
        )
        for index, (images, targets) in enumerate(parts):
            last = index == len(parts) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.forward):
                output = self.forward(images)
                total = self.method.loss(output, targets, config)
                # DistributedDataParallel averages over processes; some have one image more.
                self.accelerator.backward(total * (self.world / image_count))
            right = (logits_of(output).detach().argmax(1) == targets).sum()
            self.sums += torch.stack([total.detach(), right, right.new_tensor(len(targets))]).to(
                self.sums
            )
        if config.clip is not None:
            self.accelerator.clip_grad_norm_(self.forward.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._average()

    def _set_prune(self, at: float) -> None:
        if not self.config.prune_ramp or not self.layers:
            return
        share, ticket = prune_share(self.config, at), self.config.ticket
        for layer in ticket_layers(self.network).values():  # tied ones too
            layer.set_prune_(share * ticket.prune_of(layer.ticket_name))

    @torch.no_grad()
    def _average(self) -> None:
        done = self.state.epoch * self.steps + self.state.step
        for name, mean in self.averages.items():
            decay = min(self.config.ema or 0.0, (1 + done) / (10 + done))  # decays faster at first
            mean.mul_(decay).add_(self.layers[name].scores, alpha=1 - decay)

    # -- end of an epoch ---------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        total, right, count = self._sum_up(self.sums).tolist()
        self._finite(total)
        assert count == len(self.train), (
            f"{count} images were seen, and there are {len(self.train)}"
        )
        self._set_prune(self.state.epoch + 1)
        self._share_buffers()
        with self._averaged():
            found = self._evaluate()
            flipped = self.masks.update()
            require_agreement(self.masks, self.accelerator.gather, self.world, self.device)
            self._diagnose()
            row = self._row(total / count, right / count, found, flipped)
            before = self._best()
            self.state.rows.append(row)
            if self.run and self.main:
                self._write_network("last", row)
                if self._best() > before:
                    self._write_network("best", row)
        self.state.epoch, self.state.step = self.state.epoch + 1, 0
        self.sums.zero_()
        self.callbacks.epoch_end(row)  # which may add metrics
        if self.run and self.main:
            self.run.write_metrics(self.state.rows)
        self._save()

    def _share_buffers(self) -> None:
        """Broadcast the statistics of process 0, as DistributedDataParallel does before a step."""
        if self.world > 1:
            for buffer in self.network.buffers():
                torch.distributed.broadcast(buffer, 0)

    def _best(self) -> float:
        """The highest accuracy of the epochs after the prune ramp."""
        return max(
            (
                row["val_accuracy"]
                for row in self.state.rows
                if row["epoch"] >= self.config.prune_ramp
            ),
            default=-1.0,
        )

    def _evaluate(self) -> Evaluation:
        batch = 4 * max(1, self.config.batch // (self.world * self.config.accumulate))
        share = {"rank": self.rank, "world": self.world, "sum_up": self._sum_up}
        return evaluate(self.network, self.val, batch, self.device, **share)

    def _row(
        self, loss: float, accuracy: float, found: Evaluation, flipped: float
    ) -> dict[str, Any]:
        kept = sum(layer.kept for layer in self.layers.values())
        weights = sum(layer.count for layer in self.layers.values())
        row: dict[str, Any] = {
            "epoch": self.state.epoch + 1,
            "loss": loss,
            "accuracy": accuracy,
            "val_loss": found.loss,
            "val_accuracy": found.top1,
            "val_top5": found.top5,
            "lr": learning_rate(self.config, self.state.epoch + 1),
            "seconds": round(self.seconds, 2),
            "images_per_second": round(self.speed, 1),
        }
        if self.layers:
            row |= {"flipped": flipped, "pruned": 1 - kept / weights, "masks": self.masks.digest()}
        return row

    def _diagnose(self) -> None:
        texts = [
            f"{name}: its survivors have not changed since the first epoch."
            for name in self.masks.stuck(self.state.epoch + 1)
        ]
        texts += [
            f"{name}: its output is the same for every image."
            for name in constant_layers(self.network, self.sample)
        ]
        for text in texts:
            if text not in self.warnings:
                self.warnings.append(text)
                self.callbacks.warning(text)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Use the running mean of the scores inside this context, if there is one."""
        scores = {name: self.layers[name].scores.detach().clone() for name in self.averages}
        self._take_(self.averages)
        try:
            yield
        finally:
            self._take_(scores)

    @torch.no_grad()
    def _take_(self, scores: dict[str, Tensor]) -> None:
        for name, values in scores.items():
            self.layers[name].scores.copy_(values)

    def _write_network(self, which: str, row: dict[str, Any]) -> None:
        assert self.run is not None
        if not self.layers:
            self.run.write_dense(which, self.network)
            return
        notes: dict[str, Any] = {
            "accuracy": row["val_accuracy"],
            "epoch": row["epoch"],
            "method": self.config.method,
        }
        if isinstance(self.config, Recipe):
            notes["data"] = self.config.data.source
        if self.val.names and sum(map(len, self.val.names)) < 20_000:
            notes["labels"] = list(self.val.names)
        notes["input"] = {
            "shape": list(self.val.shape()),
            "mean": list(self.val.mean),
            "std": list(self.val.std),
        }
        notes["recipe"] = self.config.model_dump(mode="json")
        with evaluating(self.network):
            write(
                ticket_of(self.network, architecture=self.architecture, notes=notes),
                self.run.ticket(which),
            )

    # -- checkpoints -------------------------------------------------------------------------------

    def _open(self, out: Any, resume: bool) -> Run | None:
        if out is None:
            if resume:
                raise MptifyError("resume=True needs the folder of a run, out=...")
            return None
        run: Run | None = None
        errors: list[Exception] = []
        if self.main:
            try:
                run = Run.again(Path(out)) if resume else Run.begin(Path(out), to_yaml(self.config))
                run.lock()
                run.sweep()
                run.require_same(self.config.model_dump(mode="json"))
            except MptifyError as error:
                errors.append(error)
                if run is not None:
                    run.unlock()
        failed = self._sum_up(torch.tensor([len(errors)])).item()
        if errors:
            raise errors[0]
        if failed:
            raise MptifyError(f"Process 0 could not open {out}.")
        return run or Run(Path(out))

    def _save(self) -> None:
        """Write a checkpoint: everything the next step depends on."""
        if self.run is None:
            return
        sums = self._sum_up(self.sums).tolist() if self.state.step else [0.0, 0.0, 0.0]
        if not self.main:
            return
        tensors = {f"model.{name}": tensor for name, tensor in changing(self.network)}
        values, plain = optimizer_state(self.optimizer.optimizer)
        tensors |= values
        tensors |= {f"average.{name}": mean for name, mean in self.averages.items()}
        tensors |= self.masks.tensors()
        scaler = (
            self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None
        )
        state = {
            "epoch": self.state.epoch,
            "step": self.state.step,
            "sums": sums,
            "still": self.masks.still,
            "warnings": self.warnings,
            "optimizer": plain,
            "scaler": scaler,
            "rows": self.state.rows,
            "network": self.identity,
            "steps": self.steps,
            "threads": torch.get_num_threads(),
            "processes": self.world,
            "callbacks": self.callbacks.state_dict(),
        }
        self.run.write_checkpoint(tensors, state)

    def _restore_(self) -> None:
        assert self.run is not None
        found = self.run.read_checkpoint()
        if found is None:
            return
        tensors, state = found
        if state["network"] != self.identity or state["steps"] != self.steps:
            raise MptifyError(
                f"{self.run.folder}: its checkpoint belongs to another network or to other data."
            )
        with torch.no_grad():
            for name, tensor in changing(self.network):
                tensor.copy_(tensors[f"model.{name}"])
            for name, mean in self.averages.items():
                mean.copy_(tensors[f"average.{name}"])
        restore_optimizer_(self.optimizer.optimizer, tensors, state["optimizer"])
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.masks.restore_(tensors, state["still"])
        self.state.epoch, self.state.step, self.state.rows, self.warnings = (
            state["epoch"],
            state["step"],
            state["rows"],
            state["warnings"],
        )
        self.callbacks.load_state_dict(state["callbacks"])
        if self.main:  # these are the sums over all processes
            self.sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))
        for what, now in (("threads", torch.get_num_threads()), ("processes", self.world)):
            if state[what] != now:
                self.callbacks.warning(
                    f"{what}: {state[what]} when the run was stopped, {now} now; what it ends in "
                    "may differ in the last bits."
                )

    def _require_one_place(self) -> None:
        """Raise unless all processes found the same checkpoint."""
        places = self.accelerator.gather(
            torch.tensor([[self.state.epoch, self.state.step]], device=self.device)
        ).tolist()
        for rank, place in enumerate(places):
            if place != places[0]:
                raise Disagreement(
                    f"Process {rank} found another checkpoint than process 0: every process must "
                    "see the same folder of the run."
                )
