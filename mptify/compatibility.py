"""What timm does with its networks, tried on a ticket of one network per family: `python -m mptify.compatibility > docs/compatibility.md`.

A behaviour is tried on the dense network first. Where that fails, timm does not offer it for this network, and the ticket is not asked.
"""

from __future__ import annotations

import copy
import enum
import gc
import io
import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mptify.catalog import tensors_in
from mptify.coverage import MODES
from mptify.errors import MptifyError, first_line
from mptify.families import FAMILIES, IMAGE_SIZES
from mptify.surgery import ticket_layers, transform

__all__ = ["BEHAVIOURS", "Cell", "State", "check_family", "page"]


class State(enum.Enum):
    """How a behaviour of timm's fares on a ticket."""

    WORKS = "works"
    REFUSED = "refused"  # by an error of ours, which says why
    LACKING = "as timm"  # the dense network does not have it either
    FAILS = "fails"


@dataclass(frozen=True)
class Cell:
    """One behaviour of one network in one mode. `text` is what was raised."""

    state: State
    text: str = ""


class Differs(Exception):
    """A behaviour ran, and gave something else than it should."""


@dataclass
class Case:
    """A network to try something on: the dense one, or the ticket made of it."""

    model: nn.Module
    images: Tensor
    build: Callable[..., nn.Module]  # the same network anew, with further arguments for timm
    convert: Callable[[nn.Module], nn.Module]  # what made `model` of the dense network

    def copy(self) -> Any:
        return copy.deepcopy(self.model)


# -- behaviours: each returns what must be the same for the dense network and its ticket -----------------------------------


def _features_and_head(case: Case) -> Any:
    model: Any = case.model
    _require_close(model.forward_head(model.forward_features(case.images)), model(case.images), "forward_head(forward_features(x))")
    return _shapes(model(case.images))


def _intermediates(case: Case) -> Any:
    model: Any = case.model
    features, intermediates = model.forward_intermediates(case.images)
    _require_close(features, model.forward_features(case.images), "the features of forward_intermediates(x)")
    return _shapes(features), _shapes(intermediates)


def _reset_classifier(case: Case) -> Any:
    model = case.copy()
    model.reset_classifier(7)
    seven = _shapes(model(case.images))
    return seven, model.num_classes


def _grad_checkpointing(case: Case) -> Any:
    plain, saving = case.copy().train(), case.copy().train()
    saving.set_grad_checkpointing(True)
    results = []
    for model in (plain, saving):
        outputs = _seeded(model, case.images)
        sum(one.float().square().mean() for one in tensors_in(outputs)).backward()  # type: ignore[union-attr]
        results.append((outputs, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}))
    _require_close(results[1][0], results[0][0], "the outputs with checkpoints")
    if results[0][1].keys() != results[1][1].keys():
        raise Differs("other parameters get gradients with checkpoints")
    return _shapes(results[0][0])


def _features_only(case: Case) -> Any:
    try:
        dense = case.build(features_only=True)
    except AssertionError:  # timm asks for the last three blocks, and some of our transformers have two
        dense = case.build(features_only=True, out_indices=2)
    model: Any = case.convert(dense).eval()
    return _shapes(model(case.images)), model.feature_info.channels()


def _extractor(case: Case, create: Callable[..., Any]) -> Any:
    wanted = _layers_to_look_at(case)
    extractor = create(case.copy().eval(), {name: str(i) for i, name in enumerate(wanted)})
    seen: dict[str, Tensor] = {}
    handles = [
        case.model.get_submodule(name).register_forward_hook(lambda _, __, output, key=str(i): seen.setdefault(key, output))
        for i, name in enumerate(wanted)
    ]
    try:
        case.model(case.images)
    finally:
        for handle in handles:
            handle.remove()
    found = extractor(case.images)
    _require_close([found[key] for key in sorted(seen)], [seen[key] for key in sorted(seen)], "what was extracted")
    return _shapes(found)


def _extractor_of_torchvision(case: Case) -> Any:
    from torchvision.models.feature_extraction import create_feature_extractor

    return _extractor(case, create_feature_extractor)


def _extractor_of_timm(case: Case) -> Any:
    from timm.models import create_feature_extractor

    return _extractor(case, create_feature_extractor)


def _layers_to_look_at(case: Case) -> list[str]:
    """The first, the middle and the last of the layers that run once."""
    calls: Counter[str] = Counter()
    layers = {name: module for name, module in case.model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))}
    handles = [module.register_forward_hook(lambda *_, key=name: calls.update([key])) for name, module in layers.items()]
    try:
        case.model(case.images)
    finally:
        for handle in handles:
            handle.remove()
    once = [name for name in layers if calls[name] == 1]
    return [once[0], once[len(once) // 2], once[-1]]


def _moving_average(case: Case) -> Any:
    from timm.utils import ModelEmaV3

    model = case.copy()
    average = ModelEmaV3(model, decay=0.9)
    before = {name: one.clone() for name, one in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    average.update(model)
    for name, one in average.module.named_parameters():
        _require_close(one, before[name].lerp(model.get_parameter(name), 0.1), f"the average of {name}")
    return _shapes(average.module.eval()(case.images))


def _layer_decay(case: Case) -> Any:
    from timm.optim import create_optimizer_v2

    optimizer = create_optimizer_v2(case.model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    scales = {id(one): group["lr_scale"] for group in optimizer.param_groups for one in group["params"]}
    missing = [name for name, one in case.model.named_parameters() if one.requires_grad and id(one) not in scales]
    if missing:
        raise Differs(f"{missing[0]} is in no group")
    if ticket_layers(case.model):
        return {name: round(scales[id(layer.scores)], 9) for name, layer in ticket_layers(case.model).items()}
    names = {id(one): name for name, one in case.model.named_parameters()}
    return {names[key].removesuffix(".weight"): round(scale, 9) for key, scale in scales.items() if key in names}


def _data_config(case: Case) -> Any:
    from timm.data import resolve_model_data_config

    return resolve_model_data_config(case.model)


def _pickled(case: Case) -> Any:
    buffer = io.BytesIO()
    torch.save(case.model, buffer)
    buffer.seek(0)
    expected = case.model(case.images)
    for model in (pickle.loads(pickle.dumps(case.model)), torch.load(buffer, weights_only=False)):
        _require_close(model(case.images), expected, "a copy's outputs", 0.0)
    return _shapes(expected)


def _reparameterized(case: Case) -> Any:
    from timm.utils.model import reparameterize_model

    ways = ("fuse", "reparameterize", "switch_to_deploy")
    dense = case.build()
    if not any(hasattr(module, way) for module in dense.modules() for way in ways):
        raise Differs("nothing in this network can be fused")
    fused = reparameterize_model(case.model).eval()
    _require_close(fused(case.images), case.model(case.images), "the outputs afterwards", 1e-3)
    return _shapes(fused(case.images))


BEHAVIOURS: dict[str, Callable[[Case], Any]] = {
    "`forward_features` and `forward_head`": _features_and_head,
    "`forward_intermediates`": _intermediates,
    "`reset_classifier`": _reset_classifier,
    "`set_grad_checkpointing`": _grad_checkpointing,
    "`features_only=True`": _features_only,
    "torchvision's `create_feature_extractor`": _extractor_of_torchvision,
    "timm's `create_feature_extractor`": _extractor_of_timm,
    "`ModelEmaV3`": _moving_average,
    "`layer_decay`": _layer_decay,
    "`resolve_model_data_config`": _data_config,
    "`pickle`, `torch.save`": _pickled,
    "`reparameterize_model`": _reparameterized,
}


# -- one family ------------------------------------------------------------------------------------------------------------


def check_family(name: str, behaviours: Iterable[str] = BEHAVIOURS) -> dict[str, dict[str, Cell]]:
    """Try the behaviours on one network: a cell for each mode and behaviour. Nothing that a behaviour raises gets out."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # timm deprecates some of its own names
        torch.manual_seed(0)
        dense = _dense_case(name)
        tickets = {bits: _ticket_case(dense, bits, prune) for bits, prune in MODES.items()}
        cells: dict[str, dict[str, Cell]] = {bits: {} for bits in MODES}
        for behaviour in behaviours:
            run = BEHAVIOURS[behaviour]
            try:
                expected = run(dense)
            except Exception as error:
                for bits in MODES:
                    cells[bits][behaviour] = Cell(State.LACKING, _sentence(error))
                continue
            for bits, ticket in tickets.items():
                cells[bits][behaviour] = _try(run, ticket, expected)
    gc.collect()
    return cells


def _dense_case(name: str) -> Case:
    def build(**options: Any) -> nn.Module:
        import timm

        size = IMAGE_SIZES.get(name, 64)
        options = {"num_classes": 10} | FAMILIES[name] | options
        sized: dict[str, Any] = {"img_size": size} if size else {}
        try:
            return timm.create_model(name, **options, **sized).eval()
        except TypeError:  # a network that takes any size has no such argument
            return timm.create_model(name, **options).eval()

    model: Any = build()
    size = IMAGE_SIZES.get(name, 64) or model.pretrained_cfg["input_size"][-1]
    return Case(model, torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)), build, lambda one: one)


def _ticket_case(dense: Case, bits: str, prune: float) -> Case:
    def convert(model: nn.Module) -> nn.Module:
        return transform(model, bits=bits, prune=prune, init="keep")

    return Case(convert(dense.model).eval(), dense.images, dense.build, convert)


def _try(run: Callable[[Case], Any], ticket: Case, expected: Any) -> Cell:
    try:
        found = run(ticket)
    except MptifyError as error:
        return Cell(State.REFUSED, _sentence(error))
    except Exception as error:
        return Cell(State.FAILS, _sentence(error))
    if isinstance(expected, dict) and isinstance(found, dict):
        expected = {key: value for key, value in expected.items() if key in found}
    if found != expected:
        return Cell(State.FAILS, f"Differs: gives {_short(found)}, timm {_short(expected)}")
    return Cell(State.WORKS)


def _sentence(error: BaseException) -> str:
    text = first_line(error)
    return text if isinstance(error, MptifyError) else f"{type(error).__name__}: {text}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _shapes(outputs: Any) -> list[list[int]]:
    return [list(one.shape) for one in tensors_in(outputs)]


def _seeded(model: nn.Module, images: Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return model(images)


def _require_close(found: Any, expected: Any, what: str, tolerance: float = 1e-4) -> None:
    ours, theirs = ([one.detach() for one in tensors_in(outputs)] for outputs in (found, expected))
    if [one.shape for one in ours] != [one.shape for one in theirs]:
        raise Differs(f"{what}: shapes {_short(_shapes(ours))} for {_short(_shapes(theirs))}")
    for one, other in zip(ours, theirs, strict=True):
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True):
            raise Differs(f"{what}: other numbers")


# -- the page --------------------------------------------------------------------------------------------------------------

_START = """# Compatibility with timm

What timm does with its networks, tried on the tickets of one network per family in both modes. This page is made by the
program (`python -m mptify.compatibility > docs/compatibility.md`); a test compares it.

A behaviour *works* if the ticket gives what the dense network gives: as many outputs of the same shapes, the same groups of
parameters, and numbers that agree with the ticket's own `forward`. It is *refused* if mptify raises an error that says why.
It counts *as timm* if the dense network lacks it or fails as well.

"""
_SYMBOLS = {State.WORKS: "●", State.LACKING: "·", State.FAILS: "✗"}

Table = dict[str, dict[str, dict[str, Cell]]]  # by family, mode and behaviour


def page(families: Iterable[str] = FAMILIES, told: Callable[[str, dict[str, dict[str, Cell]]], None] | None = None) -> str:
    """The page in Markdown. `told` is called with each family's cells as they come."""
    table: Table = {}
    for name in families:
        table[name] = check_family(name)
        if told is not None:
            told(name, table[name])
    return "".join(_page(table))


def _page(table: Table) -> Iterator[str]:
    yield _START
    yield "## Summary\n\nHow many families of " + str(len(table)) + ":\n\n"
    states = [state for state in State if state is not State.FAILS or _count(table, State.FAILS)]
    yield "| behaviour |" + "".join(f" {bits}: {state.value} |" for bits in MODES for state in states) + "\n"
    yield "| --- |" + " ---: |" * len(MODES) * len(states) + "\n"
    for behaviour in BEHAVIOURS:
        counts = [_count(table, state, bits, behaviour) for bits in MODES for state in states]
        yield f"| {behaviour} |" + "".join(f" {count or '–'} |" for count in counts) + "\n"
    numbers = _numbers(table, State.REFUSED)
    if numbers:
        yield "\n## Why it is refused\n\n"
        for sentence, number in numbers.items():
            yield f"{number}. {sentence}.\n"
    failures = _numbers(table, State.FAILS)
    if failures:
        yield "\n## What fails\n\n" + "".join(f"- {sentence}\n" for sentence in failures)
    for bits in MODES:
        yield f"\n## Families in {bits}\n\n"
        yield "● works · as timm" + (", a number: refused, for the reason of that number above" if numbers else "") + "\n\n"
        yield "| family |" + "".join(f" {behaviour} |" for behaviour in BEHAVIOURS) + "\n"
        yield "| --- |" + " :---: |" * len(BEHAVIOURS) + "\n"
        for name, modes in table.items():
            cells = [modes[bits][behaviour] for behaviour in BEHAVIOURS]
            yield f"| `{name}` |" + "".join(f" {_SYMBOLS.get(cell.state) or numbers[cell.text]} |" for cell in cells) + "\n"


def _cells(table: Table) -> Iterator[tuple[str, str, str, Cell]]:
    for name, modes in table.items():
        for bits, row in modes.items():
            for behaviour, cell in row.items():
                yield name, bits, behaviour, cell


def _count(table: Table, state: State, mode: str | None = None, what: str | None = None) -> int:
    found = ((bits, behaviour) for _, bits, behaviour, cell in _cells(table) if cell.state is state)
    return sum(mode in (None, bits) and what in (None, behaviour) for bits, behaviour in found)


def _numbers(table: Table, state: State) -> dict[str, int]:
    """The distinct sentences of a state, numbered as they come."""
    sentences = dict.fromkeys(cell.text for *_, cell in _cells(table) if cell.state is state)
    return {sentence: number for number, sentence in enumerate(sentences, 1)}


if __name__ == "__main__":

    def tell(name: str, cells: dict[str, dict[str, Cell]]) -> None:
        bad = [
            f"{bits} {behaviour}: {cell.text}"
            for bits, row in cells.items()
            for behaviour, cell in row.items()
            if cell.state in (State.FAILS, State.REFUSED)
        ]
        sys.stderr.write("\n    ".join([name, *bad]) + "\n")

    sys.stdout.write(page(told=tell))
