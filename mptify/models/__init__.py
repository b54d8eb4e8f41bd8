"""Networks of the paper that neither torchvision nor timm has."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from mptify.models.conv import conv2, conv4, conv6, conv8
from mptify.models.resnet import resnet18_cifar, resnet20_cifar, resnet56_cifar, wide_resnet34_2
from mptify.models.vgg import vgg_small

__all__ = [
    "BUILDERS", "TIMM_PREFIX", "build", "conv2", "conv4", "conv6", "conv8", "is_known",
    "resnet18_cifar", "resnet20_cifar", "resnet56_cifar", "vgg_small", "wide_resnet34_2",
]  # fmt: skip

TIMM_PREFIX = "mptify_"  # the names of our networks in timm, see `mptify.models.in_timm`
_ALL = (
    conv2,
    conv4,
    conv6,
    conv8,
    vgg_small,
    resnet18_cifar,
    resnet20_cifar,
    resnet56_cifar,
    wide_resnet34_2,
)

BUILDERS: dict[str, Callable[..., nn.Module]] = {builder.__name__: builder for builder in _ALL}


def is_known(name: str) -> bool:
    """Whether `build` knows a name, which may end in a width such as `_x1.25`."""
    base, width = _parts(name)
    return base in BUILDERS and (
        width is None or (_has_width(base) and math.isfinite(width) and 0.01 <= width <= 64)
    )


def build(name: str, **arguments: Any) -> nn.Module:
    """The network of a name, with fresh weights."""
    base, width = _parts(name)
    return BUILDERS[base](**arguments, **({} if width is None else {"width": width}))


def _parts(name: str) -> tuple[str, float | None]:
    found = re.fullmatch(r"(\w+?)(?:_x(\d{1,3}(?:\.\d{1,4})?))?", name, re.ASCII)
    if found is None:
        return name, None
    return found[1], None if found[2] is None else float(found[2])


def _has_width(base: str) -> bool:
    return "width" in inspect.signature(BUILDERS[base]).parameters
