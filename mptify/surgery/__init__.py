"""Trace, plan, rewrite: an ordinary network goes in, a ticket model comes out."""

from __future__ import annotations

from typing import Any

from torch import nn

from mptify.config import TicketConfig, make_config
from mptify.errors import BadConfig
from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.models.recognition import recognize_timm, structure_digest
from mptify.models.registry import Architecture
from mptify.nn.layers import Ticketed, TicketParameter
from mptify.nn.quantizers import check_quantizer
from mptify.surgery import attention  # registers its handler
from mptify.surgery.layer_registry import CompositeHandler, Handler, register
from mptify.surgery.planner import make_plan
from mptify.surgery.plans import Plan
from mptify.surgery.rewrite import rewrite
from mptify.surgery.trace import trace

__all__ = [
    "CompositeHandler",
    "Handler",
    "Plan",
    "attention",
    "plan",
    "register",
    "ticket_layers",
    "transform",
    "with_norms",
]


def transform(
    model: nn.Module | str,
    *,
    num_classes: int | None = None,
    in_chans: int | None = None,
    input_size: int | None = None,
    **settings: Any,
) -> nn.Module:
    """Convert a network into a ticket model, a new module. The network itself does not change.

    Args:
        model: A network, or the name of one: `"resnet18"`, `"timm:vit_tiny_patch16_224"`,
            `"mptify:conv4"`. A name, or that of a timm model, is remembered, so that `mptify.save`
            and `mptify.load` need no more.
        num_classes: The number of classes of a named network.
        in_chans: The number of channels of its images.
        input_size: The size of its square images, in pixels.
        **settings: Fields of [`TicketConfig`][mptify.TicketConfig]: `bits="1/32"`, `prune=0.8`.

    Returns:
        The ticket model.

    Raises:
        BadConfig: A setting is invalid.
        UnknownModel: There is no model of this name.
        NothingToConvert: The network has no weight to convert.
        LeftDense: With `strict=True`, a weight cannot be converted.

    Example:
        ticketed = mptify.transform("resnet18", bits="1/1", prune=0.75)
        mptify.save(ticketed, "resnet18.ticket")
    """
    config = _checked(settings)
    sizes = {"num_classes": num_classes, "in_chans": in_chans, "input_size": input_size}
    network, architecture = _network(
        model, {name: size for name, size in sizes.items() if size is not None}, config
    )
    traced = trace(network)
    made = make_plan(traced, config)
    made.architecture = architecture
    if architecture is None:
        made.architecture = recognize_timm(network)
        made.structure = structure_digest(network) if made.architecture is not None else ""
    return rewrite(traced, made)


def plan(model: nn.Module | str, **settings: Any) -> Plan:
    """Plan a surgery: what [`transform`][mptify.transform] would do, as plain data.

    Args:
        model: A network, or the name of one.
        **settings: Fields of [`TicketConfig`][mptify.TicketConfig].

    Returns:
        The plan, which lists converted layers and, with reasons, what stays dense.

    Raises:
        BadConfig: A setting is invalid.

    Example:
        for left in mptify.plan("vgg11_bn", bits="1/1", dense="first").left_dense:
            print(left.name, left.reason)
    """
    config = _checked(settings)
    return make_plan(trace(_network(model, {}, config)[0]), config)


def _checked(settings: dict[str, Any]) -> TicketConfig:
    config = make_config(settings)
    if config.quantizes_activations:
        check_quantizer(config.quantizer, config.activation_bits, config.sign_width)
    return config


def _network(
    model: nn.Module | str, sizes: dict[str, int], config: TicketConfig
) -> tuple[nn.Module, Architecture | None]:
    """The network of a name, drawn from the config's seed, or the given network."""
    if isinstance(model, str):
        entry = registry.resolve(model)
        with InitMode("drawn", config.seed):
            return registry.build(entry, **sizes), Architecture(entry.source, entry.name, sizes)
    if sizes:
        raise BadConfig(
            f"{next(iter(sizes))}: is for a network that is built by its name; build yours with it."
        )
    return model, None


def with_norms(model: nn.Module) -> nn.Module:
    """The dense network with a BatchNorm before each activation that lacks one."""
    config = make_config(
        {
            "bits": "32/32",
            "prune": 0,
            "init": "keep",
            "bias": "learn",
            "learn_bn": True,
            "bn": "insert",
            "exclude": "*",
        }
    )
    traced = trace(model)
    return rewrite(traced, make_plan(traced, config, needs_layers=False))


def ticket_layers(model: nn.Module) -> dict[str, Any]:
    """The ticket layers of a model, by name.

    Each has `scores`, `mask`, `gain`, `sign` and `ticket_weight()`.
    """
    return {
        name.removesuffix("_ticket") if isinstance(module, TicketParameter) else name: module
        for name, module in model.named_modules()
        if isinstance(module, Ticketed)
    }
