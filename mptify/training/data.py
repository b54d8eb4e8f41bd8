"""Images for a search: small sets as uint8 in memory, augmented per batch on the device; large ones read by workers.

Which images a step sees, and how each is augmented, depends on seed, epoch and step alone: not on how many processes
share the work, and not on whether the run was interrupted before. The last batch of an epoch is never a small one: the
epoch is cut into batches of nearly equal size.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mptify.errors import BadData, first_line
from mptify.recipe import DataSpec

__all__ = ["Images", "as_images", "batches_of", "evaluation_batches", "load_data", "mixed", "training_batches"]

Batch = tuple[Tensor, Tensor]


@dataclass
class Images:
    """One split. In memory: `pixels` (uint8, images × channels × height × width) and `labels`. Else `files`, a map-style data set.

    The network sees pixels from 0 to 1, less `mean`, over `deviation` (one number per channel); a data set of the caller's
    own gives what the network sees, and these are empty.
    """

    labels: Tensor | None
    classes: int
    pixels: Tensor | None = None
    files: Dataset | None = None
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    crop: int = 0
    flip: bool = False
    workers: int = 0
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pixels if self.pixels is not None else self.files)  # type: ignore[arg-type]

    def shape(self) -> tuple[int, ...]:
        """Of one image, as the network sees it."""
        return tuple(self.pixels.shape[1:]) if self.pixels is not None else tuple(self.files[0][0].shape)  # type: ignore[index]


# -- batches ---------------------------------------------------------------------------------------------------------------


def batches_of(count: int, batch: int) -> int:
    """Steps in an epoch."""
    return -(-count // batch)


def training_batches(
    images: Images, batch: int, seed: int, epoch: int, *, first: int, rank: int, world: int, device: Any
) -> Iterator[Batch]:
    """This process's share of each batch of an epoch, from step `first` on. Each image is seen once, by one process."""
    generator = torch.Generator().manual_seed(mixed(seed, epoch))
    order = torch.randperm(len(images), generator=generator)
    steps = batches_of(len(images), batch)
    shares = [part[rank::world] for part in torch.tensor_split(order, steps)][first:]
    if images.pixels is None:
        yield from _from_files(images, shares, device, seed=mixed(seed, epoch))
        return
    height, width = images.pixels.shape[2:]
    offsets = torch.randint(0, 2 * images.crop + 1, (2, len(images)), generator=generator)
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    for share in shares:
        pixels = images.pixels[share].to(device, non_blocking=True)
        if images.crop:
            pixels = _cropped(pixels, offsets[0][share].to(device), offsets[1][share].to(device), images.crop, height, width)
        if images.flip:
            pixels = torch.where(mirrored[share].to(device)[:, None, None, None], pixels.flip(3), pixels)
        yield _normalized(pixels, images), _labels(images, share).to(device)


def evaluation_batches(images: Images, batch: int, *, rank: int, world: int, device: Any) -> Iterator[Batch]:
    """This process's share of all images, each of them once over all processes."""
    shares = torch.arange(rank, len(images), world).split(batch)
    if images.pixels is None:
        yield from _from_files(images, list(shares), device, seed=None)
        return
    for share in shares:
        yield _normalized(images.pixels[share].to(device, non_blocking=True), images), _labels(images, share).to(device)


def mixed(*numbers: int) -> int:
    """One seed from several numbers, the same everywhere."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _labels(images: Images, share: Tensor) -> Tensor:
    assert images.labels is not None
    return images.labels[share]


def _normalized(pixels: Tensor, images: Images) -> Tensor:
    mean = torch.tensor(images.mean, device=pixels.device).view(1, -1, 1, 1)
    deviation = torch.tensor(images.deviation, device=pixels.device).view(1, -1, 1, 1)
    return (pixels.float() / 255 - mean) / deviation


def _cropped(pixels: Tensor, down: Tensor, right: Tensor, padding: int, height: int, width: int) -> Tensor:
    """Each image cut from its padded version at a place of its own."""
    padded = torch.nn.functional.pad(pixels, (padding,) * 4)
    index = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    rows = (down[:, None] + torch.arange(height, device=pixels.device))[:, :, None]
    columns = (right[:, None] + torch.arange(width, device=pixels.device))[:, None, :]
    return padded.permute(0, 2, 3, 1)[index, rows, columns].permute(0, 3, 1, 2)


class _Seeded(Dataset):
    """A data set whose random transforms depend on which image it is, and not on which worker reads it."""

    def __init__(self, files: Any):
        self.files = files

    def __getitem__(self, place: tuple[int, int | None]) -> Any:
        index, seed = place
        if seed is None:
            return self.files[index]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mixed(seed, index))
            return self.files[index]


def _from_files(images: Images, shares: list[Tensor], device: Any, seed: int | None) -> Iterator[Batch]:
    places = [[(index, seed) for index in share.tolist()] for share in shares]
    loader = DataLoader(
        _Seeded(images.files),
        batch_sampler=places,  # type: ignore[arg-type]
        num_workers=images.workers,
        pin_memory=torch.device(device).type == "cuda",
    )
    for pixels, labels in loader:
        yield pixels.to(device, non_blocking=True), torch.as_tensor(labels).to(device)


# -- where images come from ------------------------------------------------------------------------------------------------


def load_data(spec: DataSpec) -> tuple[Images, Images]:
    """Training and validation images; whatever is wrong with them is said here, before the first step."""
    kind, _, place = spec.source.partition(":")
    makers: dict[str, Any] = {
        "digits": _digits, "arrays": _arrays, "cifar10": _cifar, "cifar100": _cifar, "imagefolder": _folders, "imagenet": _folders,
        "timm": _timm,
    }  # fmt: skip
    if kind not in makers:
        raise BadData(f"data.source={spec.source!r}: there are {', '.join(makers)}; for instance imagefolder:photos.")
    train, val = makers[kind](spec, place)
    train, val = _shortened(train, spec.train_images), _shortened(val, spec.val_images)
    if train.shape() != val.shape():
        raise BadData(f"{spec.source}: training images are {_sizes(train.shape())}, those for validation {_sizes(val.shape())}.")
    if train.classes != val.classes:
        raise BadData(f"{spec.source}: {train.classes} classes to train with, {val.classes} to validate with.")
    train.crop, train.flip = spec.crop, spec.flip
    if train.pixels is None and (spec.crop or spec.flip):
        raise BadData(f"{spec.source}: data.crop and data.flip are for images in memory; those from files are cropped and flipped anyway.")
    return train, val


def as_pair(train: Any, val: Any) -> tuple[Images, Images]:
    """What `mptify.search` is given, as images; those in memory are normalized by what the training images are like."""
    pair = as_images(train, "train"), as_images(val, "val")
    if not isinstance(val, Images) and pair[0].mean and pair[1].mean:
        pair[1].mean, pair[1].deviation = pair[0].mean, pair[0].deviation
    if pair[0].shape() != pair[1].shape():
        raise BadData(f"Training images are {_sizes(pair[0].shape())}, those for validation {_sizes(pair[1].shape())}.")
    return pair


def as_images(data: Any, what: str) -> Images:
    """What `mptify.search` is given: a pair (images, labels) of arrays, a map-style data set, or `Images`."""
    if isinstance(data, Images):
        return data
    if isinstance(data, DataLoader):
        raise BadData(f"{what}: pass the data set, not a DataLoader; a search makes its own batches, to go on in the middle of an epoch.")
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return _checked_pixels(np.asarray(data[0]), np.asarray(data[1]), what)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise BadData(f"{what}: a pair (images, labels) or a data set with a length is needed, not {type(data).__name__}.")
    if not len(data):
        raise BadData(f"{what}: the data set is empty.")
    classes = len(data.classes) if hasattr(data, "classes") else 1 + max(int(data[index][1]) for index in range(len(data)))
    return Images(labels=None, classes=classes, files=data)


def _digits(spec: DataSpec, place: str) -> tuple[Images, Images]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    order = np.random.RandomState(0).permutation(len(pixels))
    held = order[: len(order) // 5]
    kept = order[len(order) // 5 :]
    return _pair([(pixels[part], digits.target[part]) for part in (kept, held)], "digits", tuple(str(digit) for digit in range(10)))


def _arrays(spec: DataSpec, place: str) -> tuple[Images, Images]:
    path = Path(place)
    if not path.is_file():
        raise BadData(f"{spec.source}: there is no file {place!r}.")
    keys = ("x_train", "y_train", "x_test", "y_test")
    try:
        with path.open("rb") as file, np.load(file) as arrays:  # np.load would not close a file that it can't read
            missing = [key for key in keys if key not in arrays]
            found = [] if missing else [arrays[key] for key in keys]
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise BadData(f"{place}: this is no .npz file of arrays.") from error
    if missing:
        raise BadData(f"{place}: has no {missing[0]}; x_train, y_train, x_test and y_test are needed.")
    return _pair([(found[0], found[1]), (found[2], found[3])], place)


def _cifar(spec: DataSpec, place: str) -> tuple[Images, Images]:
    import torchvision

    kind = spec.source.partition(":")[0]
    maker = torchvision.datasets.CIFAR10 if kind == "cifar10" else torchvision.datasets.CIFAR100
    folder = place or "data"
    try:
        splits = [maker(folder, train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError):
        raise BadData(
            f"{spec.source}: {folder!r} holds no {kind}; torchvision.datasets.{maker.__name__}({folder!r}, download=True) fetches it."
        ) from None
    return _pair([(split.data, np.asarray(split.targets)) for split in splits], spec.source, tuple(splits[0].classes))


def _pair(splits: list[tuple[np.ndarray, np.ndarray]], what: str, names: tuple[str, ...] = ()) -> tuple[Images, Images]:
    train, val = (_checked_pixels(pixels, labels, what) for pixels, labels in splits)
    classes = max(train.classes, val.classes)
    for split in (train, val):  # both are normalized by what the training images are like
        split.classes, split.mean, split.deviation, split.names = classes, train.mean, train.deviation, names
    return train, val


def _checked_pixels(pixels: np.ndarray, labels: np.ndarray, what: str) -> Images:
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.ndim != 4 or pixels.dtype != np.uint8:
        raise BadData(
            f"{what}: images are uint8 of shape images × height × width × channels, not {pixels.dtype} of {_sizes(pixels.shape)}."
        )
    if not len(pixels) or len(pixels) != labels.size:
        raise BadData(f"{what}: {len(pixels)} images and {labels.size} labels.")
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise BadData(f"{what}: labels are whole numbers from 0, not {labels.dtype} such as {labels.flat[labels.argmin()]!s}.")
    if pixels.shape[1] in (1, 3) and pixels.shape[3] not in (1, 3, 4):
        pixels = pixels.transpose(0, 2, 3, 1)
    values = torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))
    sample = values[:: max(1, len(values) // 10_000)].double() / 255
    deviation = sample.std(dim=(0, 2, 3)).clamp_min(1e-3)
    return Images(
        labels=torch.from_numpy(labels.reshape(-1).astype(np.int64)),
        classes=int(labels.max()) + 1,
        pixels=values,
        mean=tuple(sample.mean(dim=(0, 2, 3)).tolist()),
        deviation=tuple(deviation.tolist()),
    )


def _shortened(images: Images, count: int | None) -> Images:
    if count is None or count >= len(images):
        return images
    if images.pixels is not None and images.labels is not None:
        images.pixels, images.labels = images.pixels[:count], images.labels[:count]
    else:
        from torch.utils.data import Subset

        images.files = Subset(images.files, range(count))  # type: ignore[arg-type]
    return images


def _sizes(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


# -- folders and timm's data sets ------------------------------------------------------------------------------------------

_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _transforms(size: int) -> tuple[Any, Any]:
    from torchvision.transforms import v2

    end = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _DEVIATION)]
    train = v2.Compose([v2.RGB(), v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(), *end])
    val = v2.Compose([v2.RGB(), v2.Resize(round(size / 0.875), antialias=True), v2.CenterCrop(size), *end])
    return train, val


def _folders(spec: DataSpec, place: str) -> tuple[Images, Images]:
    from torchvision.datasets import ImageFolder

    root = Path(place)
    if not place:
        raise BadData(f"{spec.source}: which folder? Write {spec.source}:FOLDER.")
    if not root.is_dir():
        raise BadData(f"{spec.source}: there is no folder {place!r}.")
    found = []
    for part, transform in zip((("train",), ("val", "validation", "test")), _transforms(spec.size or 224), strict=True):
        folder = next((root / name for name in part if (root / name).is_dir()), None)
        if folder is None:
            raise BadData(f"{place}: has no folder {part[0]!r}; it needs train/<class>/<image> and val/<class>/<image>.")
        try:
            files = ImageFolder(str(folder), transform)
        except FileNotFoundError as error:
            raise BadData(f"{folder}: {str(error).split('. ')[0]}.") from None
        _check_files([path for path, _ in files.samples])
        found.append(files)
    if found[0].classes != found[1].classes:
        odd = sorted(set(found[0].classes) ^ set(found[1].classes))
        raise BadData(f"{place}: training and validation don't have the same classes; {odd[0]!r} is in one of them only.")
    return _from_sets(found, len(found[0].classes), spec, tuple(found[0].classes))


def _check_files(paths: list[str]) -> None:
    """A broken image should be told now, not after an hour: each is read if there are up to 5,000, else the headers of 20,000."""
    from PIL import Image

    whole = len(paths) <= 5_000
    for path in paths[:: max(1, len(paths) // 20_000)]:
        try:
            with Image.open(path) as image:
                image.load() if whole else image.verify()
        except Exception as error:  # Pillow's plugins raise whatever they like
            raise BadData(f"{path}: this is no image that can be read ({type(error).__name__}).") from None


def _timm(spec: DataSpec, place: str) -> tuple[Images, Images]:
    import timm.data

    name, _, root = place.partition(":")
    found = []
    for split, transform in zip(("train", "validation"), _transforms(spec.size or 224), strict=True):
        try:
            files = timm.data.create_dataset(name, root=root or "data", split=split, is_training=split == "train", download=False)
        except Exception as error:  # of whatever library stands behind the name
            raise BadData(f"{spec.source}: timm can't open it ({first_line(error)}).") from None
        if not hasattr(files, "__len__") or not hasattr(files, "__getitem__"):
            raise BadData(f"{spec.source}: streams have no length; a search needs a data set whose images can be numbered.")
        files.transform = transform
        found.append(files)
    names = [getattr(files, "classes", None) for files in found]
    if names[0] is not None:
        return _from_sets(found, len(names[0]), spec)
    labels = [files.reader.samples[index][1] for files in found for index in range(len(files))]
    return _from_sets(found, 1 + max(labels), spec)


def _from_sets(found: list[Any], classes: int, spec: DataSpec, names: tuple[str, ...] = ()) -> tuple[Images, Images]:
    workers = min(spec.workers, os.cpu_count() or 1)
    shared: dict[str, Any] = {"workers": workers, "names": names, "mean": _MEAN, "deviation": _DEVIATION}
    train, val = (Images(labels=None, classes=classes, files=files, **shared) for files in found)
    return train, val
