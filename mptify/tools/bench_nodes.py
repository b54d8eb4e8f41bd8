"""Time a packed program step by step."""

from __future__ import annotations

import operator
import statistics
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.chain import Chain

__all__ = ["NodeTime", "node_times"]


@dataclass(frozen=True)
class NodeTime:
    """The median time of one step of a program, and the name of the kernel that runs it."""

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
        kernel = kernels.name_of(kind) if isinstance(kind, type) else None
        node = NodeTime(name, kernel or f"torch: {_shown(kind)}", statistics.median(times))
        nodes.append(node)
        in_torch += 0.0 if kernel else node.ms
    return nodes, in_torch / sum(node.ms for node in nodes)


def _shown(kind: type | str) -> str:
    return kind if isinstance(kind, str) else kind.__name__


class _TimedInterpreter(fx.Interpreter):
    """Runs a program on one image and times each step.

    `times` holds one time per run for each step, by its name and the class or function that
    computes it.
    """

    def __init__(self, program: fx.GraphModule):
        super().__init__(program)
        self.times: dict[tuple[str, type | str], list[float]] = {}
        self.runs = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        module = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
        if isinstance(module, Chain):
            inputs = module.readable(self.fetch_args_kwargs_from_env(n)[0])
            builder, program = module.program_for(inputs)
            _outputs = program.bind(inputs)  # keeps the outputs alive while the steps write them
            for number, name in enumerate(builder.names):
                start = time.perf_counter()
                program.run_step(number, module.instruction_set)
                self._add(name, type(module.kernels[name]), start)
            return super().run_node(n)
        start = time.perf_counter()
        result = super().run_node(n)
        is_call = n.op in ("call_module", "call_function", "call_method")
        if is_call and n.target is not operator.getitem:
            self._add(n.name, n.name if module is None else type(module), start)
        return result

    def _add(self, name: str, kind: type | str, start: float) -> None:
        ms = 1e3 * (time.perf_counter() - start)
        times = self.times.setdefault((name, kind), [])
        if len(times) < self.runs:
            times.append(ms)
        else:  # a step that the plan lists in several parts
            times[-1] += ms
