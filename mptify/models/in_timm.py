"""Register our networks with timm: `import mptify.models.in_timm`, then use `create_model`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from timm.models import build_model_with_cfg, register_model
from torch import nn

from mptify.errors import BadConfig
from mptify.models import BUILDERS, TIMM_PREFIX

# Timm reads here what a model of this module expects of its images.
default_cfgs: dict[str, dict[str, Any]] = {}

Builder = Callable[..., nn.Module]


def _register() -> None:
    for name, builder in BUILDERS.items():
        entrypoint = _entrypoint(TIMM_PREFIX + name, builder)
        default_cfgs[entrypoint.__name__] = _expected(builder)
        globals()[entrypoint.__name__] = entrypoint  # timm adds the name to this module's `__all__`
        register_model(entrypoint)


def _expected(builder: Builder) -> dict[str, Any]:
    """The `pretrained_cfg` of a network: no weights, but how its images should look."""
    usual = {
        name: parameter.default for name, parameter in inspect.signature(builder).parameters.items()
    }
    size = usual["input_size"]
    config: dict[str, Any] = {
        "url": "",
        "num_classes": usual["num_classes"],
        "input_size": (usual["in_chans"], size, size),
    }
    if size == 32:  # CIFAR-10's statistics without a crop, or timm's defaults for ImageNet
        config |= {
            "mean": (0.4914, 0.4822, 0.4465),
            "std": (0.2470, 0.2435, 0.2616),
            "crop_pct": 1.0,
        }
    return config


def _entrypoint(name: str, builder: Builder) -> Builder:
    def create(pretrained: bool = False, **settings: Any) -> nn.Module:
        if pretrained:
            raise BadConfig(
                f"{name}: there are no pretrained weights of this network; omit pretrained=True."
            )
        if settings.get("features_only"):
            raise BadConfig(f"{name}: this network gives logits only; omit features_only=True.")
        if settings.get("num_classes") == 0:
            raise BadConfig(f"{name}: num_classes=0: at least 1 is needed.")
        return build_model_with_cfg(build, name, False, **settings)

    def build(img_size: int | Sequence[int] | None = None, **settings: Any) -> nn.Module:
        known = inspect.signature(builder).parameters
        if img_size is not None:
            settings["input_size"] = img_size if isinstance(img_size, int) else img_size[-1]
        for key in [key for key in settings if key not in known]:
            if settings.pop(key):  # training scripts pass drop_rate=0.0 to every model
                raise BadConfig(f"{name}: has no setting {key!r}; there are {', '.join(known)}.")
        return builder(**settings)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = builder.__doc__
    return create


_register()
