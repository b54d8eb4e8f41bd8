"""Recognize a network that timm has built, so that its name can be remembered."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from mptify.models.registry import Architecture

__all__ = ["recognize_timm", "structure_digest"]


def recognize_timm(model: nn.Module) -> Architecture | None:
    """The name and arguments by which timm seems to have built a network; None for other networks.

    The network may have been built with further arguments. Compare its `structure_digest` with that
    of the network that the name builds.
    """
    config: Any = getattr(model, "pretrained_cfg", None)
    name = config.get("architecture") if hasattr(config, "get") else None
    if not isinstance(name, str) or not type(model).__module__.startswith("timm."):
        return None
    arguments: dict[str, int] = {}
    classes = getattr(model, "num_classes", None)
    if isinstance(classes, int) and classes > 0 and classes != config.get("num_classes"):
        arguments["num_classes"] = classes
    channels = _input_channels(model, config.get("first_conv"))
    if channels not in (None, config.get("input_size", (3,))[0]):
        arguments["in_chans"] = channels
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if (
        isinstance(size, tuple)
        and size != tuple(config.get("input_size", ())[1:])
        and size[0] == size[-1]
    ):
        arguments["input_size"] = size[0]
    return Architecture("timm", name, arguments)


def _input_channels(model: nn.Module, first: Any) -> Any:
    if not isinstance(first, str):
        return None
    try:
        return getattr(model.get_submodule(first), "in_channels", None)
    except AttributeError:
        return None


def structure_digest(model: nn.Module) -> str:
    """SHA-256 of a network's modules: their names, classes, plain attributes and tensor shapes.

    Two networks of the same digest compute the same function of their weights, as far as it does
    not depend on attributes that are objects themselves.
    """
    whole = hashlib.sha256()
    for name, module in model.named_modules():
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        stores = (module._parameters, module._buffers)
        tensors = {key: one for store in stores for key, one in store.items() if one is not None}
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        plain = {key: value for key, value in vars(module).items() if _is_plain(key, value)}
        whole.update(f"{name} {kind} {sorted(shapes.items())} {sorted(plain.items())}\n".encode())
    return whole.hexdigest()


def _is_plain(key: str, value: Any) -> bool:
    if key == "training" or key.startswith("_"):
        return False
    if isinstance(value, (tuple, list)):
        return all(_is_plain("", one) for one in value)
    return value is None or isinstance(value, (bool, int, float, str))
