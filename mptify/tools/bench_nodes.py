"""Time a packed program step by step."""

from __future__ import annotations

import operator
import statistics
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from mptify.errors import MptifyError
from mptify.runtime.program import Chain

__all__ = ["NodeTime", "node_times"]

_KERNELS = {
    "BitslicedConv": "bit-sliced",
    "JoinedConv": "bit-sliced, residual add",
    "WindowConv": "popcount conv",
    "PixelConv": "input conv",
    "PopcountLinear": "popcount linear",
    "MeanLinear": "pooled linear",
    "Pool": "max-pool of bits",
    "Flatten": "flatten of bits",
    "Concat": "concat of bits",
    "Pack": "to bits",
    "Unpack": "from bits",
}


@dataclass(frozen=True)
class NodeTime:
    """The median time of one step of a program, and a description of the kernel that runs it."""

    name: str
    kernel: str
    ms: float


def node_times(program: nn.Module, image: Tensor, rounds: int) -> tuple[list[NodeTime], float]:
    """Time the steps of a packed program.

    Args:
        program: The program.
        image: A batch of one image.
        rounds: Runs to time.

    Returns:
        The steps, and the share of their time that torch takes, not the packed kernels.

    Raises:
        MptifyError: Only parts of the network are packed.
    """
    if not isinstance(program, fx.GraphModule):
        raise MptifyError("This network is packed only in parts, so its steps can't be listed.")
    timed = _TimedInterpreter(program)
    for _ in range(rounds):
        timed.run(image)
    nodes, in_torch = [], 0.0
    for (name, kind), times in timed.times.items():
        node = NodeTime(name, _KERNELS.get(kind, f"torch: {kind}"), statistics.median(times))
        nodes.append(node)
        in_torch += 0.0 if kind in _KERNELS else node.ms
    return nodes, in_torch / sum(node.ms for node in nodes)


class _TimedInterpreter(fx.Interpreter):
    """Runs a program on one image and times each step.

    `times` holds one time per run for each step, by its name and the class or function that
    computes it.
    """

    def __init__(self, program: fx.GraphModule):
        super().__init__(program)
        self.times: dict[tuple[str, str], list[float]] = {}
        self.runs = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        module = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
        if isinstance(module, Chain):
            inputs = module.readable(self.fetch_args_kwargs_from_env(n)[0])
            plan, ready = module.plan_for(inputs)
            _outputs = ready.begin(inputs)  # keeps the outputs alive while the steps write them
            for number, name in enumerate(plan.names):
                start = time.perf_counter()
                ready.run(module.which_cpu, number)
                self._add(name, type(module.kernels[name]).__name__, start)
            return super().run_node(n)
        start = time.perf_counter()
        result = super().run_node(n)
        is_call = n.op in ("call_module", "call_function", "call_method")
        if is_call and n.target is not operator.getitem:
            self._add(n.name, n.name if module is None else type(module).__name__, start)
        return result

    def _add(self, name: str, kind: str, start: float) -> None:
        ms = 1e3 * (time.perf_counter() - start)
        times = self.times.setdefault((name, kind), [])
        if len(times) < self.runs:
            times.append(ms)
        else:  # a step that the plan lists in several parts
            times[-1] += ms
