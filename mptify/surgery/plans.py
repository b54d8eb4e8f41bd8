"""The plan of a surgery, as plain data: what changes, where, and what stays."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import nn

from mptify.config import TicketConfig
from mptify.errors import MptifyError
from mptify.models.registry import Architecture

__all__ = [
    "LayerInput",
    "LeftLayer",
    "NormBefore",
    "Obstacle",
    "Plan",
    "PlannedLayer",
    "Reason",
    "RegionEdits",
    "plan_of",
]


class LayerInput(Enum):
    """What a ticket layer reads."""

    PIXELS = "pixels"
    POOLED = "pooled features"
    REAL = "real values"
    QUANTIZED = "quantized"
    QUANTIZER = "quantizer"
    NORM_QUANTIZER = "BatchNorm → quantizer"
    ROUNDED = "rounded to 8 bits"

    @property
    def is_exempt(self) -> bool:
        """Whether the input stays real with few-bit activations."""
        return self in (LayerInput.PIXELS, LayerInput.POOLED)


class Reason(Enum):
    """Why a weight stays dense; `Obstacle.detail` fills the placeholder."""

    NOT_INCLUDED = "asked: not included"
    EXCLUDED = "asked: excluded"
    FIRST_LAYER = "asked: first layer"
    LAST_LAYER = "asked: last layer"
    DEPTHWISE = "asked: depthwise"
    NOT_REACHED = "not reached by forward()"
    SHARED = "shared with {}, which is not a layer's"
    BIAS_READ = "its bias is read by other code than its own"
    ODD_OPERATION = "its weight goes into {}(), where its input can't be quantized"
    HOOKED = "a hook recomputes its weight"
    TORCHSCRIPT = "TorchScript code can't be rewritten"
    MULTIPLIED = "a parameter that {} multiplies, not a layer"
    RECURRENT = "recurrent layers are not converted"
    UNTRACED_USE = "code that can't be traced uses it"

    @property
    def is_asked(self) -> bool:
        """Whether the settings request it."""
        return self in (
            Reason.NOT_INCLUDED,
            Reason.EXCLUDED,
            Reason.FIRST_LAYER,
            Reason.LAST_LAYER,
            Reason.DEPTHWISE,
        )


@dataclass(frozen=True)
class Obstacle:
    """Why one weight stays dense."""

    reason: Reason
    detail: str = ""
    with_owner: bool = False  # because another weight of its owner does

    def __str__(self) -> str:
        whole = " (its module is converted whole)" if self.with_owner else ""
        return self.reason.value.format(self.detail) + whole


@dataclass(frozen=True)
class PlannedLayer:
    """One weight that becomes a ticket.

    With `scope="global"`, `kept` is an equal share; the scores decide how many each layer keeps.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    kept: int
    in_channels: int
    input: LayerInput = LayerInput.REAL
    owner: str = ""  # of a parameter that is not a layer's: the module that holds it
    functional: bool = False  # its owner passes it to a function itself
    tied_to: str = ""
    depthwise: bool = False
    quantizes_input: bool = False  # itself, since it is called from code that can't be traced
    separate_inputs: tuple[str, ...] = ()  # further arguments that need quantizers of their own
    weight_escapes: bool = False  # code other than the layer's own multiplies by its weight

    @property
    def count(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class LeftLayer:
    """A conv or linear weight that stays dense, and why."""

    name: str
    count: int
    obstacle: Obstacle

    @property
    def reason(self) -> str:
        """Why, as a sentence."""
        return str(self.obstacle)


@dataclass(frozen=True)
class NormBefore:
    """A BatchNorm to insert: over `channels` along `axis`, or over all values if unknown."""

    channels: int | None
    axis: int = 1


@dataclass
class RegionEdits:
    """The changes to one graph of a region, by node name."""

    # Activation -> the norm before the quantizer that replaces it.
    quantizers: dict[str, NormBefore | None] = field(default_factory=dict)
    vanished: list[str] = field(default_factory=list)  # activations after a real-valued shortcut
    # With bn="insert": activation -> norm before it.
    norms: dict[str, NormBefore] = field(default_factory=dict)
    # Value -> norm before the quantizer that its readers read.
    edges: dict[str, NormBefore | None] = field(default_factory=dict)
    # Value -> the layer calls that read it quantized.
    readers: dict[str, list[str]] = field(default_factory=dict)
    pools: dict[str, str] = field(default_factory=dict)  # max-pool -> the conv it moves after
    # Functional call -> the layer that replaces it.
    calls: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any((self.quantizers, self.vanished, self.norms, self.edges, self.pools, self.calls))


@dataclass
class Plan:
    """What `transform` does to a network."""

    config: TicketConfig
    layers: list[PlannedLayer]
    left_dense: list[LeftLayer]
    edits: dict[str, dict[bool, RegionEdits]]  # region path -> training mode -> edits
    untraced: dict[str, str]
    kept_activations: list[str]
    late_quantizers: list[str]
    # Parameters that do not multiply values: positions, tokens.
    tables: tuple[tuple[str, tuple[int, ...]], ...] = ()
    dropped: tuple[str, ...] = ()  # parameters of activations that quantizers replace
    architecture: Architecture | None = None  # the name that the network was built by, if known
    structure: str = ""  # the network's digest, where its name was recognized rather than given
    # Parameters that were frozen, and stay so unless a ticket covers them.
    held: tuple[str, ...] = ()

    @property
    def converted(self) -> int:
        """How many weights are converted; tied weights count once."""
        return sum(layer.count for layer in self.layers if not layer.tied_to)

    @property
    def total(self) -> int:
        """How many conv and linear weights the model has."""
        return self.converted + sum(layer.count for layer in self.left_dense)

    @property
    def warnings(self) -> list[str]:
        """What looks unwise, one sentence each."""
        notes = []
        depthwise = [layer.name for layer in self.layers if layer.depthwise]
        if self.config.activation_bits == 1 and depthwise:
            notes.append(
                f"{len(depthwise)} depthwise layers see 1-bit inputs and few weights per filter, "
                "where accuracy suffers most; "
                "dense='depthwise' leaves them out."
            )
        if self.config.bn == "insert" and self.kept_activations:
            notes.append(
                f"{len(self.kept_activations)} activations lie in code that can't be traced and "
                "got no BatchNorm."
            )
        if self.late_quantizers:
            made_of = "±1" if self.config.activation_bits == 1 else "quantized values"
            notes.append(
                f"{self.late_quantizers[0]} comes after the last layer, so the network's outputs "
                f"are made of {made_of}."
            )
        tiny = [layer.name for layer in self.layers if layer.kept == 1 and layer.count > 1]
        if tiny:
            notes.append(f"{len(tiny)} layers keep a single weight ({tiny[0]}, ...).")
        return notes


def plan_of(model: nn.Module) -> Plan:
    """The plan by which a ticket model was made."""
    plan: Plan | None = getattr(model, "ticket_plan", None)
    if plan is None:
        raise MptifyError("This is not a ticket model; mptify.transform(model) makes one.")
    return plan
