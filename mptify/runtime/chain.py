"""Chains of native kernels: one program per image size, built when the first such image comes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mptify.errors import MptifyError
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.program import Program, ProgramBuilder
from mptify.runtime.torch_operator import call_as_operator
from mptify.runtime.values import Buffer, Numbers, Value, to_tokens

__all__ = ["Call", "Chain"]

_SIZES = 4  # the image sizes that a chain keeps programs for


class Call(NamedTuple):
    """One call of a kernel in a chain: the values that it reads and the one that it makes."""

    kernel: str
    inputs: tuple[str, ...]
    output: str


class Chain(nn.Module):
    """Native kernels that run one after the other without a tensor between them.

    Args:
        kernels: The kernels by name.
        calls: The calls, in order.
        inputs: The names of the values that come from outside.
        outputs: The names of the values that leave, in the order of the calls that make them.
    """

    def __init__(
        self,
        kernels: dict[str, NativeKernel],
        calls: list[Call],
        inputs: list[str],
        outputs: list[str],
    ):
        super().__init__()
        self.kernels = nn.ModuleDict(kernels)
        self.calls, self.inputs, self.outputs = calls, inputs, outputs
        self.instruction_set = -1  # the best; see Program.run
        self.compiles = True  # to machine code, where that is possible
        self._drop_programs()

    def _drop_programs(self) -> None:
        self._programs: dict[tuple, tuple[ProgramBuilder, Program]] = {}
        self._last: dict[tuple, tuple[ProgramBuilder, Program]] = {}
        self._lock = threading.Lock()  # a program has one workspace

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if torch.compiler.is_exporting():
            given = self.readable(inputs)
            builder = self.program_for(given)[0]
            outputs = call_as_operator(builder, _forms(given), given)
        else:
            with self._lock:
                builder, outputs = self._run(inputs)
        forms = builder.outputs
        return tuple(
            [to_tokens(x, form.tokens) if form.tokens else x for x, form in zip(outputs, forms)]
        )

    def _run(self, inputs: tuple[Tensor, ...]) -> tuple[ProgramBuilder, list[Tensor]]:
        """Run on inputs. A second call with inputs of the same kind skips all checks."""
        key = tuple([(x.shape, x.stride(), x.dtype, x.device) for x in inputs])
        given: Sequence[Tensor] = inputs
        if key in self._last:
            builder, program = self._last[key]
        else:
            given = self.readable(inputs)
            builder, program = self.program_for(given)
            if all(x is y for x, y in zip(inputs, given, strict=True)):
                self._last = {key: (builder, program)}
        outputs = program.bind(given)
        program.run(self.instruction_set)
        return builder, outputs

    def readable(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """The inputs as float32, in a memory order that the kernels can read."""
        if any(x.device.type != "cpu" for x in inputs):
            raise MptifyError(f"Packed programs run on CPUs; this image is on {inputs[0].device}.")
        images = max(x.shape[0] for x in inputs)
        if any(x.shape[0] not in (1, images) for x in inputs):
            counts = " and ".join(str(x.shape[0]) for x in inputs)
            raise MptifyError(f"A packed program can't run on {counts} images at once.")
        same = [x if x.shape[0] == images else x.expand(images, *x.shape[1:]) for x in inputs]
        given = {name: x.to(torch.float32) for name, x in zip(self.inputs, same, strict=True)}
        for call in self.calls:
            kernel: Any = self.kernels[call.kernel]
            given |= {name: kernel.readable(given[name]) for name in call.inputs if name in given}
        return list(given.values())

    def program_for(self, inputs: Sequence[Tensor]) -> tuple[ProgramBuilder, Program]:
        """The program for such images, built when they come for the first time."""
        key = tuple(_forms(inputs))
        if key not in self._programs:
            if torch.compiler.is_exporting():  # tensors have no values now
                raise MptifyError(
                    "Run the program once on an image of that size, without gradients, before "
                    "you export it."
                )
            while len(self._programs) >= _SIZES:
                del self._programs[next(iter(self._programs))]
            builder = self._emit(list(key))
            self._programs[key] = builder, builder.build(compiles=self.compiles)
        return self._programs[key]

    def _emit(self, forms: list[Numbers]) -> ProgramBuilder:
        """The steps for images of these forms."""
        builder = ProgramBuilder(len(forms))
        values = {
            name: Value(form, Buffer("inputs", number))
            for number, (name, form) in enumerate(zip(self.inputs, forms, strict=True))
        }
        margins = self._margins()
        last_use = {name: number for number, call in enumerate(self.calls) for name in call.inputs}
        for number, call in enumerate(self.calls):
            kernel: Any = self.kernels[call.kernel]
            _require_valid(call.kernel, kernel)
            is_output = call.output in self.outputs
            builder.begin(call.kernel, is_output, margins.get(call.output, 0))
            try:
                inputs = [values[name] for name in call.inputs]
                values[call.output] = kernel.emit(builder, *inputs)
            except MptifyError as error:
                raise MptifyError(f"{call.kernel}: {error}") from None
            for name in set(call.inputs):
                if last_use[name] == number:
                    builder.release(values[name].buffer)
        made = [call.output for call in self.calls if call.output in self.outputs]
        assert made == self.outputs
        return builder

    def _margins(self) -> dict[str, int]:
        """The margin that each value should have, so that its readers need not arrange it."""
        margins: dict[str, int] = {}
        for call in reversed(self.calls):
            kernel: Any = self.kernels[call.kernel]
            is_output = call.output in self.outputs
            margin = kernel.margin(0 if is_output else margins.get(call.output, 0))
            for name in call.inputs:
                margins[name] = max(margins.get(name, 0), margin)
        return margins

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        if any(key.startswith(prefix) for key in state_dict):
            raise MptifyError(
                "The weights of a packed program can't be exchanged; mptify.pack makes a program "
                "from another ticket."
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._drop_programs()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        dropped = ("_programs", "_last", "_lock")
        return {key: value for key, value in self.__dict__.items() if key not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._drop_programs()


def _require_valid(name: str, kernel: NativeKernel) -> None:
    """Refuse kernels that were changed, by `half()` for example: the library believes them."""
    try:
        if any(buffer.device.type != "cpu" for buffer in kernel.buffers()):
            raise ValueError("it is not on a CPU")
        kernel.validate()
    except ValueError as error:
        raise MptifyError(f"{name}: this packed layer was changed: {error}.") from None


def _forms(inputs: Sequence[Tensor]) -> list[Numbers]:
    return [Numbers(tuple(x.shape[1:]), tuple(x.stride()[1:])) for x in inputs]
