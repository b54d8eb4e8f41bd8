"""Data sets of image files. Hidden files and folders are ignored.

The classes are module-level, since worker processes import them by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes

from mptify.training.images import read_image

__all__ = ["Folder", "ReaderFiles"]


class Folder(ImageFolder):
    """`<class>/<image>`, as in torchvision's `ImageFolder`, without hidden files."""

    def __init__(self, root: Path, transform: Any):
        self._top = root
        super().__init__(str(root), transform, loader=read_image, is_valid_file=self._is_image)

    def find_classes(self, directory: Any) -> tuple[list[str], dict[str, int]]:
        names = [name for name in find_classes(directory)[0] if not name.startswith(".")]
        if not names:
            raise FileNotFoundError(f"Couldn't find any class folder in {directory}.")
        return names, {name: number for number, name in enumerate(names)}

    def _is_image(self, path: str) -> bool:
        return path.lower().endswith(IMG_EXTENSIONS) and not _is_hidden(path, self._top)


class ReaderFiles(Dataset):
    """The files of a timm reader. timm's own data set silently skips broken images."""

    def __init__(self, reader: Any, transform: Any):
        self.reader, self.transform = _visible_(reader), transform

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        file, label, *_ = self.reader[index]
        with file:
            return self.transform(read_image(file)), label

    @property
    def paths(self) -> list[str]:
        """The paths of the images, where they are files of a folder."""
        found = [sample[0] for sample in getattr(self.reader, "samples", ())]
        return [path for path in found if isinstance(path, str) and Path(path).is_file()]

    def name_of(self, index: int) -> str:
        return str(self.reader.filename(index, absolute=True))


def _visible_(reader: Any) -> Any:
    """A reader without hidden classes and files, if it reads a folder."""
    if not all(hasattr(reader, name) for name in ("root", "samples", "class_to_idx")):
        return reader
    names = sorted(reader.class_to_idx, key=reader.class_to_idx.get)
    shown = [name for name in names if not any(part.startswith(".") for part in Path(name).parts)]
    number = {reader.class_to_idx[name]: new for new, name in enumerate(shown)}
    reader.samples = [
        (path, number[label])
        for path, label in reader.samples
        if label in number and not _is_hidden(path, Path(reader.root))
    ]
    reader.class_to_idx = {name: new for new, name in enumerate(shown)}
    return reader


def _is_hidden(path: str, top: Path) -> bool:
    """Whether a file, or a folder below `top` that contains it, is hidden."""
    return any(part.startswith(".") for part in Path(path).relative_to(top).parts)
