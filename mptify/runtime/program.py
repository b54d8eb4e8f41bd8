"""Chains of kernels: planned once for images of one size, then run by one call of the C++ library."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mptify.errors import MptifyError
from mptify.runtime.library import EDITION, KINDS, Step, library
from mptify.runtime.planes import Kernel, Numbers, Place, Value, own_order

__all__ = ["Chain", "Plan", "Ready", "as_operator"]

_SIZES = 4  # of images, that a chain stays ready for
_ROOMS = 8 << 20  # bytes of rooms from which on those that are free are used again


class Plan:
    """The steps for images of one size, with all that they read: data, which could as well lie in a file.

    Kernels `add` their steps. Arrays are numbered: inputs, then outputs, then rooms to work in, then constants.
    """

    def __init__(self, inputs: int):
        self.inputs = inputs
        self.outputs: list[Numbers] = []
        self.rooms: list[int] = []  # their sizes in bytes
        self.constants: list[Any] = []  # arrays and tensors, kept alive
        self.names: list[str] = []  # of the steps
        self._records: list[dict[str, Any]] = []
        self._free: list[int] = []  # rooms
        self._scratch: int | None = None
        self._name, self._leaves = "", False

    # -- building ----------------------------------------------------------------------------------------------------------------

    def begin(self, name: str, leaves: bool) -> None:
        """What is added next is step `name`; whether its result leaves the chain."""
        self._name, self._leaves = name, leaves

    def add(self, kind: str, form: Any, into: Value | None = None, **fields: Any) -> Value:
        """A step, whose result has this form; one that goes on with what another step began says `into` which value."""
        if into is not None:
            self.names.append(self._name)
            self._records.append({"kind": KINDS.index(kind), "out": into.place, **fields})
            return into
        if self._leaves:
            out = Place("outputs", len(self.outputs))
            self.outputs.append(form)
        else:
            out = self._room(form.bytes)
        self.names.append(self._name)
        self._records.append({"kind": KINDS.index(kind), "out": out, **fields})
        return Value(form, out)

    def constant(self, array: Any) -> Place:
        """An array or a tensor that the library reads."""
        self.constants.append(array)
        return Place("constants", len(self.constants) - 1)

    def scratch(self, size: int) -> Place:
        """A room in which a step may do what it likes; the steps share it."""
        if self._scratch is None:
            self._scratch = len(self.rooms)
            self.rooms.append(0)
        self.rooms[self._scratch] = max(self.rooms[self._scratch], size)
        return Place("rooms", self._scratch)

    def release(self, place: Place) -> None:
        """A value that no later step reads."""
        if place.among == "rooms":
            self._free.append(place.number)

    def _room(self, size: int) -> Place:
        """A new one, as long as they are few: what one thread wrote last takes another one long to write to."""
        fitting = [number for number in self._free if self.rooms[number] >= size and sum(self.rooms) + size > _ROOMS]
        if fitting:
            number = min(fitting, key=self.rooms.__getitem__)
            self._free.remove(number)
        else:
            number = len(self.rooms)
            self.rooms.append(size)
        return Place("rooms", number)

    # -- running -----------------------------------------------------------------------------------------------------------------

    def steps(self) -> Any:
        """The steps as the library reads them."""
        return (Step * len(self._records))(*[self._filled(Step(), record) for record in self._records])

    def _filled(self, structure: Any, record: dict[str, Any]) -> Any:
        for name in structure.ARRAYS:
            setattr(structure, name, -1)
        for part in ("one", "other") if isinstance(structure, Step) else ():
            self._filled(getattr(structure, part), record.get(part, {}))
        for name, value in record.items():
            if isinstance(value, Place):
                setattr(structure, name, self._number(value))
            elif name == "steps":
                structure.steps[:] = value
            elif not isinstance(value, dict):
                setattr(structure, name, value)
        return structure

    def _number(self, place: Place) -> int:
        counts = {"inputs": self.inputs, "outputs": len(self.outputs), "rooms": len(self.rooms), "constants": len(self.constants)}
        before = list(counts)[: list(counts).index(place.among)]
        return sum(counts[name] for name in before) + place.number


class Ready:
    """Steps with rooms to work in, and the addresses of everything that they read and write."""

    def __init__(self, steps: Any, inputs: int, shapes: list[tuple[int, ...]], rooms: list[int], constants: list[Any]):
        self.steps, self.shapes = steps, shapes
        self.held = [*(torch.empty(size + 64, dtype=torch.uint8, device="cpu") for size in rooms), *constants]
        given = inputs + len(shapes)
        self.addresses = (ctypes.c_void_p * (given + len(self.held)))()
        self.strides = (ctypes.c_int64 * (given + len(self.held)))()
        for number, array in enumerate(self.held):
            self.addresses[given + number] = _address(array)
        self.images = 0

    def begin(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Take the images, and make room for what comes out; both must be kept until the steps have run."""
        self.images = inputs[0].shape[0]
        outputs = [inputs[0].new_empty((self.images, *shape)) for shape in self.shapes]
        for number, tensor in enumerate((*inputs, *outputs)):
            self.addresses[number] = tensor.data_ptr()
            self.strides[number] = 4 * tensor.stride(0)
        return outputs

    def run(self, which_cpu: int, number: int | None = None) -> None:
        """All steps on all images, or one step on the first."""
        if library is None:
            raise MptifyError("mptify was installed without a C++ compiler, and can't run packed programs.")
        steps, count, images = (self.steps, len(self.steps), self.images) if number is None else (ctypes.byref(self.steps[number]), 1, 1)
        library.mptify_packed_run(steps, count, self.addresses, self.strides, images, which_cpu, torch.get_num_threads())


def _forms(inputs: Sequence[Tensor]) -> list[Numbers]:
    return [Numbers(tuple(x.shape[1:]), tuple(x.stride()[1:])) for x in inputs]


def _address(array: Any) -> int:
    return array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data


@torch.library.custom_op("mptify::packed", mutates_args=(), device_types="cpu")
def _operator(
    inputs: list[Tensor], steps: Tensor, constants: list[Tensor], rooms: list[int], shapes: list[int], seen: list[int], edition: int
) -> list[Tensor]:
    """Steps as torch knows them, for graphs that are exported: all that they read comes with the call.

    `seen` are the inputs' shapes and strides that the steps were planned for, `edition` is the library's that they are for.
    """
    if edition != EDITION:
        raise MptifyError(f"This graph was exported by an mptify whose programs had edition {edition}; this one runs {EDITION}.")
    forms = _unflat(seen)
    inputs = [_laid_out(x, shape, strides) for x, shape, strides in zip(inputs, forms[::2], forms[1::2], strict=True)]
    count = steps.numel() // ctypes.sizeof(Step)
    data: Any = steps.numpy()
    ready = Ready((Step * count).from_buffer_copy(data), len(inputs), _unflat(shapes), rooms, constants)
    outputs = ready.begin(inputs)
    ready.run(-1)
    return outputs


def _laid_out(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Images as they lay in memory when the steps were planned."""
    if tuple(x.shape[1:]) != shape or x.dtype != torch.float32:
        raise MptifyError(f"This graph was exported for float32 images of {shape}, and was given {tuple(x.shape[1:])}, {x.dtype}.")
    if x.stride()[1:] == strides:
        return x
    whole = max(1, *(size * step for size, step in zip(shape, strides, strict=True)))
    return torch.empty_strided(x.shape, (whole, *strides), dtype=x.dtype).copy_(x)


@_operator.register_fake
def _(
    inputs: list[Tensor], steps: Tensor, constants: list[Tensor], rooms: list[int], shapes: list[int], seen: list[int], edition: int
) -> list[Tensor]:
    return [inputs[0].new_empty((inputs[0].shape[0], *shape)) for shape in _unflat(shapes)]


def as_operator(plan: Plan, forms: list[Numbers]) -> Any:
    """A plan as a call of torch's operator `mptify::packed`, which takes the images."""
    steps = torch.frombuffer(bytearray(plan.steps()), dtype=torch.uint8)
    constants = [one if isinstance(one, Tensor) else torch.from_numpy(one) for one in plan.constants]
    seen = _flat([part for form in forms for part in (form.shape, form.steps)])
    return lambda inputs: _operator(inputs, steps, constants, plan.rooms, _flat([form.shape for form in plan.outputs]), seen, EDITION)


def _flat(shapes: list[tuple[int, ...]]) -> list[int]:
    """Each behind its length."""
    return [number for shape in shapes for number in (len(shape), *shape)]


def _unflat(shapes: list[int]) -> list[tuple[int, ...]]:
    """And back."""
    found, left = [], list(shapes)
    while left:
        count, *left = left
        found.append(tuple(left[:count]))
        left = left[count:]
    return found


class Chain(nn.Module):
    """Kernels that run one after the other without a tensor between them: numbers in, numbers out.

    `wiring` lists for each kernel its name, the values that it reads and the one that it makes; values are named by strings.
    """

    def __init__(self, kernels: dict[str, Kernel], wiring: list[tuple[str, tuple[str, ...], str]], inputs: list[str], outputs: list[str]):
        super().__init__()
        self.kernels = nn.ModuleDict(kernels)
        self.wiring, self.inputs, self.outputs = wiring, inputs, outputs
        self.which_cpu = -1  # the best
        self._forget()

    def _forget(self) -> None:
        self._ready: dict[tuple, tuple[Plan, Ready]] = {}
        self._lock = threading.Lock()  # the rooms are there once
        self._seen: dict[tuple, tuple[Plan, Ready]] = {}  # the last inputs that could be read as they were

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if torch.compiler.is_exporting():
            given = self.readable(inputs)
            plan = self.plan_for(given)[0]
            outputs = as_operator(plan, _forms(given))(given)
        else:
            with self._lock:
                plan, outputs = self._run(inputs)
        return tuple([own_order(x, form.tokens) if form.tokens else x for x, form in zip(outputs, plan.outputs, strict=True)])

    def _run(self, inputs: tuple[Tensor, ...]) -> tuple[Plan, list[Tensor]]:
        """Inputs that can be read as they are and came before are looked up by their shapes: threads wait for Python."""
        seen = tuple([(x.shape, x.stride(), x.dtype, x.device) for x in inputs])
        given: Sequence[Tensor] = inputs
        if seen in self._seen:
            plan, ready = self._seen[seen]
        else:
            given = self.readable(inputs)
            plan, ready = self.plan_for(given)
            if all(x is y for x, y in zip(inputs, given, strict=True)):
                self._seen = {seen: (plan, ready)}
        outputs = ready.begin(given)
        ready.run(self.which_cpu)
        return plan, outputs

    def readable(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """As the kernels can read them."""
        if any(x.device.type != "cpu" for x in inputs):
            raise MptifyError(f"Packed programs run on CPUs, and this image is on {inputs[0].device}.")
        images = max(x.shape[0] for x in inputs)
        if any(x.shape[0] not in (1, images) for x in inputs):
            raise MptifyError(f"A packed program was given {' and '.join(str(x.shape[0]) for x in inputs)} images at once.")
        same = [x if x.shape[0] == images else x.expand(images, *x.shape[1:]) for x in inputs]
        given = {name: x.to(torch.float32) for name, x in zip(self.inputs, same, strict=True)}
        for name, read, _ in self.wiring:
            kernel: Any = self.kernels[name]
            given |= {one: kernel.readable(given[one]) for one in read if one in given}
        return list(given.values())

    def plan_for(self, inputs: Sequence[Tensor]) -> tuple[Plan, Ready]:
        """The plan for such images, made when they come for the first time."""
        key = tuple(_forms(inputs))
        if key not in self._ready:
            if torch.compiler.is_exporting():  # when no tensor has values
                raise MptifyError("Run the program once on an image of that size, without gradients, before you export it.")
            while len(self._ready) >= _SIZES:
                del self._ready[next(iter(self._ready))]
            plan = self.plan(list(key))
            shapes = [form.shape for form in plan.outputs]
            self._ready[key] = plan, Ready(plan.steps(), plan.inputs, shapes, plan.rooms, plan.constants)
        return self._ready[key]

    def plan(self, forms: list[Numbers]) -> Plan:
        """The steps for images of these sizes."""
        plan = Plan(len(forms))
        values = {name: Value(form, Place("inputs", i)) for i, (name, form) in enumerate(zip(self.inputs, forms, strict=True))}
        last = {name: number for number, (_, read, _) in enumerate(self.wiring) for name in read}
        leaving = []
        for number, (name, read, made) in enumerate(self.wiring):
            kernel: Any = self.kernels[name]
            plan.begin(name, made in self.outputs)
            fault = "it is not on a CPU" if any(one.device.type != "cpu" for one in kernel.buffers()) else kernel.fault()
            if fault:
                raise MptifyError(f"{name}: this packed layer is no more what it was made as: {fault}.")
            try:
                values[made] = kernel.plan(plan, *[values[one] for one in read])
            except MptifyError as error:
                raise MptifyError(f"{name}: {error}") from None
            if made in self.outputs:
                leaving.append(made)
            for one in set(read):
                if last[one] == number:
                    plan.release(values[one].place)
        assert leaving == self.outputs
        return plan

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        if any(key.startswith(prefix) for key in state_dict):
            raise MptifyError("A packed program's weights can't be exchanged; mptify.pack makes a program of another ticket.")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._forget()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_ready", "_seen", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
