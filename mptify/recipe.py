"""Recipes: everything that a search needs to know, as YAML and as checked settings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mptify.errors import BadSpec
from mptify.spec import TicketSpec, as_tuple, check_spec, checked

__all__ = [
    "DataSpec", "Recipe", "SearchSpec", "find_recipe", "make_recipe", "make_search_spec", "parse_changes", "recipe_folder", "recipe_names",
    "recipe_text", "to_yaml", "with_setting", "with_settings",
]  # fmt: skip

Kind = Literal["scores", "norm", "bias", "other", "dense"]


def _pruned(value: Any) -> Any:
    """A search prunes 80 % unless told otherwise."""
    return {"prune": 0.8, **(value or {})} if value is None or isinstance(value, dict) else value


def _sourced(value: Any) -> Any:
    """`data: digits` says the same as `data: {source: digits}`."""
    return {"source": value} if isinstance(value, str) else value


def _wanted(value: Any) -> Any:
    return {True: {}, False: None}.get(value, value) if isinstance(value, bool) else value


def _no(value: Any) -> Any:
    """YAML reads `precision: no` as false."""
    return "no" if value is False else value


class SearchSpec(BaseModel):
    """How a ticket is searched. `mptify.search` takes these, and a recipe adds a model and data."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: Literal["biprop", "edgepopup", "dense"] = Field(
        "biprop", description="biprop: 1-bit weights; edgepopup: 32-bit frozen weights; dense: the weights themselves are trained."
    )
    ticket: Annotated[TicketSpec, BeforeValidator(_pruned)] = Field({}, validate_default=True, description="The settings of the ticket.")
    epochs: int = Field(10, ge=1, description="Passes over the training data.")
    batch: int = Field(64, ge=2, description="Images per step, over all processes.")
    accumulate: int = Field(1, ge=1, description="Parts that a step's images are run in, one after the other, to save memory.")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("adam", description="What changes the scores.")
    lr: float = Field(
        0.01,
        gt=0,
        description="The largest learning rate. Unless given: 0.01 for Adam, 0.03 in 1/1, 0.1 for SGD; of dense training 0.001 and 0.05.",
    )
    relative: bool = Field(
        True, description="With Adam: count lr in sizes of each layer's first scores, so that all layers move alike; else as it is."
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD; the first beta of Adam.")
    nesterov: bool = Field(False, description="Nesterov's momentum, for SGD.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of the kinds of parameters under `decays`.")
    decays: Annotated[tuple[Kind, ...], BeforeValidator(as_tuple)] = Field(
        ("scores", "dense", "other"), description="Which parameters decay: scores, norm, bias, other, dense."
    )
    schedule: Literal["cosine", "constant"] = Field("cosine", description="What the learning rate does after the warm-up.")
    warmup: float = Field(0.5, ge=0, description="Epochs in which the learning rate rises from 0.")
    prune_ramp: float = Field(0.0, ge=0, description="Epochs in which the pruned fraction rises to its value, along a cubic curve.")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share of a label that is spread over all classes.")
    clip: float | None = Field(None, gt=0, description="Largest norm of the gradient of all parameters; larger ones are scaled down.")
    ema: float | None = Field(None, gt=0, lt=1, description="Decay of a running mean of the scores, which tickets are then cut from.")
    precision: Annotated[Literal["no", "bf16", "fp16"], BeforeValidator(_no)] = Field("no", description="Mixed precision, by Accelerate.")
    compile: bool = Field(False, description="Run the network through torch.compile.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the order of images, of augmentation and of dropout.")
    checkpoint_minutes: float = Field(5.0, gt=0, description="Minutes between checkpoints within an epoch.")
    checkpoint_steps: int | None = Field(None, ge=1, description="Steps between checkpoints within an epoch, instead of minutes.")
    trackers: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        (), description="Accelerate's trackers to log to: tensorboard, wandb, ..."
    )

    @model_validator(mode="before")
    @classmethod
    def _choose_lr(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("lr") is not None:
            return given
        ticket = given.get("ticket")
        bits = ticket.get("bits") if isinstance(ticket, dict) else getattr(ticket, "bits", None)
        if given.get("method") == "dense":
            return given | {"lr": 0.05 if given.get("optimizer") == "sgd" else 0.001}
        if given.get("optimizer") == "sgd":
            return given | {"lr": 0.1}
        return given | {"lr": 0.03 if str(bits).endswith("/1") else 0.01}

    @property
    def spec(self) -> TicketSpec:
        """The ticket's settings, with the method's bits per weight."""
        if self.method != "edgepopup":
            return self.ticket
        return self.ticket.model_copy(update={"bits": f"32/{self.ticket.activation_bits}"})


class DataSpec(BaseModel):
    """Which images, and what happens to them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    source: str = Field(
        "digits",
        description="digits, arrays:FILE.npz, cifar10[:FOLDER], cifar100[:FOLDER], imagefolder:FOLDER, imagenet:FOLDER, timm:NAME:FOLDER.",
    )
    train_images: int | None = Field(
        None, ge=1, description="Use only so many training images: the first ones in memory, any from folders."
    )
    val_images: int | None = Field(None, ge=1, description="Use only so many validation images, chosen likewise.")
    holdout: int | None = Field(
        None,
        ge=1,
        description="Validate on so many training images instead, not trained on then: settings can be chosen without the others.",
    )
    crop: int = Field(0, ge=0, description="Pixels by which images in memory are shifted at random; what comes in at a border is mirrored.")
    flip: bool = Field(False, description="Flip half of the training images.")
    size: int | None = Field(None, ge=8, description="Pixels that images from folders are cropped to; 224 unless given.")
    workers: int = Field(4, ge=0, description="Processes that read images from folders; not more than there are CPUs.")


class Recipe(SearchSpec):
    """A search from nothing: which network, on which data, how."""

    model: str = Field(
        "mptify:conv2", description="The network: mptify:conv4, mptify:conv4_x0.5 (half as wide), timm:resnet18, torchvision:vgg16, ..."
    )
    data: Annotated[DataSpec, BeforeValidator(_sourced)] = Field(
        {}, validate_default=True, description="Which images, and what happens to them."
    )
    baseline: Annotated[dict[str, Any] | None, BeforeValidator(_wanted)] = Field(
        None, description="If given, dense training is run beside the search, with these settings in place of the recipe's."
    )
    start: str | None = Field(None, description="A ticket file to begin with: its survivors, and what else it learned.")
    threads: int | None = Field(
        None,
        ge=1,
        description="Threads of `mptify search`, on which a run's last bits depend; `--threads` counts more. Else torch decides.",
    )
    about: dict[str, Any] = Field(default_factory=dict, description="What the recipe reproduces; nothing depends on it.")


def make_search_spec(settings: SearchSpec | Mapping[str, Any] | None) -> SearchSpec:
    """Check settings of a search once, where they enter."""
    return _consistent(settings if isinstance(settings, SearchSpec) else checked(SearchSpec, settings or {}))


def make_recipe(settings: Mapping[str, Any], origin: str = "") -> Recipe:
    """A checked recipe; errors name `origin`, the file that the settings came from."""
    try:
        recipe = checked(Recipe, settings)
        _consistent(recipe)
        if recipe.baseline is not None:
            unknown = set(recipe.baseline) & {"method", "ticket", "data", "model", "baseline", "start", "threads"}
            if unknown:
                raise BadSpec(f"baseline.{sorted(unknown)[0]}: a baseline shares this with its search.")
            try:
                _consistent(baseline_of(recipe))
            except BadSpec as error:
                raise BadSpec(f"baseline: {error}") from None
    except BadSpec as error:
        raise BadSpec(f"{origin}: {error}" if origin else str(error)) from None
    return recipe


def baseline_of(recipe: Recipe) -> Recipe:
    """The dense training that a search is compared with, at a learning rate that suits weights."""
    changes = {"lr": None, **(recipe.baseline or {}), "method": "dense", "baseline": None, "start": None}
    return checked(Recipe, recipe.model_dump(mode="json") | changes)


def _consistent(spec: SearchSpec) -> Any:
    check_spec(spec.ticket)
    if spec.method == "biprop" and spec.ticket.weight_bits == 32:
        raise BadSpec(f"ticket.bits={spec.ticket.bits!r}: 32-bit weights are edge-popup; set method: edgepopup.")
    if spec.nesterov and (spec.optimizer != "sgd" or not spec.momentum):
        raise BadSpec("nesterov=True: Nesterov's momentum is for optimizer: sgd with a momentum above 0.")
    for key in ("warmup", "prune_ramp"):
        if getattr(spec, key) > spec.epochs:
            raise BadSpec(f"{key}={getattr(spec, key)}: the search has only {spec.epochs} epochs.")
    if spec.compile and spec.prune_ramp:
        raise BadSpec("prune_ramp: with compile, every step of the ramp would be compiled anew; leave one of them out.")
    if spec.accumulate > spec.batch // 2:
        raise BadSpec(f"accumulate={spec.accumulate}: a batch of {spec.batch} can't be run in so many parts of at least 2 images.")
    return spec


# -- files -----------------------------------------------------------------------------------------------------------------


def recipe_folder() -> Path:
    """Where the recipes that come with mptify are."""
    here = Path(__file__).parent
    installed = here / "recipes"
    return installed if installed.is_dir() else here.parent / "recipes"


def recipe_names() -> list[str]:
    """The recipes that come with mptify."""
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def recipe_text(name: str) -> str:
    """A recipe as it is written, comments and all: a file's, or that of one that comes with mptify."""
    path = Path(name)
    if not path.is_file():
        if path.suffix in (".yaml", ".yml") or path.parent != Path():
            raise BadSpec(f"{name}: there is no such file.")
        path = recipe_folder() / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(name, recipe_names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else "`mptify recipes` lists them."
        raise BadSpec(f"There is no recipe {name!r}; {hint}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadSpec(f"{name}: this is no YAML.") from None


def find_recipe(name: str) -> tuple[dict[str, Any], str]:
    """Raw settings from a file, or from a recipe that comes with mptify; and what to call it in errors."""
    text = recipe_text(name)
    try:
        settings = yaml.load(text, _OnceOnly)
    except yaml.YAMLError as error:
        where = f" (line {error.problem_mark.line + 1})" if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark else ""
        raise BadSpec(f"{name}: this is no YAML{where}.") from None
    except BadSpec as error:
        raise BadSpec(f"{name}: {error}") from None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise BadSpec(f"{name}: a recipe is a list of `key: value` lines.")
    return settings, name


class _OnceOnly(yaml.SafeLoader):
    """YAML in which no key comes twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise BadSpec(f"{key} is set twice, the second time in line {node.value[number][0].start_mark.line + 1}.")
        return super().construct_mapping(node, deep)


def with_settings(settings: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Raw settings with `key=value` changes; `ticket.prune=0.9` reaches into a section."""
    changed = dict(settings)
    for key, value in parse_changes(changes).items():
        try:
            changed = with_setting(changed, key, value)
        except BadSpec as error:
            raise BadSpec(f"--set {error}") from None
    return changed


def parse_changes(changes: Iterable[str]) -> dict[str, Any]:
    """`key=value` texts as keys and values."""
    parsed = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise BadSpec(f"--set {change!r}: write key=value, for instance lr=0.05 or ticket.prune=0.9.")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        parsed[key.strip()] = _number(value)
    return parsed


def with_setting(settings: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Raw settings with one changed; what was given stays as it is."""
    changed = dict(settings)
    sections, last = _path(key)
    inside = changed
    for section in sections:
        inner = inside.get(section)
        inner = {"source": inner} if section == "data" and isinstance(inner, str) else inner
        if inner is not None and not isinstance(inner, dict):
            raise BadSpec(f"{key}={value!r}: {section} is no section.")
        inside[section] = dict(inner or {})
        inside = inside[section]
    inside[last] = value
    return changed


def _path(key: str) -> tuple[list[str], str]:
    """The sections that a key lies in, and its name there; layers' names have dots of their own."""
    before, overrides, layer = key.partition(".prune_overrides.")
    if overrides:
        return [*before.split("."), "prune_overrides"], layer
    *sections, last = key.split(".")
    return sections, last


def _number(value: Any) -> Any:
    """YAML takes 1e-4 for text, since it lacks a dot."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def to_yaml(recipe: SearchSpec) -> str:
    """All settings, the default ones too."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
