"""What a user can ask for: frozen, validated settings. Code below trusts them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mptify.errors import BadSpec

__all__ = ["TicketSpec", "as_tuple", "check_spec", "checked", "make_spec"]

Settings = TypeVar("Settings", bound=BaseModel)

Fraction = Annotated[float, Field(ge=0, lt=1)]


def as_tuple(value: Any) -> Any:
    """One name says the same as a list of one."""
    return (value,) if isinstance(value, str) else value


Patterns = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]


class TicketSpec(BaseModel):
    """The settings of a ticket. `mptify.transform` takes each of them as a keyword."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits: Literal["1/32", "1/1", "32/32", "32/1"] = Field(
        "1/32", description="Bits per weight / bits per activation. 32-bit weights are edge-popup."
    )
    prune: Fraction = Field(0.5, description="The fraction of weights removed (the paper's P), at least 0 and below 1.")
    prune_overrides: dict[str, Fraction] = Field(
        default_factory=dict,
        description="Other fractions for the layers that a pattern matches; later patterns win.",
    )
    scope: Literal["layer", "global"] = Field("layer", description="Prune each layer by its share, or all by one threshold.")
    floor: Fraction = Field(0.01, description="With scope=global: the share of its weights that every layer keeps at least.")
    score_grad: Literal["biprop", "alpha"] = Field("biprop", description="Scale of the scores' gradient: |W|, or the gain.")
    init: Literal["kaiming_normal", "signed_constant", "keep"] = Field(
        "kaiming_normal", description="Where the frozen weights come from; keep takes the model's own."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the frozen weights and of the first scores.")
    bias: Literal["drop", "learn"] = Field("drop", description="Biases of converted layers: dropped, as in Algorithm 1, or learned.")
    learn_bn: bool = Field(False, description="Learn the norms' weight and bias (the paper's +BN); else they stay at 1 and 0.")
    other: Literal["learn", "freeze"] = Field(
        "learn", description="Parameters that no mask covers: position embeddings, class tokens, layer scale."
    )
    bn: Literal["keep", "insert"] = Field(
        "keep", description="With 32-bit activations: insert puts a BatchNorm before each activation that lacks one."
    )
    residual: Literal["binary", "real"] = Field("binary", description="With 1-bit activations: shortcuts carry ±1, or real values.")
    sign_width: float = Field(1.0, gt=0, allow_inf_nan=False, description="Width t of the estimator behind each sign.")
    include: Patterns = Field((), description="Convert only the layers that one of these patterns matches.")
    exclude: Patterns = Field((), description="Leave the layers dense that one of these patterns matches.")
    dense: Annotated[tuple[Literal["first", "last", "depthwise"], ...], BeforeValidator(as_tuple)] = Field(
        (), description="Kinds of layers to leave dense."
    )
    strict: bool = Field(False, description="Raise where a conv or linear weight could not be converted.")

    @property
    def weight_bits(self) -> int:
        return int(self.bits.split("/")[0])

    @property
    def activation_bits(self) -> int:
        return int(self.bits.split("/")[1])

    def prune_of(self, layer: str) -> float:
        """The fraction removed from the layer of this name."""
        prune = self.prune
        for pattern, override in self.prune_overrides.items():
            if fnmatchcase(layer, pattern):
                prune = override
        return prune


def make_spec(settings: TicketSpec | Mapping[str, Any]) -> TicketSpec:
    """Check settings once, where they enter; raises `BadSpec` with one sentence that names the setting."""
    if isinstance(settings, TicketSpec):
        return settings
    return check_spec(checked(TicketSpec, settings))


def checked(model: type[Settings], settings: Mapping[str, Any]) -> Settings:
    """Settings of any kind, or `BadSpec` with one sentence that names the first wrong one."""
    try:
        return model(**settings)
    except TypeError:  # what ** says of a mapping whose keys are no names
        raise BadSpec(f"Settings have names, and {next(key for key in settings if not isinstance(key, str))!r} is none.") from None
    except ValidationError as error:
        raise BadSpec(_sentence(error, model)) from None


def check_spec(spec: TicketSpec) -> TicketSpec:
    """What no single setting can know of the others."""
    if spec.bn == "insert" and spec.activation_bits == 1:
        raise BadSpec(f"bn='insert' is for 32-bit activations; with bits={spec.bits!r} every sign has its BatchNorm: set bn='keep'.")
    if spec.prune_overrides and spec.scope == "global":
        raise BadSpec("prune_overrides are for scope='layer'; with scope='global' one threshold decides for all layers.")
    return spec


def _settings_of(kind: Any) -> Any:
    """The settings in a section; none if it is no section."""
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else ()


_OTHER_NAMES = {
    "lr": ("learning_rate", "learningrate", "max_lr", "base_lr", "initial_lr", "eta"),
    "batch": ("batch_size", "batchsize", "train_batch_size", "bs", "images_per_step"),
    "epochs": ("epoch", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs"),
    "weight_decay": ("wd", "weight_decay", "l2"),
    "optimizer": ("optim", "opt", "optimiser"),
    "schedule": ("scheduler", "lr_scheduler", "lr_schedule", "sched"),
    "warmup": ("warmup_epochs", "warm_up"),
    "accumulate": ("grad_accum", "gradient_accumulation", "gradient_accumulation_steps", "accumulation_steps"),
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
    """What other programs call so, here or in a section below; empty where nothing is."""
    plain = name.lower().replace("-", "_")
    for ours in [plain, *(ours for ours, others in _OTHER_NAMES.items() if plain in others)]:
        if ours in model.model_fields:
            return [ours]
        inside = [f"{section}.{ours}" for section, field in model.model_fields.items() if ours in _settings_of(field.annotation)]
        if inside:
            return inside[:1]
    return []


def _sentence(error: ValidationError, model: type[BaseModel]) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    for part in path[:-1]:  # into the section that the wrong setting is in
        inner: Any = model.model_fields[part].annotation if part in model.model_fields else None
        if _settings_of(inner):
            model, path = inner, path[1:]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        before = name[: len(name) - len(path[0])]
        inside = [f"{section}.{path[0]}" for section, field in model.model_fields.items() if path[0] in _settings_of(field.annotation)]
        near = inside or _usual_name(path[0], model) or difflib.get_close_matches(path[0], model.model_fields, n=1)
        hint = f"; did you mean {before + near[0]!r}?" if near else f"; the settings there are {', '.join(model.model_fields)}."
        return f"There is no setting {name!r}{hint}"
    if first["type"] == "missing":
        return f"{name} is missing. {model.model_fields[path[0]].description or ''}".strip()
    reason = first["msg"].replace("Input should be", "should be").removeprefix("Value error, ")
    description = model.model_fields[path[0]].description if path and path[0] in model.model_fields else ""
    return f"{name}={first['input']!r}: {reason}." + (f" What it sets: {description}" if description else "")
