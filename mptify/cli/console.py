"""The console that commands print to, and files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rich.console import Console

from mptify.errors import MptifyError

__all__ = ["check_writable", "console", "write_whole"]


def console() -> Console:
    """Terminal width on a terminal; in a pipe, lines as long as they are."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=200, soft_wrap=True, highlight=False)


def check_writable(path: Path) -> None:
    """Raise before the work rather than after it if `path` can't be written."""
    folder = path.parent
    if not folder.is_dir():
        raise MptifyError(f"{path}: the folder {folder} does not exist.")
    if path.is_dir():
        raise MptifyError(f"{path} is a folder; a file name is needed.")
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MptifyError(f"{path}: can't write there ({error.strerror}).") from None


def write_whole(path: Path, text: str) -> None:
    """Write through a temporary file beside `path`, so that nobody ever sees half of it."""
    check_writable(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise MptifyError(f"{path}: can't write there ({error.strerror}).") from None
