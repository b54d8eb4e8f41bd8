"""Record a module's call in any torch.fx graph, which makes the module a leaf of every tracer."""

from __future__ import annotations

from typing import Any

from torch import fx

__all__ = ["recorded_call"]


def recorded_call(
    module: Any, args: tuple, kwargs: dict[str, Any], *tensors: Any
) -> fx.Proxy | None:
    """Record a call of `module` as one node if an fx tracer runs it; otherwise return None.

    A tracer passes proxies for the network's inputs. Where the call's arguments are constants, it
    shows proxies for the module's own `tensors`.
    """
    values = (*args, *kwargs.values(), *tensors)
    proxy: Any = next((value for value in values if isinstance(value, fx.Proxy)), None)
    if proxy is None:
        return None
    path = proxy.tracer.path_of_module(module)
    return proxy.tracer.create_proxy("call_module", path, args, kwargs)
