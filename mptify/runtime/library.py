"""The C++ library behind the packed runtime, called through ctypes.

The library describes itself: the structures that it shares with Python, and its kernels by name.
Python builds its structures from that description. `library` is None if there was no compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from pathlib import Path
from typing import Any

from mptify import __version__
from mptify.errors import MptifyError
from mptify.nn.build import open_library

__all__ = ["Library", "compiles", "cpu_names", "library", "require_library", "word_bytes"]

_SOURCE = Path(__file__).with_name("csrc") / "packed.cpp"


class Library:
    """The C++ library.

    Attributes:
        Step: The ctypes structure of one step of a program; csrc/step.h explains its fields.
        kernel_names: The names of its kernels, by number.
        compiles: Whether this machine can run machine code for layers on lanes.
        signature: A number that differs between libraries whose programs differ.

    Args:
        code: The shared library.

    Raises:
        MptifyError: ctypes lays out the structures in another way than the compiler did.
    """

    def __init__(self, code: ctypes.CDLL):
        self._code = code
        for name in ("layout", "kernel_name", "cpu_name"):
            getattr(code, f"mptify_packed_{name}").restype = ctypes.c_char_p
        layout = code.mptify_packed_layout().decode()
        names = _list(code.mptify_packed_kernels, code.mptify_packed_kernel_name)
        self.cpus = _list(code.mptify_packed_cpus, code.mptify_packed_cpu_name)
        self.word_bytes: int = code.mptify_packed_word_bytes()
        self.compiles = bool(code.mptify_packed_compiles())
        address, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        run = code.mptify_packed_run
        run.restype = None
        run.argtypes = [address, count, address, address, count, number, number]
        compile, release = code.mptify_packed_compile, code.mptify_packed_release
        compile.restype, release.restype = address, None
        compile.argtypes, release.argtypes = [address, count, address, number, number], [address]
        self._buffers: dict[type, list[str]] = {}  # the fields that number a buffer
        self.Step = self._build_structures(layout)["Step"]
        self.kernel_names = names
        described = f"{__version__}\n{layout}\n{names}".encode()
        self.signature = int.from_bytes(hashlib.sha256(described).digest()[:7], "little")

    def kernel_number(self, name: str) -> int:
        """The number of a kernel in the library's table."""
        if name not in self.kernel_names:
            raise MptifyError(f"mptify's C++ library has no kernel {name!r}.")
        return self.kernel_names.index(name)

    def fill(self, structure: Any, values: dict[str, Any]) -> Any:
        """Set a structure's fields. Buffers that are not given are -1, and numbers 0."""
        for name in self._buffers[type(structure)]:
            setattr(structure, name, -1)
        for name, kind in structure._fields_:
            if issubclass(kind, ctypes.Structure):
                self.fill(getattr(structure, name), values.get(name, {}))
            elif name in values and issubclass(kind, ctypes.Array):
                getattr(structure, name)[:] = values[name]
            elif name in values:
                setattr(structure, name, values[name])
        unknown = values.keys() - {name for name, _ in structure._fields_}
        if unknown:
            kind = type(structure).__name__
            raise MptifyError(f"mptify's C++ library has no {sorted(unknown)[0]!r} in its {kind}.")
        return structure

    def run(self, steps: Any, count: int, *arguments: Any) -> None:
        """Run steps on images; see `mptify_packed_run` in csrc/packed.cpp for the arguments."""
        self._code.mptify_packed_run(steps, count, *arguments)

    def compile(self, owner: Any, steps: Any, addresses: Any, instruction_set: int) -> None:
        """Make machine code for the layers on lanes among some steps, if the system allows it.

        Args:
            owner: The object that runs the steps. The code is released with it.
            steps: An array of steps, which get the addresses of their code.
            addresses: The addresses of the buffers.
            instruction_set: Its number in `cpu_names()`; -1 is the best.
        """
        kernel = self.kernel_number("lanes_conv")
        made = self._code.mptify_packed_compile(
            steps, len(steps), addresses, kernel, instruction_set
        )
        if made:
            weakref.finalize(owner, self._code.mptify_packed_release, made)

    def _build_structures(self, layout: str) -> dict[str, Any]:
        """ctypes structures from lines of `struct NAME SIZE`, each followed by its fields.

        A field is `KIND NAME OFFSET`; its kind is number, buffer, strides or another structure.
        """
        built: dict[str, Any] = {}
        fields: dict[str, list[tuple[str, str, int]]] = {}
        sizes: dict[str, int] = {}
        for kind, name, number in (line.split() for line in layout.splitlines()):
            if kind == "struct":
                fields[name], sizes[name] = [], int(number)
            else:
                fields[list(fields)[-1]].append((kind, name, int(number)))
        kinds: dict[str, Any] = {"number": ctypes.c_int64, "buffer": ctypes.c_int64}
        kinds["strides"] = ctypes.c_int64 * 3
        for struct, found in fields.items():
            members = [(name, (kinds | built)[kind]) for kind, name, _ in found]
            made = built[struct] = type(struct, (ctypes.Structure,), {"_fields_": members})
            offsets = [getattr(made, name).offset for name, _ in members]
            if offsets != [at for *_, at in found] or ctypes.sizeof(made) != sizes[struct]:
                raise MptifyError(
                    f"The {struct} of mptify's C++ library lies in memory in another way than "
                    "ctypes expects; install mptify again to build the library."
                )
            self._buffers[made] = [name for kind, name, _ in found if kind == "buffer"]
        return built


def _list(count: Any, name: Any) -> list[str]:
    return [name(number).decode() for number in range(count())]


def _load() -> Library | None:
    code = open_library(_SOURCE)
    return None if code is None else Library(code)


library = _load()


def require_library() -> Library:
    """The library.

    Raises:
        MptifyError: mptify was installed without a C++ compiler.
    """
    if library is None:
        raise MptifyError(
            "mptify was installed without a C++ compiler: it can't run packed programs."
        )
    return library


def cpu_names() -> list[str]:
    """The instruction sets that this machine can run, the best last."""
    return library.cpus if library else []


def compiles() -> bool:
    """Whether layers on lanes become machine code on this machine."""
    return library is not None and library.compiles


def word_bytes() -> int:
    """The widest words that kernels have on this machine."""
    return library.word_bytes if library else 32
