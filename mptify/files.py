"""Atomic file writes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from mptify.errors import MptifyError, shown

__all__ = ["as_path", "check_writable", "write_whole"]


def as_path(path: Any) -> Path:
    """A path from the caller's file name.

    Raises:
        MptifyError: It is not a file name.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise MptifyError(f"A file name is needed, not {shown(path)}.")
    return Path(path)


def check_writable(path: Path) -> None:
    """Raise if `path` can't be written, before the work rather than after it."""
    folder = path.parent
    if not folder.is_dir():
        raise MptifyError(f"{path}: the folder {folder} does not exist.")
    if path.is_dir():
        raise MptifyError(f"{path} is a folder; a file name is needed.")
    if path.exists() and not path.is_file():
        raise MptifyError(f"{path} is not a regular file.")
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MptifyError(f"{path}: can't write there ({error.strerror}).") from None


def write_whole(path: Path, data: bytes | str) -> None:
    """Write atomically: readers find the old or the new file, even after a crash."""
    path = path.resolve()  # write to the target of a link
    check_writable(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".mptify-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's mode is for its owner only
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise MptifyError(f"{path}: can't write there ({error.strerror}).") from None
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
