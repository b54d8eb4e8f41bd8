"""Settings: everything a user can set, validated once, where it enters."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from mptify.errors import BadConfig
from mptify.registry import init_schemes, methods, quantizers, scopes

__all__ = [
    "DataConfig",
    "Recipe",
    "SearchConfig",
    "TicketConfig",
    "as_tuple",
    "baseline_of",
    "check_config",
    "checked",
    "make_config",
    "make_recipe",
    "make_search_config",
]  # fmt: skip

Settings = TypeVar("Settings", bound=BaseModel)

Fraction = Annotated[float, Field(ge=0, lt=1)]


def as_tuple(value: Any) -> Any:
    """Accept one name for a list of one."""
    return (value,) if isinstance(value, str) else value


Patterns = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Kind = Literal["scores", "norm", "bias", "clip", "other", "dense"]


def _known_scope(name: str) -> str:
    scopes[name]
    return name


def _known_init(name: str) -> str:
    if name != "keep":
        init_schemes[name]
    return name


def _known_quantizer(name: str) -> str:
    quantizers[name]
    return name


def _known_method(name: str) -> str:
    methods[name]
    return name


def bits_of(bits: Any) -> tuple[int, int]:
    """Bits per weight and per activation of `"1/4"`; zeros for anything else."""
    weight, _, activation = str(bits).partition("/")
    known = weight.isdigit() and activation.isdigit()
    return (int(weight), int(activation)) if known else (0, 0)


class TicketConfig(BaseModel):
    """The settings of a ticket. `mptify.transform` takes them as keywords."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits: Literal["1/32", "1/8", "1/4", "1/2", "1/1", "32/32", "32/8", "32/4", "32/2", "32/1"] = (
        Field(
            "1/32",
            description="Bits per weight / bits per activation. 32-bit weights are edge-popup.",
        )
    )
    prune: Fraction = Field(
        0.8, description="The fraction of weights removed (the paper's P), at least 0 and below 1."
    )
    prune_overrides: dict[str, Fraction] = Field(
        default_factory=dict,
        description="Other fractions for the layers that a pattern matches; later patterns win.",
    )
    scope: Annotated[str, AfterValidator(_known_scope)] = Field(
        "layer",
        description="How weights compete: within each layer (layer), by one threshold (global), "
        "or by a registered scope.",
    )
    floor: Fraction = Field(
        0.01, description="With scope=global: the smallest share of its weights that a layer keeps."
    )
    score_grad: Literal["biprop", "alpha"] = Field(
        "biprop", description="Scale of the score gradient: |W| (biprop) or the gain (alpha)."
    )
    init: Annotated[str, AfterValidator(_known_init)] = Field(
        "kaiming_normal",
        description="Magnitudes of the frozen weights: kaiming_normal, signed_constant or a "
        "registered scheme; keep uses the model's weights.",
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of the frozen weights and of the initial scores."
    )
    bias: Literal["drop", "learn"] = Field(
        "drop", description="Biases of converted layers: drop (as in Algorithm 1) or learn."
    )
    learn_bn: bool = Field(
        False,
        description="Learn weight and bias of norms (the paper's +BN); otherwise they stay 1 and "
        "0.",
    )
    other: Literal["learn", "freeze"] = Field(
        "learn",
        description="Whether to learn parameters that no mask covers: position embeddings, class "
        "tokens, layer scale.",
    )
    bn: Literal["keep", "insert"] = Field(
        "keep",
        description="With 8- and 32-bit activations: insert adds a BatchNorm before each "
        "activation that lacks one.",
    )
    residual: Literal["binary", "real"] = Field(
        "binary",
        description="With at most 4-bit activations: whether shortcuts carry quantized (binary) or "
        "real values.",
    )
    quantizer: Annotated[str, AfterValidator(_known_quantizer)] = Field(
        "sign",
        description="With at most 4-bit activations: the registered quantizer. By default sign for "
        "1 bit, uniform for 2 and 4.",
    )
    learn_clip: bool = Field(
        False, description="With 2- and 4-bit activations: learn the range of each quantizer."
    )
    sign_width: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="Width t of the sign's estimator."
    )
    include: Patterns = Field(
        (), description="Convert only layers that match one of these patterns."
    )
    exclude: Patterns = Field(
        (), description="Leave layers dense that match one of these patterns."
    )
    dense: Annotated[
        tuple[Literal["first", "last", "depthwise"], ...], BeforeValidator(as_tuple)
    ] = Field((), description="Kinds of layers to leave dense.")
    strict: bool = Field(False, description="Raise if a conv or linear weight cannot be converted.")

    @model_validator(mode="before")
    @classmethod
    def _follow_bits(cls, given: Any) -> Any:
        """Fill in the quantizer of these bits."""
        if isinstance(given, dict) and given.get("quantizer") is None:
            bits = given.get("bits", cls.model_fields["bits"].default)
            given = given | {"quantizer": "uniform" if bits_of(bits)[1] in (2, 4) else "sign"}
        return given

    @property
    def weight_bits(self) -> int:
        return bits_of(self.bits)[0]

    @property
    def activation_bits(self) -> int:
        return bits_of(self.bits)[1]

    @property
    def quantizes_activations(self) -> bool:
        """Whether quantizers replace activations, so that the graph's edges change."""
        return self.activation_bits <= 4

    def prune_of(self, layer: str) -> float:
        """The fraction removed from the layer of this name."""
        prune = self.prune
        for pattern, override in self.prune_overrides.items():
            if fnmatchcase(layer, pattern):
                prune = override
        return prune


def _method_of(settings: Any) -> Any:
    """The search method that unchecked settings name, or None."""
    if not isinstance(settings, dict):
        return None
    name = settings.get("method", SearchConfig.model_fields["method"].default)
    try:
        return methods[name]
    except (BadConfig, TypeError):  # the check of the field reports it
        return None


def _with_weight_bits(ticket: Any, weight_bits: int) -> Any:
    """The settings of a ticket, checked or not, with other bits per weight."""
    if isinstance(ticket, TicketConfig):
        return ticket.model_copy(update={"bits": f"{weight_bits}/{ticket.activation_bits}"})
    bits = (
        (ticket or {}).get("bits", TicketConfig.model_fields["bits"].default)
        if isinstance(ticket, dict | None)
        else None
    )
    activation_bits = bits.partition("/")[2] if isinstance(bits, str) else ""
    return (
        {**(ticket or {}), "bits": f"{weight_bits}/{activation_bits}"}
        if activation_bits
        else ticket
    )


def _default_if_none(value: Any) -> Any:
    """Read an empty section in YAML, which is None, as the defaults."""
    return {} if value is None else value


def _sourced(value: Any) -> Any:
    """Accept `data: digits` for `data: {source: digits}`."""
    return {"source": value} if isinstance(value, str) else value


def _wanted(value: Any) -> Any:
    return {True: {}, False: None}.get(value, value) if isinstance(value, bool) else value


def _no(value: Any) -> Any:
    """Read `precision: no`, which YAML takes for false."""
    return "no" if value is False else value


class SearchConfig(BaseModel):
    """The settings of a search. `mptify.search` takes them; a recipe adds a model and data."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: Annotated[str, AfterValidator(_known_method)] = Field(
        "biprop",
        description="biprop: 1-bit weights; edgepopup: 32-bit frozen weights; dense: trains the "
        "weights themselves; or a registered method.",
    )
    ticket: Annotated[TicketConfig, BeforeValidator(_default_if_none)] = Field(
        {}, validate_default=True, description="The settings of the ticket."
    )
    epochs: int = Field(10, ge=1, description="Passes over the training data.")
    batch: int = Field(64, ge=2, description="Images per step, over all processes.")
    accumulate: int = Field(
        1, ge=1, description="Split each batch into this many parts, to save memory."
    )
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "adam", description="The optimizer of the scores."
    )
    lr: float = Field(
        0.01,
        gt=0,
        description="The peak learning rate. By default 0.01 for Adam, 0.03 in 1/1, 0.1 for SGD; "
        "for dense training 0.001 and 0.05.",
    )
    relative: bool = Field(
        True,
        description="With Adam: multiply lr by the size of each layer's initial scores, so that "
        "all layers move alike.",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD; the first beta of Adam.")
    nesterov: bool = Field(False, description="Nesterov's momentum, for SGD.")
    weight_decay: float = Field(
        0.0, ge=0, description="Weight decay of the parameters that `decays` names."
    )
    decays: Annotated[tuple[Kind, ...], BeforeValidator(as_tuple)] = Field(
        ("scores", "dense", "other"),
        description="Kinds of parameters that decay: scores, norm, bias, clip, other, dense.",
    )
    schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="Learning rate schedule after the warm-up."
    )
    warmup: float = Field(0.5, ge=0, description="Epochs of linear warm-up from 0.")
    prune_ramp: float = Field(
        0.0,
        ge=0,
        description="Epochs in which the pruned fraction rises to its value, along a cubic curve.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Label smoothing: the share of a label that is spread over all classes.",
    )
    clip: float | None = Field(
        None, gt=0, description="Clip the norm of the gradient of all parameters to this value."
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay of a running mean of the scores, from which tickets are taken.",
    )
    precision: Annotated[Literal["no", "bf16", "fp16"], BeforeValidator(_no)] = Field(
        "no", description="Mixed precision, by Accelerate."
    )
    compile: bool = Field(False, description="Compile the network with torch.compile.")
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Seed of the order of images, of augmentation and of dropout.",
    )
    checkpoint_minutes: float = Field(
        5.0, gt=0, description="Minutes between checkpoints within an epoch."
    )
    checkpoint_steps: int | None = Field(
        None, ge=1, description="Steps between checkpoints within an epoch, instead of minutes."
    )
    trackers: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        (), description="Accelerate's trackers to log to: tensorboard, wandb, ..."
    )

    @model_validator(mode="before")
    @classmethod
    def _follow_method(cls, given: Any) -> Any:
        """Fill in what depends on the method: the bits of the weights, and the learning rate."""
        method = _method_of(given)
        if method is None:
            return given
        if method.weight_bits not in (None, 1):
            given = given | {"ticket": _with_weight_bits(given.get("ticket"), method.weight_bits)}
        if given.get("lr") is None:
            ticket = given.get("ticket")
            bits = ticket.get("bits") if isinstance(ticket, dict) else getattr(ticket, "bits", None)
            optimizer = given.get("optimizer", cls.model_fields["optimizer"].default)
            given = given | {"lr": method.default_lr(optimizer, bits_of(bits)[1])}
        return given

    @property
    def trains_weights(self) -> bool:
        """Whether the method trains weights, so that no ticket comes out."""
        return methods[self.method].trains_weights


class DataConfig(BaseModel):
    """Which images, and how they are augmented."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    source: str = Field(
        "digits",
        description="digits, arrays:FILE.npz, cifar10[:FOLDER], cifar100[:FOLDER], "
        "imagefolder:FOLDER, imagenet:FOLDER, timm:NAME:FOLDER.",
    )
    train_images: int | None = Field(
        None,
        ge=1,
        description="Use only this many training images: the first in memory, random ones from "
        "folders.",
    )
    val_images: int | None = Field(
        None, ge=1, description="Use only this many validation images, selected likewise."
    )
    holdout: int | None = Field(
        None,
        ge=1,
        description="Validate on this many held-out training images instead, to choose settings "
        "without the validation images.",
    )
    crop: int = Field(
        0,
        ge=0,
        description="Shift images in memory by up to this many pixels at random, with mirrored "
        "borders.",
    )
    flip: bool = Field(False, description="Flip half of the training images horizontally.")
    size: int | None = Field(
        None, ge=8, description="Crop images from folders to this many pixels; 224 by default."
    )
    workers: int = Field(
        4, ge=0, description="Processes that read images from folders, at most the number of CPUs."
    )


class Recipe(SearchConfig):
    """The settings of a whole run: a search with its network and data."""

    model: str = Field(
        "mptify:conv2",
        description="The network: mptify:conv4, mptify:conv4_x0.5 (half as wide), timm:resnet18, "
        "torchvision:vgg16, ...",
    )
    data: Annotated[DataConfig, BeforeValidator(_sourced)] = Field(
        {}, validate_default=True, description="Which images, and how they are augmented."
    )
    baseline: Annotated[dict[str, Any] | None, BeforeValidator(_wanted)] = Field(
        None,
        description="Also train the dense network, with these settings in place of the recipe's.",
    )
    start: str | None = Field(
        None, description="A ticket file to start from: its survivors and learned parameters."
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="Threads of the search, on which the last bits of its results depend; by "
        "default as many as torch uses.",
    )
    about: dict[str, Any] = Field(
        default_factory=dict, description="What the recipe reproduces; nothing depends on it."
    )


# -- checks ----------------------------------------------------------------------------------------


def make_config(settings: TicketConfig | Mapping[str, Any]) -> TicketConfig:
    """Check the settings of a ticket.

    Raises:
        BadConfig: A setting is invalid; one sentence names it.
    """
    if isinstance(settings, TicketConfig):
        return settings
    return check_config(checked(TicketConfig, settings))


def checked(model: type[Settings], settings: Mapping[str, Any]) -> Settings:
    """Check settings of any kind.

    Raises:
        BadConfig: A setting is invalid; one sentence names the first.
    """
    try:
        return model(**settings)
    except TypeError:  # a key is not a string
        raise BadConfig(
            "The names of settings are strings, and "
            f"{next(key for key in settings if not isinstance(key, str))!r} is not."
        ) from None
    except ValidationError as error:
        raise BadConfig(_sentence(error, model)) from None


def check_config(config: TicketConfig) -> TicketConfig:
    """Check combinations of settings."""
    if config.bn == "insert" and config.quantizes_activations:
        raise BadConfig(
            f"bn='insert' is for 8- and 32-bit activations; with bits={config.bits!r} every "
            "quantizer has its BatchNorm: set bn='keep'."
        )
    if config.learn_clip and config.activation_bits not in (2, 4):
        raise BadConfig(
            f"learn_clip=True is for 2- and 4-bit activations; with bits={config.bits!r} there is "
            "no range to learn."
        )
    if config.prune_overrides and config.scope != "layer":
        raise BadConfig(
            f"prune_overrides are for scope='layer'; with scope={config.scope!r} all layers share "
            "one budget."
        )
    return config


def make_search_config(settings: SearchConfig | Mapping[str, Any] | None) -> SearchConfig:
    """Check the settings of a search."""
    return _consistent(
        settings if isinstance(settings, SearchConfig) else checked(SearchConfig, settings or {})
    )


def make_recipe(settings: Mapping[str, Any], origin: str = "") -> Recipe:
    """Check a recipe; errors name `origin`, the file of the settings."""
    try:
        recipe = checked(Recipe, settings)
        _consistent(recipe)
        if recipe.baseline is not None:
            unknown = set(recipe.baseline) & {
                "method",
                "ticket",
                "data",
                "model",
                "baseline",
                "start",
                "threads",
            }
            if unknown:
                raise BadConfig(
                    f"baseline.{sorted(unknown)[0]}: a baseline shares this with its search."
                )
            try:
                _consistent(baseline_of(recipe))
            except BadConfig as error:
                raise BadConfig(f"baseline: {error}") from None
    except BadConfig as error:
        raise BadConfig(f"{origin}: {error}" if origin else str(error)) from None
    return recipe


def baseline_of(recipe: Recipe) -> Recipe:
    """The recipe of the dense baseline, with a learning rate for weights."""
    changes = {
        "lr": None,
        **(recipe.baseline or {}),
        "method": "dense",
        "baseline": None,
        "start": None,
    }
    return checked(Recipe, recipe.model_dump(mode="json") | changes)


def _consistent(config: SearchConfig) -> Any:
    check_config(config.ticket)
    if methods[config.method].weight_bits == 1 and config.ticket.weight_bits == 32:
        raise BadConfig(
            f"ticket.bits={config.ticket.bits!r}: 32-bit weights are edge-popup; set method: "
            "edgepopup."
        )
    if config.nesterov and (config.optimizer != "sgd" or not config.momentum):
        raise BadConfig(
            "nesterov=True: Nesterov's momentum is for optimizer: sgd with a momentum above 0."
        )
    for key in ("warmup", "prune_ramp"):
        if getattr(config, key) > config.epochs:
            raise BadConfig(
                f"{key}={getattr(config, key)}: the search has only {config.epochs} epochs."
            )
    if config.compile and config.prune_ramp:
        raise BadConfig(
            "prune_ramp: with compile, every step of the ramp would be compiled again; leave one "
            "of them out."
        )
    if config.accumulate > config.batch // 2:
        raise BadConfig(
            f"accumulate={config.accumulate}: a batch of {config.batch} can't be split into so "
            "many parts of at least 2 images."
        )
    return config


# -- messages --------------------------------------------------------------------------------------


def _settings_of(kind: Any) -> Any:
    """The settings of a section; empty if it is not a section."""
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else ()


_OTHER_NAMES = {
    "lr": ("learning_rate", "learningrate", "max_lr", "base_lr", "initial_lr", "eta"),
    "batch": ("batch_size", "batchsize", "train_batch_size", "bs", "images_per_step"),
    "epochs": ("epoch", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs"),
    "weight_decay": ("wd", "weight_decay", "l2"),
    "optimizer": ("optim", "opt", "optimiser"),
    "schedule": ("scheduler", "lr_scheduler", "lr_schedule", "sched"),
    "warmup": ("warmup_epochs", "warm_up"),
    "accumulate": (
        "grad_accum",
        "gradient_accumulation",
        "gradient_accumulation_steps",
        "accumulation_steps",
    ),
    "clip": ("grad_clip", "clip_grad", "max_grad_norm", "gradient_clip", "gradient_clip_val"),
    "label_smoothing": ("smoothing",),
    "precision": ("amp", "mixed_precision", "fp16", "bf16"),
    "momentum": ("beta1",),
    "ema": ("ema_decay", "model_ema"),
    "model": ("network", "arch", "architecture", "backbone"),
    "data": ("dataset",),
    "source": ("path", "root", "folder", "dataset"),
    "workers": ("num_workers", "n_workers"),
    "size": ("image_size", "img_size", "input_size", "resolution"),
    "prune": ("prune_rate", "pruning_rate", "prune_ratio", "pruning", "sparsity", "prune_fraction"),
    "bits": ("precision_bits", "bit", "quantization", "weight_bits", "activation_bits"),
    "exclude": ("ignore", "skip"),
    "seed": ("random_seed", "random_state", "manual_seed"),
    "learn_bn": ("learn_norm", "train_bn", "bn_learn"),
    "threads": ("num_threads",),
}


def _usual_name(name: str, model: type[BaseModel]) -> list[str]:
    """Our name for a setting that other programs call `name`, if there is one."""
    plain = name.lower().replace("-", "_")
    for ours in [plain, *(ours for ours, others in _OTHER_NAMES.items() if plain in others)]:
        if ours in model.model_fields:
            return [ours]
        inside = [
            f"{section}.{ours}"
            for section, field in model.model_fields.items()
            if ours in _settings_of(field.annotation)
        ]
        if inside:
            return inside[:1]
    return []


def _sentence(error: ValidationError, model: type[BaseModel]) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    for part in path[:-1]:  # descend into the section of the invalid setting
        inner: Any = model.model_fields[part].annotation if part in model.model_fields else None
        if _settings_of(inner):
            model, path = inner, path[1:]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        before = name[: len(name) - len(path[0])]
        inside = [
            f"{section}.{path[0]}"
            for section, field in model.model_fields.items()
            if path[0] in _settings_of(field.annotation)
        ]
        near = (
            inside
            or _usual_name(path[0], model)
            or difflib.get_close_matches(path[0], model.model_fields, n=1)
        )
        hint = (
            f"; did you mean {before + near[0]!r}?"
            if near
            else f"; the settings there are {', '.join(model.model_fields)}."
        )
        return f"There is no setting {name!r}{hint}"
    if first["type"] == "missing":
        return f"{name} is missing. {model.model_fields[path[0]].description or ''}".strip()
    reason = first["msg"].replace("Input should be", "should be").removeprefix("Value error, ")
    description = (
        model.model_fields[path[0]].description if path and path[0] in model.model_fields else ""
    )
    reason = reason if reason.endswith(("?", ".")) else f"{reason}."
    return f"{name}={first['input']!r}: {reason}" + (
        f" What it sets: {description}" if description else ""
    )
