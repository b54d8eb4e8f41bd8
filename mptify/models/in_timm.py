"""The networks in timm's registry: `timm.create_model("mptify_conv4")`, whichever of the two packages is imported first.

timm knows only the models that `timm.models.register_model` was called with. Calling it needs timm's import, which takes longer
than everything else here and which most of mptify does without. So where timm is not imported yet, a finder on `sys.meta_path` waits
for it: it finds nothing of its own, lets `timm.models` load as ever, and registers our networks behind it. Nothing here imports
torch, so that `import mptify` stays fast.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mptify.errors import BadSpec

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PREFIX", "offer_to_timm"]

PREFIX = "mptify_"
default_cfgs: dict[str, dict[str, Any]] = {}  # where timm looks for what a model of this file expects of its images

Builder = Callable[..., "nn.Module"]


def offer_to_timm() -> None:
    """Register our networks with timm as `mptify_<name>`: now, or as soon as timm is imported."""
    if hasattr(sys.modules.get("timm.models"), "register_model"):
        _register()
    else:
        sys.meta_path.insert(0, _Waiting())


class _Waiting(importlib.abc.MetaPathFinder):
    """Registers when `timm.models` has been loaded, and is gone then."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "timm.models":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _register()

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    from timm.models import register_model

    from mptify.models import BUILDERS

    for name, builder in BUILDERS.items():
        entrypoint = _entrypoint(PREFIX + name, builder)
        default_cfgs[entrypoint.__name__] = _expected(builder)
        globals()[entrypoint.__name__] = entrypoint  # timm adds the name to this file's `__all__`
        register_model(entrypoint)


def _expected(builder: Builder) -> dict[str, Any]:
    """What timm calls a pretrained_cfg; ours have no weights, but say how images should look."""
    usual = {name: parameter.default for name, parameter in inspect.signature(builder).parameters.items()}
    size = usual["input_size"]
    config: dict[str, Any] = {"url": "", "num_classes": usual["num_classes"], "input_size": (usual["in_chans"], size, size)}
    if size == 32:  # CIFAR-10's colours, and nothing is cut off; else ImageNet's, which are timm's defaults
        config |= {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616), "crop_pct": 1.0}
    return config


def _entrypoint(name: str, builder: Builder) -> Builder:
    def create(pretrained: bool = False, **settings: Any) -> nn.Module:
        from timm.models import build_model_with_cfg

        if pretrained:
            raise BadSpec(f"{name}: there are no pretrained weights of this network; leave pretrained=True away.")
        if settings.get("features_only"):
            raise BadSpec(f"{name}: this network gives logits only; leave features_only=True away.")
        if settings.get("num_classes") == 0:
            raise BadSpec(f"{name}: num_classes=0: at least 1 is needed.")
        return build_model_with_cfg(build, name, False, **settings)

    def build(img_size: int | Sequence[int] | None = None, **settings: Any) -> nn.Module:
        known = inspect.signature(builder).parameters
        if img_size is not None:
            settings["input_size"] = img_size if isinstance(img_size, int) else img_size[-1]
        for key in [key for key in settings if key not in known]:
            if settings.pop(key):  # training scripts pass drop_rate=0.0 to every model
                raise BadSpec(f"{name}: has no setting {key!r}; there are {', '.join(known)}.")
        return builder(**settings)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = builder.__doc__
    return create
