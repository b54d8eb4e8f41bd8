"""Builds the C++ library while mptify is installed; without a compiler the install goes on, and torch does the work."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

LIBRARY = "_ticket.dll" if sys.platform == "win32" else "_ticket.so"
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]


def build(folder: Path) -> Path | None:
    """Compile `ticket.cpp` in `folder` beside itself; None where no compiler could."""
    given = os.environ.get("CXX")
    compilers = [shlex.split(given)] if given else [[name] for name in ("c++", "g++", "clang++") if shutil.which(name)]
    target, scratch = folder / LIBRARY, folder / f"{LIBRARY}.{os.getpid()}.new"
    try:
        for compiler in compilers:
            for extra in ([], ["-DMPTIFY_ONE_CPU"]):
                command = [*compiler, *FLAGS, *extra, str(folder / "ticket.cpp"), "-o", str(scratch)]
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


def get_build_hook() -> Any:
    """Hatch's way in; hatchling is there while a wheel is built, and only then."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class NativeBuildHook(BuildHookInterface):
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name != "wheel":
                return
            library = build(Path(self.root) / "mptify" / "native")
            if library is None:
                self.app.display_warning("No C++ compiler was found: a search will run on torch's operations alone, which is slower.")
                return
            build_data["artifacts"].append(f"mptify/native/{LIBRARY}")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{re.sub('[-.]', '_', sysconfig.get_platform())}"  # any Python can load it

    return NativeBuildHook
