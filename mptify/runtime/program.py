"""Programs: steps for images of one size, with their buffers, run by one call of the library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mptify.runtime.library import require_library
from mptify.runtime.values import Buffer, Numbers, Value

__all__ = ["Program", "ProgramBuilder"]

_KINDS = ("inputs", "outputs", "workspace", "constants")  # of buffers, in the order of numbers
_REUSE_FROM = 1 << 20  # bytes of workspace above which free buffers are reused


class ProgramBuilder:
    """Collects the steps of a program, which kernels `add`, and assigns their buffers.

    The result is data: steps name their buffers by number, so they can lie in a file as well.
    Buffers are numbered in the order of inputs, outputs, workspace and constants.

    Args:
        inputs: The number of inputs.
    """

    def __init__(self, inputs: int):
        self.inputs = inputs
        self.outputs: list[Numbers] = []
        self.workspace_sizes: list[int] = []  # in bytes
        self.constants: list[Any] = []  # arrays and tensors, kept alive
        self.names: list[str] = []  # of the kernel behind each step
        self._steps: list[dict[str, Any]] = []
        self._free: list[int] = []  # workspace buffers that hold nothing any more
        self._shared: int | None = None  # the workspace buffer that all steps share
        self._name = ""
        self.is_output, self.margin = False, 0
        self.arranged: dict[Any, Buffer] = {}  # see LanesConv
        self._temporary: dict[Buffer, list[Buffer]] = {}

    def begin(self, name: str, is_output: bool, margin: int = 0) -> None:
        """Say which kernel adds the next steps.

        Args:
            name: Its name.
            is_output: Whether its result is an output.
            margin: The least margin that its result should have, if it is `Planes`.
        """
        self._name, self.is_output, self.margin = name, is_output, margin

    def add(self, kernel: str, form: Any, into: Value | None = None, **fields: Any) -> Value:
        """Add a step.

        Args:
            kernel: The name of a kernel of the library.
            form: The form of the result.
            into: A value that another step has begun to write, and this one continues.
            fields: Fields of the library's `Step`: numbers, buffers and dicts of such.

        Returns:
            The result.
        """
        if into is None:
            into = Value(form, self._output(form) if self.is_output else self._allocate(form.bytes))
        self._append(kernel, into.buffer, fields)
        return into

    def add_temporary(self, kernel: str, size: int, **fields: Any) -> Buffer:
        """Add a step whose result lasts as long as the value that is its `input`."""
        made = self._allocate(size)
        self._temporary.setdefault(fields["input"], []).append(made)
        self._append(kernel, made, fields)
        return made

    def _append(self, kernel: str, output: Buffer, fields: dict[str, Any]) -> None:
        self.names.append(self._name)
        number = require_library().kernel_number(kernel)
        self._steps.append({"kernel": number, "output": output, **fields})

    def constant(self, array: Any) -> Buffer:
        """An array or a tensor that the library reads."""
        self.constants.append(array)
        return Buffer("constants", len(self.constants) - 1)

    def workspace(self, size: int) -> Buffer:
        """A buffer whose contents last as long as a step. All steps share it."""
        if self._shared is None:
            self._shared = len(self.workspace_sizes)
            self.workspace_sizes.append(0)
        self.workspace_sizes[self._shared] = max(self.workspace_sizes[self._shared], size)
        return Buffer("workspace", self._shared)

    def release(self, buffer: Buffer) -> None:
        """Say that no later step reads a value."""
        for one in (buffer, *self._temporary.pop(buffer, ())):
            if one.kind == "workspace":
                self._free.append(one.number)
        self.arranged = {key: one for key, one in self.arranged.items() if key[0] != buffer}

    def steps(self) -> Any:
        """The steps as the library reads them: an array of ctypes structures."""
        library = require_library()
        steps = [library.fill(library.Step(), self._numbered(step)) for step in self._steps]
        return (library.Step * len(steps))(*steps)

    def build(self, *, compiles: bool = True) -> Program:
        """The program; `compiles` says whether it may become machine code."""
        shapes = [form.shape for form in self.outputs]
        arguments = (self.inputs, shapes, self.workspace_sizes, self.constants)
        return Program(self.steps(), *arguments, compiles=compiles)

    def _output(self, form: Numbers) -> Buffer:
        self.outputs.append(form)
        return Buffer("outputs", len(self.outputs) - 1)

    def _allocate(self, size: int) -> Buffer:
        """A buffer of its own for each value, as long as the workspace is small.

        A core is slow to write to a cache line that another core wrote last.
        """
        sizes = self.workspace_sizes
        if sum(sizes) + size > _REUSE_FROM:
            fitting = [number for number in self._free if sizes[number] >= size]
            if fitting:
                number = min(fitting, key=sizes.__getitem__)
                self._free.remove(number)
                return Buffer("workspace", number)
        sizes.append(size)
        return Buffer("workspace", len(sizes) - 1)

    def _numbered(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The same fields, with numbers in place of buffers."""
        numbered = dict(fields)
        for name, value in fields.items():
            if isinstance(value, Buffer):
                numbered[name] = self._number(value)
            elif isinstance(value, dict):
                numbered[name] = self._numbered(value)
        return numbered

    def _number(self, buffer: Buffer) -> int:
        counts = (self.inputs, len(self.outputs), len(self.workspace_sizes), len(self.constants))
        return sum(counts[: _KINDS.index(buffer.kind)]) + buffer.number


class Program:
    """Steps with their workspace, and the addresses of everything that they read and write.

    Args:
        steps: An array of the library's `Step`.
        inputs: The number of inputs.
        shapes: The shape of each output, for one image.
        workspace_sizes: The bytes of each workspace buffer.
        constants: Arrays and tensors.
        compiles: Whether layers become machine code in the first run, where that is possible.
    """

    def __init__(
        self,
        steps: Any,
        inputs: int,
        shapes: list[tuple[int, ...]],
        workspace_sizes: list[int],
        constants: list[Any],
        *,
        compiles: bool = True,
    ):
        self._compiles = compiles
        self._compiled: dict[int, Any] = {}  # steps by instruction set
        self._steps, self._shapes, self._images = steps, shapes, 0
        workspace = [
            torch.empty(size + 64, dtype=torch.uint8, device="cpu") for size in workspace_sizes
        ]
        self._kept_alive = [*workspace, *constants]
        bound = inputs + len(shapes)
        self._addresses = (ctypes.c_void_p * (bound + len(self._kept_alive)))()
        self._strides = (ctypes.c_int64 * (bound + len(self._kept_alive)))()
        for number, array in enumerate(self._kept_alive):
            self._addresses[bound + number] = _address(array)

    def bind(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Set the inputs, and allocate the outputs. Keep both alive until the steps have run."""
        self._images = inputs[0].shape[0]
        outputs = [inputs[0].new_empty((self._images, *shape)) for shape in self._shapes]
        for number, tensor in enumerate((*inputs, *outputs)):
            self._addresses[number] = tensor.data_ptr()
            self._strides[number] = 4 * tensor.stride(0)
        return outputs

    def run(self, instruction_set: int = -1) -> None:
        """Run all steps on all images.

        Args:
            instruction_set: Its number in `cpu_names()`; -1 is the best.
        """
        steps = self._steps_for(instruction_set)
        self._run(steps, len(steps), self._images, instruction_set)

    def run_step(self, number: int, instruction_set: int = -1) -> None:
        """Run one step on the first image."""
        step = self._steps_for(instruction_set)[number]
        self._run(ctypes.byref(step), 1, 1, instruction_set)

    def _steps_for(self, instruction_set: int) -> Any:
        """The steps, with machine code for the layers on lanes where that is possible."""
        if not self._compiles:
            return self._steps
        if instruction_set not in self._compiled:
            steps = type(self._steps)(*self._steps)
            require_library().compile(self, steps, self._addresses, instruction_set)
            self._compiled[instruction_set] = steps
        return self._compiled[instruction_set]

    def _run(self, steps: Any, count: int, images: int, instruction_set: int) -> None:
        threads = torch.get_num_threads()
        arguments = (self._addresses, self._strides, images, instruction_set, threads)
        require_library().run(steps, count, *arguments)


def _address(array: Any) -> int:
    return array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data
