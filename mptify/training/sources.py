"""Data sources: load and check the images that `data.source` names."""

from __future__ import annotations

import copy
import os
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, Subset

from mptify.config import DataConfig
from mptify.errors import BadData, first_line
from mptify.registry import data_sources
from mptify.training.data import Images, as_images, checked_pixels, require_classes, sizes
from mptify.training.images import plain, read_image

__all__ = ["from_files", "is_in_files", "load_data"]


def load_data(config: DataConfig, *, only_val: bool = False) -> tuple[Images, Images]:
    """Load training and validation images.

    Args:
        config: Source, sizes and augmentation.
        only_val: Whether training images may be missing; validation images then replace them.

    Raises:
        BadConfig: There is no such source.
        BadData: The source has no such images, or they do not fit the settings.
    """
    name, _, place = config.source.partition(":")
    source = data_sources[name]
    in_files = is_in_files(config.source)
    if in_files and (config.crop or config.flip):
        raise BadData(
            f"{config.source}: data.crop and data.flip are for images in memory; those from files "
            "are cropped and flipped anyway."
        )
    if not in_files and config.size is not None:
        raise BadData(
            f"{config.source}: data.size is for images from files; those in memory are taken as "
            "they are."
        )
    train, val = source(
        config, place, ("val",) if only_val and not config.holdout else ("train", "val")
    )
    train, val = as_images(train, config.source), as_images(val, config.source)
    if not in_files and config.crop >= min(train.shape()[1:]):
        raise BadData(
            f"data.crop={config.crop}: images of {sizes(train.shape())} can be shifted by fewer "
            "pixels than they have."
        )
    if config.holdout is not None:
        train, val = _held_out(train, val, config.holdout)
    train, val = _shortened(train, config.train_images), _shortened(val, config.val_images)
    if train.shape() != val.shape():
        raise BadData(
            f"{config.source}: training images are {sizes(train.shape())}, those for validation "
            f"{sizes(val.shape())}."
        )
    if train.classes != val.classes:
        raise BadData(
            f"{config.source}: {train.classes} classes to train with, {val.classes} to validate "
            "with."
        )
    if not only_val:
        require_classes(train, config.source)
    train.crop, train.flip = config.crop, config.flip
    return train, val


def from_files(source: Any) -> Any:
    """Mark a source that reads files and crops them to `data.size`."""
    source.from_files = True
    return source


def is_in_files(source: str) -> bool:
    """Whether a source reads files and crops them to `data.size`."""
    return getattr(data_sources[source.partition(":")[0]], "from_files", False)


@data_sources.register("digits")
def digits(config: DataConfig, place: str, splits: tuple[str, ...]) -> tuple[Images, Images]:
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.round(found.images * (255 / 16)).astype(np.uint8)[..., None]
    order = np.random.RandomState(0).permutation(len(pixels))
    held = order[: len(order) // 5]
    kept = order[len(order) // 5 :]
    return _pair(
        [(pixels[part], found.target[part]) for part in (kept, held)],
        "digits",
        tuple(str(digit) for digit in range(10)),
    )


@data_sources.register("arrays")
def arrays(config: DataConfig, place: str, splits: tuple[str, ...]) -> tuple[Images, Images]:
    path = Path(place)
    if not path.is_file():
        raise BadData(f"{config.source}: there is no file {place!r}.")
    keys = ("x_train", "y_train", "x_test", "y_test")
    try:
        # Np.load does not close a file that it can't read.
        with path.open("rb") as file, np.load(file) as loaded:
            missing = [key for key in keys if key not in loaded]
            found = [] if missing else [loaded[key] for key in keys]
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise BadData(f"{place}: this is not an .npz file of arrays.") from error
    if missing:
        raise BadData(
            f"{place}: has no {missing[0]}; x_train, y_train, x_test and y_test are needed."
        )
    return _pair([(found[0], found[1]), (found[2], found[3])], place)


@data_sources.register("cifar10")
@data_sources.register("cifar100")
def cifar(config: DataConfig, place: str, splits: tuple[str, ...]) -> tuple[Images, Images]:
    import torchvision

    kind = config.source.partition(":")[0]
    maker = torchvision.datasets.CIFAR10 if kind == "cifar10" else torchvision.datasets.CIFAR100
    folder = place or "data"
    try:
        found = [maker(folder, train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError):
        raise BadData(
            f"{config.source}: {folder!r} holds no {kind}; torchvision.datasets.{maker.__name__}"
            f"({folder!r}, download=True) fetches it."
        ) from None
    return _pair(
        [(split.data, np.asarray(split.targets)) for split in found],
        config.source,
        tuple(found[0].classes),
    )


def _pair(
    splits: list[tuple[np.ndarray, np.ndarray]], what: str, names: tuple[str, ...] = ()
) -> tuple[Images, Images]:
    train, val = (checked_pixels(pixels, labels, what) for pixels, labels in splits)
    classes = max(train.classes, val.classes)
    for split in (train, val):  # both are normalized by the training images
        split.classes, split.mean, split.std, split.names = (classes, train.mean, train.std, names)
    return train, val


def _held_out(train: Images, val: Images, count: int) -> tuple[Images, Images]:
    """Split off the last `count` training images for validation."""
    rest = len(train) - count
    if rest < 1:
        raise BadData(f"data.holdout={count}: there are only {len(train)} training images.")
    if train.pixels is None:
        files = copy.copy(train.files)
        files.transform = val.files.transform  # type: ignore[union-attr]
        held = _chosen(replace(train, files=files), slice(rest, None))
    else:
        held = _chosen(train, slice(rest, None))
    return _chosen(train, slice(rest)), held


def _shortened(images: Images, count: int | None) -> Images:
    return images if count is None or count >= len(images) else _chosen(images, slice(count))


def _chosen(images: Images, part: slice) -> Images:
    """A part of the images; those from folders, which are sorted by class, in random order."""
    if images.pixels is not None and images.labels is not None:
        return replace(images, pixels=images.pixels[part], labels=images.labels[part])
    order = np.random.RandomState(0).permutation(len(images))[part]
    return replace(images, files=Subset(images.files, order.tolist()))  # type: ignore[arg-type]


# -- folders and timm's data sets ------------------------------------------------------------------

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _transforms(size: int) -> dict[str, Any]:
    """Convert to uint8, a quarter of the bytes to pass from a worker."""
    from torchvision.transforms import v2

    end = [v2.ToImage(), v2.ToPureTensor()]
    return {
        "train": v2.Compose(
            [plain, v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(), *end]
        ),
        "val": v2.Compose(
            [plain, v2.Resize(round(size / 0.875), antialias=True), v2.CenterCrop(size), *end]
        ),
    }


@data_sources.register("imagefolder")
@data_sources.register("imagenet")
@from_files
def image_folder(config: DataConfig, place: str, splits: tuple[str, ...]) -> tuple[Images, Images]:
    """A folder with a subfolder of images per class."""
    from mptify.training.folders import Folder

    root = Path(place)
    if not place:
        raise BadData(f"{config.source}: which folder? Write {config.source}:FOLDER.")
    if not root.is_dir():
        raise BadData(f"{config.source}: there is no folder {place!r}.")
    found = []
    for split in splits:
        names = ("train",) if split == "train" else ("val", "validation", "test")
        folder = next((root / name for name in names if (root / name).is_dir()), None)
        if folder is None:
            hint = (
                f" Did you mean {root.parent}?"
                if root.name in ("train", "val") and (root.parent / "train").is_dir()
                else ""
            )
            raise BadData(
                f"{place}: has no folder {split!r}; it needs train/<class>/<image> and "
                f"val/<class>/<image>.{hint}"
            )
        try:
            files = Folder(folder, _transforms(config.size or 224)[split])
        except FileNotFoundError as error:
            raise BadData(f"{folder}: {str(error).split('. ')[0]}.") from None
        found.append(files)
    _require_same_classes(place, [files.classes for files in found])
    _check_files([path for files in found for path, _ in files.samples])
    return _from_sets(found, len(found[0].classes), tuple(found[0].classes), config)


def _require_same_classes(what: str, splits: list[Any]) -> None:
    train, val = splits[0], splits[-1]
    if train != val:
        odd = sorted(set(train) ^ set(val))
        which = f"{odd[0]!r} is in one of them only" if odd else "they come in another order"
        raise BadData(f"{what}: training and validation don't have the same classes; {which}.")


def _check_files(paths: list[str]) -> None:
    """Find broken images before the search: read up to 10,000, else the headers of 40,000."""
    from PIL import Image, UnidentifiedImageError

    whole = len(paths) <= 10_000
    looked = paths[:: max(1, len(paths) // 40_000)]
    broken = []
    for path in looked:
        try:
            if whole:
                read_image(path)
            else:
                with Image.open(path) as image:
                    image.verify()
        except Exception as error:  # Pillow's plugins raise any kind of error
            reason = "no image" if isinstance(error, UnidentifiedImageError) else first_line(error)
            broken.append(f"{path} ({reason})")
    if broken:
        more = f" and {len(broken) - _MOST_NAMED:,} more" if len(broken) > _MOST_NAMED else ""
        raise BadData(
            f"{len(broken):,} of {len(looked):,} images can't be read: "
            f"{', '.join(broken[:_MOST_NAMED])}{more}."
        )


_MOST_NAMED = 10
_TIMM_FOLDERS = ("folder", "imagefolder", "image_folder", "imagenet")


@data_sources.register("timm")
@from_files
def timm_dataset(config: DataConfig, place: str, splits: tuple[str, ...]) -> tuple[Images, Images]:
    """A data set that timm opens."""
    import timm.data

    from mptify.training.folders import ReaderFiles

    name, _, root = place.partition(":")
    if name not in _TIMM_FOLDERS and "/" not in name:  # timm would take any other name for a folder
        hint = f"{config.source.partition(':')[0]}:folder:{root or 'FOLDER'}"
        raise BadData(
            f"{config.source}: {name!r} is not a data set of timm; write {hint}, or such as "
            "timm:torch/cifar10:FOLDER."
        )
    found = []
    for split in splits:
        timms = "train" if split == "train" else "validation"
        try:
            files = timm.data.create_dataset(
                name, root=root or "data", split=timms, is_training=split == "train", download=False
            )
        except Exception as error:  # any error of the library behind the name
            raise BadData(f"{config.source}: timm can't open it ({first_line(error)}).") from None
        if isinstance(files, IterableDataset) or not hasattr(files, "__len__"):
            raise BadData(
                f"{config.source}: streams have no length; a search needs a map-style data set."
            )
        transform = _transforms(config.size or 224)[split]
        if isinstance(files, timm.data.ImageDataset):
            files = ReaderFiles(files.reader, transform)
        else:
            files.transform = transform
        found.append(files)
    _check_files([path for files in found for path in getattr(files, "paths", ())])
    names = _names_of(found, config)
    return _from_sets(found, len(names) or _classes_of(found, config), names, config)


def _names_of(found: list[Any], config: DataConfig) -> tuple[str, ...]:
    """The class names of a data set that timm opened; empty if it has none."""
    readers = [getattr(files, "reader", files) for files in found]
    for key in ("class_to_idx", "classes"):
        if all(getattr(reader, key, None) for reader in readers):
            named = [getattr(reader, key) for reader in readers]
            _require_same_classes(config.source, named)
            return tuple(
                map(
                    str,
                    sorted(named[0], key=named[0].__getitem__)
                    if isinstance(named[0], dict)
                    else named[0],
                )
            )
    return ()


def _classes_of(found: list[Any], config: DataConfig) -> int:
    readers: list[Any] = [getattr(files, "reader", files) for files in found]
    if not all(hasattr(reader, "samples") for reader in readers):
        raise BadData(
            f"{config.source}: does not say how many classes it has; imagefolder:FOLDER reads a "
            "folder of images."
        )
    return 1 + max(label for reader in readers for _, label in reader.samples)


def _from_sets(
    found: list[Any], classes: int, names: tuple[str, ...], config: DataConfig
) -> tuple[Images, Images]:
    shared: dict[str, Any] = {
        "workers": min(config.workers, os.cpu_count() or 1),
        "names": names,
        "mean": _MEAN,
        "std": _STD,
    }
    train, val = (
        Images(labels=None, classes=classes, files=files, **shared)
        for files in (found[0], found[-1])
    )
    return train, val
