"""Build the C++ libraries while mptify is installed. Without a compiler, torch does the work."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

# In the package; each library is put beside its source.
SOURCES = ("nn/csrc/ticket.cpp", "runtime/csrc/packed.cpp")
FLAGS = [
    "-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=off",  # no fused multiply-add, as in torch
    "-Wno-psabi", "-Wno-unknown-pragmas",
]  # fmt: skip


def library_of(source: Path) -> Path:
    """The library that is built from a source, beside it."""
    return source.with_name(f"_{source.stem}.{'dll' if sys.platform == 'win32' else 'so'}")


def source_digest(source: Path) -> str:
    """A digest of a source and of all headers in the package, which it may include."""
    package = source.parents[2]
    headers = [path for ending in ("h", "inl") for path in package.glob(f"*/csrc/**/*.{ending}")]
    digest = hashlib.sha256()
    for path in sorted({source, *headers}):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def open_library(source: Path) -> ctypes.CDLL | None:
    """The library of a source; None if the install found no compiler.

    Raises:
        MptifyError: It was built from other sources than these.
    """
    path = library_of(source)
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    built_from: Any = getattr(library, "mptify_source", lambda: b"")
    built_from.restype = ctypes.c_char_p
    if built_from() != source_digest(source).encode():
        from mptify.errors import MptifyError  # not while mptify is being installed

        raise MptifyError(
            f"{path} was built from other sources than this mptify. Install mptify again to build "
            "it."
        )
    return library


def build(source: Path) -> Path | None:
    """Compile a source; return the library beside it, or None if no compiler succeeds."""
    given = os.environ.get("CXX")
    compilers = (
        [shlex.split(given)]
        if given
        else [[name] for name in ("c++", "g++", "clang++") if shutil.which(name)]
    )
    target = library_of(source)
    flags = [*FLAGS, f'-DMPTIFY_SOURCE="{source_digest(source)}"']
    scratch = target.with_name(f"{target.name}.{os.getpid()}.new")
    try:
        for compiler in compilers:
            for extra in ([], ["-DMPTIFY_ONE_CPU"]):
                command = [*compiler, *flags, *extra, str(source), "-o", str(scratch)]
                try:
                    done = subprocess.run(command, capture_output=True, check=False)
                except OSError:
                    break
                if done.returncode == 0:
                    scratch.replace(target)
                    return target
    finally:
        scratch.unlink(missing_ok=True)
    return None


def main() -> None:
    """Build both libraries in place: `python -m mptify.nn.build`, after a change of C++ code."""
    for source in SOURCES:
        path = Path(__file__).parents[1] / source
        if build(path) is None:
            sys.exit(f"{path} can't be compiled.")


def get_build_hook() -> Any:
    """The entry point of hatch; hatchling is installed only while a wheel is built."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class NativeBuildHook(BuildHookInterface):
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name != "wheel":
                return
            package = Path(self.root) / "mptify"
            libraries = [
                library for library in (build(package / source) for source in SOURCES) if library
            ]
            if not libraries:
                self.app.display_warning(
                    "No C++ compiler was found: searches will be slower, and tickets run as "
                    "float32 networks only."
                )
                return
            build_data["artifacts"] += [
                library.relative_to(self.root).as_posix() for library in libraries
            ]
            build_data["pure_python"] = False
            platform = re.sub("[-.]", "_", sysconfig.get_platform())
            build_data["tag"] = f"py3-none-{platform}"  # independent of the Python version

    return NativeBuildHook


if __name__ == "__main__":
    main()
