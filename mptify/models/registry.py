"""The model registry: which names there are, how to build them, and what inputs they take."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mptify import models
from mptify.errors import BadConfig, UnknownModel, first_line

__all__ = [
    "Architecture",
    "Entry",
    "all_entries",
    "build",
    "example_inputs",
    "hub_task",
    "resolve",
    "tensors_in",
    "training_loss",
]

_SOURCES = ("torchvision", "timm", "mptify")


@dataclass(frozen=True)
class Entry:
    """A name in one registry; `shadowed` if the other registry has it too."""

    source: str
    name: str
    shadowed: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"


@functools.cache
def _names(source: str) -> tuple[str, ...]:
    if source == "torchvision":
        import torchvision

        return tuple(torchvision.models.list_models())
    if source == "mptify":
        return tuple(models.BUILDERS)
    import timm

    # Ours are registered there too.
    return tuple(name for name in timm.list_models() if not name.startswith(models.TIMM_PREFIX))


def all_entries() -> list[Entry]:
    """Every model of torchvision and of timm."""
    return [Entry(source, name) for source in ("torchvision", "timm") for name in _names(source)]


@dataclass(frozen=True)
class Architecture:
    """How to build a dense network: its registry, its name there, and the builder's arguments."""

    source: str
    name: str
    arguments: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"


def resolve(text: str) -> Entry:
    """Look up `timm:resnet18`, `torchvision:resnet18`, `mptify:conv4`, or a name without a prefix.

    Without a prefix, torchvision is asked first.

    Raises:
        UnknownModel: There is no such model.
    """
    source, colon, name = text.rpartition(":")
    if colon and source not in _SOURCES:
        names = " or ".join(f"{known}:{name}" for known in _SOURCES)
        raise UnknownModel(f"{text}: {source!r} is not a source of models; write {names}.")
    if not colon and name in _names("torchvision"):  # without importing timm
        return Entry("torchvision", name, shadowed=_timm_defines(name))
    ours = name.removeprefix(models.TIMM_PREFIX)
    if source in ("", "timm") and ours != name and models.is_known(ours):
        return Entry("mptify", ours)
    sources = (source,) if colon else _SOURCES
    # Timm has none of these names, so it need not be imported.
    if "mptify" in sources and models.is_known(name):
        return Entry("mptify", name)
    for one in sources:
        if name in _names(one):
            return Entry(one, name)
    known = {
        other: f"{one}:{other}" if colon else other for one in sources for other in _names(one)
    }
    near = [known[other] for other in difflib.get_close_matches(name, known, n=3, cutoff=0.5)]
    hint = (
        f"the nearest names are {', '.join(near)}"
        if near
        else "`mptify zoo --list` shows all names"
    )
    raise UnknownModel(f"There is no model {text!r}; {hint}.")


def _timm_defines(name: str) -> bool:
    """Whether timm has this name too, read from its source, since importing it takes long."""
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        return False
    folder = Path(spec.submodule_search_locations[0]) / "models"
    return any(f"\ndef {name}(" in path.read_text(encoding="utf-8") for path in folder.glob("*.py"))


def build(
    entry: Entry,
    *,
    num_classes: int | None = None,
    in_chans: int | None = None,
    input_size: int | None = None,
) -> nn.Module:
    """Build a network, with fresh weights on the default device; nothing is downloaded.

    Raises:
        BadConfig: It cannot be built with these arguments.
    """
    for setting, value in {
        "num_classes": num_classes,
        "in_chans": in_chans,
        "input_size": input_size,
    }.items():
        if value is not None and value < 1:
            raise BadConfig(f"{setting}={value}: at least 1 is needed.")
    try:
        if entry.source == "mptify":
            return _build_ours(entry, num_classes, in_chans, input_size)
        if entry.source == "timm":
            return _build_timm(entry, num_classes, in_chans, input_size)
        return _build_torchvision(entry, num_classes, in_chans, input_size)
    except (AssertionError, ValueError) as error:
        if input_size is None:
            raise
        raise BadConfig(
            f"{entry} can't be built for images of {input_size} pixels ({first_line(error)})."
        ) from error


def _build_ours(
    entry: Entry, num_classes: int | None, in_chans: int | None, input_size: int | None
) -> nn.Module:
    given = {"num_classes": num_classes, "in_chans": in_chans, "input_size": input_size}
    return models.build(
        entry.name, **{key: value for key, value in given.items() if value is not None}
    )


def _build_timm(
    entry: Entry, num_classes: int | None, in_chans: int | None, input_size: int | None
) -> nn.Module:
    import timm

    options: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_chans}
    options = {key: value for key, value in options.items() if value is not None}
    if input_size is None:
        return timm.create_model(entry.name, **options)
    try:
        return timm.create_model(entry.name, img_size=input_size, **options)
    except TypeError:  # a network that takes any size has no such argument
        return timm.create_model(entry.name, **options)


def _build_torchvision(
    entry: Entry, num_classes: int | None, in_chans: int | None, input_size: int | None
) -> nn.Module:
    import torchvision

    builder = torchvision.models.get_model_builder(entry.name)
    parameters = inspect.signature(builder).parameters
    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in parameters:
        options["weights_backbone"] = None
    if entry.name.removeprefix("quantized_") in ("googlenet", "inception_v3"):
        options["init_weights"] = (
            False  # theirs takes half a minute, and surgery draws other weights
        )
    if num_classes is not None:
        options["num_classes"] = num_classes
    if input_size is not None and entry.name.startswith("vit_"):
        options["image_size"] = input_size
    if (
        input_size is not None
        and torchvision_kind(entry.name) == "detection"
        and not entry.name.startswith("ssd")
    ):
        options |= {"min_size": input_size, "max_size": 2 * input_size}
    model = builder(**options)
    if in_chans not in (None, 3):
        _widen_input_(model, in_chans)
    return model


def _widen_input_(model: nn.Module, in_chans: int) -> None:
    """Give the first conv another number of input channels, as timm's `in_chans` does."""
    name, first = next(
        (n, m) for n, m in model.named_modules() if isinstance(m, nn.modules.conv._ConvNd)
    )
    keys = ("out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
    fresh = type(first)(
        in_chans, **{key: getattr(first, key) for key in keys}, bias=first.bias is not None
    )
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, fresh)


# -- something to run them on ----------------------------------------------------------------------


def example_inputs(
    entry: Entry, model: nn.Module, size: int | None = None, in_chans: int = 3
) -> tuple[Any, ...]:
    """Inputs for one forward pass on four images, as small as possible or of `size` pixels."""
    generator = torch.Generator().manual_seed(0)

    def images(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if entry.source == "mptify":
        return (images(4, in_chans, size or 32, size or 32),)
    if entry.source == "timm":
        # Networks of other packages may lack it.
        config: Any = getattr(model, "pretrained_cfg", None) or {}
        channels, height, width = config.get("input_size", (3, 224, 224))
        return (images(4, in_chans if in_chans != 3 else channels, size or height, size or width),)
    kind = torchvision_kind(entry.name)
    if kind == "detection":
        sides = (8, 20, 36, 52, 68, 96)  # one for each level of a feature pyramid
        target = {
            "boxes": torch.tensor([[0.0, 0.0, side, side] for side in sides]),
            "labels": torch.ones(len(sides), dtype=torch.int64),
            "masks": torch.ones(len(sides), 96, 96, dtype=torch.uint8),
            "keypoints": torch.full((len(sides), 17, 3), 4.0),
        }
        targets = [dict(target) for _ in range(2)]
        return list(images(2, 3, 96, 96)), targets
    if kind == "optical_flow":
        return images(2, 3, 128, 128), images(2, 3, 128, 128)
    if kind == "video":
        if entry.name.startswith(("mvit", "s3d")):  # these take one size only
            return (images(2, 3, 16, 224, 224),)
        return (images(4, 3, 8, 64, 64),)
    default = 299 if "inception" in entry.name else 224
    return (images(4, in_chans, size or default, size or default),)


def torchvision_kind(name: str) -> str:
    """The task of a torchvision model: classification, detection, segmentation, video, ..."""
    import torchvision

    where = torchvision.models.get_model_builder(name).__module__.split(".")
    parts = ("detection", "segmentation", "video", "optical_flow", "quantization")
    return where[2] if len(where) > 3 and where[2] in parts else "classification"


def hub_task(entry: Entry) -> str | None:
    """The Hub's name of a network's task; it has none for optical flow."""
    if entry.source != "torchvision":
        return "image-classification"
    kind = torchvision_kind(entry.name)
    tasks = {
        "detection": "object-detection",
        "segmentation": "image-segmentation",
        "video": "video-classification",
        "optical_flow": None,
    }
    return tasks.get(kind, "image-classification")


def training_loss(output: Any) -> Tensor:
    """A loss that depends on every output: its product with fixed random values."""
    total: Any = 0.0
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            total = total + (tensor.float() * torch.randn(tensor.shape, generator=generator)).mean()
    return total


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Every tensor in a nested output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for one in output.values():
            yield from tensors_in(one)
    elif isinstance(output, (list, tuple)):
        for one in output:
            yield from tensors_in(one)
