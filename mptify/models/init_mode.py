"""Build networks without their usual initialization, in this thread alone.

A builder draws weights from torch's global generator. Where a file or the surgery brings other
weights, this wastes time and disturbs other users of the generator. `InitMode` is a torch function
mode, which torch applies to the thread that entered it. It patches nothing.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["InitMode"]

_LARGE = 1 << 16  # the number of weights from which drawing them takes noticeable time
_DRAWS = {
    "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson",
    "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_",
    "geometric_",
}  # fmt: skip
_DRAWS_LIKE = {"rand_like": torch.rand, "randn_like": torch.randn}
_VIEWS = {
    "data",
    "detach",
    "view",
    "view_as",
    "reshape",
    "flatten",
    "t",
    "transpose",
    "permute",
    "unsqueeze",
    "squeeze",
    "__getitem__",
}
_LOOKS = {
    "shape", "size", "dim", "ndim", "numel", "dtype", "device", "layout", "stride", "requires_grad",
    "requires_grad_", "grad", "grad_fn", "is_leaf", "is_meta", "is_cuda", "is_sparse",
    "is_floating_point", "is_complex", "is_contiguous", "element_size", "storage_offset", "__len__",
    "__hash__", "__repr__", "new_empty", "new_zeros", "new_ones", "new_full", "empty_like",
    "zeros_like", "ones_like", "full_like", "_base", "_version", "nelement", "__deepcopy__", "type",
    "is_quantized", "is_nested", "names", "register_hook", "data_ptr",
}  # fmt: skip


class InitMode(TorchFunctionMode):
    """Inside this context, builders draw from the mode's own generator, in float32.

    Args:
        weights: How parameters are initialized. `"drawn"`: as the builder says. `"constant"`: large
            ones are 0.01 where the builder would draw them. `"blank"`: not at all.
        seed: The seed of the generator.

    Attributes:
        read_blank: Whether the builder has computed with a blank parameter, so that the network
            must not be used.
    """

    def __init__(self, weights: Literal["drawn", "constant", "blank"] = "drawn", seed: int = 0):
        super().__init__()
        self.weights = weights
        self.read_blank = False
        self._generator = torch.Generator().manual_seed(seed)
        # Of parameters; held, so that no other tensor can get their ids.
        self._views: dict[int, Tensor] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = _name(function)
        target = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
        of_parameter = target is not None and self._is_parameter(target)
        if target is not None and of_parameter and _writes(name):
            if self.weights == "blank":
                self.read_blank |= any(
                    self._is_parameter(one) for one in _tensors(args, kwargs) if one is not target
                )
                return target if name != "__setitem__" else None
            if (
                self.weights == "constant"
                and (name in _DRAWS or _is_initializer(function))
                and target.numel() >= _LARGE
            ):
                with torch.no_grad():
                    return target.fill_(0.01)
        if self.weights == "blank" and name not in _VIEWS | _LOOKS:
            self.read_blank |= any(self._is_parameter(one) for one in _tensors(args, kwargs))
        result = self._run(function, name, args, kwargs)
        if of_parameter and name in _VIEWS and isinstance(result, Tensor):
            self._views[id(result)] = result
        return result

    def _is_parameter(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or id(tensor) in self._views

    def _run(self, function: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if name in _DRAWS_LIKE:
            like, rest = args[0], {"dtype": args[0].dtype, "device": args[0].device} | kwargs
            function, args, kwargs = _DRAWS_LIKE[name], (like.shape,), rest
            name = function.__name__
        if (
            (name in _DRAWS or _is_initializer(function))
            and kwargs.get("generator") is None
            and _on_cpu(args, kwargs)
        ):
            kwargs["generator"] = self._generator
        result = function(*args, **kwargs)
        return self._as_float32(result, args, kwargs)

    def _as_float32(self, result: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The dtype of new tensors for which the caller asks for none."""
        default = torch.get_default_dtype()
        if (
            default == torch.float32
            or not isinstance(result, Tensor)
            or result.dtype != default
            or kwargs.get("dtype") is not None
        ):
            return result
        if any(one.dtype == default for one in _tensors(args, kwargs)) or default in args:
            return result
        return result.to(torch.float32)


def _name(function: Any) -> str:
    """The name of a function; `data` for `Tensor.data.__get__`."""
    name = getattr(function, "__name__", "")
    return getattr(function.__self__, "__name__", name) if name == "__get__" else name


def _writes(name: str) -> bool:
    """Whether a function changes its first tensor in place."""
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i")
            and name not in ("__index__", "__invert__", "__int__", "__iter__")
        )
    return name.endswith("_") and name not in _LOOKS


def _is_initializer(function: Any) -> bool:
    return (
        getattr(function, "__module__", "") == "torch.nn.init"
        and "generator" in inspect.signature(function).parameters
    )


def _on_cpu(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call draws numbers on a CPU, from the mode's generator."""
    asked = kwargs.get("device")
    given = [one.device for one in _tensors(args, kwargs)] or [
        torch.device(asked) if asked is not None else torch.get_default_device()
    ]
    return all(device.type == "cpu" for device in given)


def _tensors(args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for one in (*args, *kwargs.values()):
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (tuple, list)):
            found += [inner for inner in one if isinstance(inner, Tensor)]
    return found
