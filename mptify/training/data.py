"""Images for a search: small sets in memory, augmented on the device; large ones read by workers.

Which images a step sees, and how each is augmented, depends on seed, epoch and step alone: not on
the number of processes, nor on interruptions. An epoch is split into batches of nearly equal size,
so that its last batch is not small.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from mptify.errors import BadData, first_line, shown
from mptify.training.items import as_array, checked_item, checked_labels, sizes
from mptify.training.signals import init_worker_signals, sigterm_blocked

__all__ = [
    "Images", "as_images", "as_pair", "batches_of", "checked_pixels", "evaluation_batches",
    "first_images", "images_in_step", "mixed", "require_classes", "sizes", "training_batches",
]  # fmt: skip

Batch = tuple[Tensor, Tensor]


@dataclass
class Images:
    """One split of a data set.

    Attributes:
        pixels: Images in memory: uint8, images × channels × height × width.
        labels: Their labels.
        files: A map-style data set, instead of images in memory.
        mean: The mean of each channel, of pixels from 0 to 1. Empty for a caller's own data set,
            which returns normalized images.
        std: The standard deviation of each channel.
        numbers: The network's class for each class of the files, where they are numbered otherwise.
    """

    labels: Tensor | None
    classes: int
    pixels: Tensor | None = None
    files: Dataset | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    crop: int = 0
    flip: bool = False
    workers: int = 0
    names: tuple[str, ...] = ()
    numbers: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels if self.pixels is not None else self.files)  # type: ignore[arg-type]

    def shape(self) -> tuple[int, ...]:
        """The shape of one image, as the network sees it."""
        if self.pixels is not None:
            return tuple(self.pixels.shape[1:])
        assert self.files is not None
        return tuple(self.files[0][0].shape)


# -- batches ---------------------------------------------------------------------------------------


def batches_of(count: int, batch: int) -> int:
    """The number of steps in an epoch."""
    return -(-count // batch)


def images_in_step(count: int, steps: int, step: int) -> int:
    """The number of images in one of the epoch's batches."""
    return count // steps + (step < count % steps)


def training_batches(
    images: Images,
    batch: int,
    seed: int,
    epoch: int,
    *,
    first: int,
    rank: int,
    world: int,
    device: Any,
) -> Iterator[Batch]:
    """This process's share of each batch, from step `first` on; each image is seen once."""
    generator = torch.Generator().manual_seed(mixed(seed, epoch))
    order = torch.randperm(len(images), generator=generator)
    steps = batches_of(len(images), batch)
    shares = [part[rank::world] for part in torch.tensor_split(order, steps)][first:]
    if images.pixels is None:
        yield from _from_files(images, shares, device, seed=mixed(seed, epoch))
        return
    offsets = torch.randint(0, 2 * images.crop + 1, (2, len(images)), generator=generator)
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    for share in shares:
        pixels = images.pixels[share].to(device, non_blocking=True)
        if images.crop:
            pixels = _cropped(
                pixels, offsets[0][share].to(device), offsets[1][share].to(device), images
            )
        if images.flip:
            pixels = torch.where(
                mirrored[share].to(device)[:, None, None, None], pixels.flip(3), pixels
            )
        yield _normalized(pixels, images), _labels(images, share).to(device)


def evaluation_batches(
    images: Images, batch: int, *, rank: int, world: int, device: Any
) -> Iterator[Batch]:
    """This process's share of all images, each seen once over all processes."""
    shares = torch.arange(rank, len(images), world).split(batch)
    if images.pixels is None:
        yield from _from_files(images, list(shares), device, seed=None)
        return
    for share in shares:
        yield (
            _normalized(images.pixels[share].to(device, non_blocking=True), images),
            _labels(images, share).to(device),
        )


def first_images(images: Images, count: int, device: Any) -> Tensor:
    """The first few images, as evaluation sees them."""
    share = torch.arange(min(count, len(images)))
    if images.pixels is None:
        return next(_from_files(replace(images, workers=0), [share], device, seed=None))[0]
    return _normalized(images.pixels[share].to(device), images)


def mixed(*numbers: int) -> int:
    """One seed from several numbers, the same on every machine."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _labels(images: Images, share: Tensor) -> Tensor:
    assert images.labels is not None
    return images.labels[share]


def _normalized(pixels: Tensor, images: Images) -> Tensor:
    mean = torch.tensor(images.mean, device=pixels.device).view(1, -1, 1, 1)
    std = torch.tensor(images.std, device=pixels.device).view(1, -1, 1, 1)
    return (pixels.float() / 255 - mean) / std


def _cropped(pixels: Tensor, down: Tensor, right: Tensor, images: Images) -> Tensor:
    """Shift each image by its own random amount, with mirrored borders.

    A border of one colour would be the most striking feature of an image, and no validation image
    has one.
    """
    index = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    rows, columns = (
        _mirrored(shift[:, None] - images.crop + torch.arange(size, device=pixels.device), size)
        for shift, size in zip((down, right), pixels.shape[2:], strict=True)
    )
    return pixels.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )


def _mirrored(place: Tensor, size: int) -> Tensor:
    """Indices outside [0, size), reflected at its ends."""
    return size - 1 - (size - 1 - place.abs()).abs()


class _Seeded(Dataset):
    """A data set whose random transforms depend on the image, not on the worker that reads it."""

    def __init__(self, files: Any, classes: int):
        self.files, self.classes = files, classes
        self.first: tuple[str, tuple[int, ...]] | None = (
            None  # name and size of the image that was read first
        )

    def __getitem__(self, place: tuple[int, int | None]) -> Any:
        index, seed = place
        try:
            with contextlib.nullcontext() if seed is None else _randomness_from(mixed(seed, index)):
                item = checked_item(self.files[index], self.classes)
            self._require_one_size(tuple(item[0].shape), index)
            return item
        except BadData as error:
            return _Unreadable(f"{_name_of(self.files, index)}: {error}")
        except (
            Exception
        ) as error:  # any error of an image reader; a worker would wrap it into a traceback
            return _Unreadable(
                f"{_name_of(self.files, index)}: can't be read ({first_line(error)})."
            )

    def _require_one_size(self, shape: tuple[int, ...], index: int) -> None:
        self.first = self.first or (_name_of(self.files, index), shape)
        if shape != self.first[1]:
            raise BadData(
                f"is {sizes(shape)}, and {self.first[0]} is {sizes(self.first[1])}; all must have "
                "one size."
            )


@dataclass(frozen=True)
class _Unreadable:
    """An image that could not be read, on its way from a worker."""

    text: str


@contextlib.contextmanager
def _randomness_from(seed: int) -> Iterator[None]:
    """Seed the generators that transforms use, and restore them afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _name_of(files: Any, index: int) -> str:
    files, index = _behind_subsets(files, index)
    if hasattr(files, "name_of"):
        return files.name_of(index)
    samples = getattr(files, "samples", None)
    return str(samples[index][0]) if samples is not None else f"image {index}"


def _behind_subsets(files: Any, index: int = 0) -> tuple[Any, int]:
    """The data set below torch's `Subset`s, and the indices of its images."""
    while isinstance(files, Subset):
        files, index = files.dataset, files.indices[index]
    return files, index


def _together(items: list[Any]) -> Any:
    return next((item for item in items if isinstance(item, _Unreadable)), None) or default_collate(
        items
    )


def _from_files(
    images: Images, shares: Iterable[Tensor], device: Any, seed: int | None
) -> Iterator[Batch]:
    places = [[(index, seed) for index in share.tolist()] for share in shares]
    loader = DataLoader(
        _Seeded(images.files, images.classes if images.numbers is None else len(images.numbers)),
        batch_sampler=places,  # type: ignore[arg-type]
        num_workers=images.workers,
        collate_fn=_together,
        worker_init_fn=init_worker_signals,
        pin_memory=torch.device(device).type == "cuda",
    )
    with sigterm_blocked():
        batches = iter(loader)
    try:
        for batch in batches:
            if isinstance(batch, _Unreadable):
                raise BadData(batch.text)
            labels = torch.as_tensor(batch[1])
            labels = labels if images.numbers is None else images.numbers[labels]
            pixels, labels = batch[0].to(device, non_blocking=True), labels.to(device)
            yield _normalized(pixels, images) if images.mean else pixels, labels
    finally:
        del batches  # ends its processes, also if an exception keeps this frame alive


# -- what the caller gives -------------------------------------------------------------------------


def as_pair(train: Any, val: Any, workers: int = 0) -> tuple[Images, Images]:
    """The caller's data as images; those in memory are normalized by the training images."""
    pair = as_images(train, "train", workers), as_images(val, "val", workers)
    if not isinstance(val, Images) and pair[0].mean and pair[1].mean:
        pair[1].mean, pair[1].std = pair[0].mean, pair[0].std
    require_classes(pair[0], "train")
    if pair[0].shape() != pair[1].shape():
        raise BadData(
            f"Training images are {sizes(pair[0].shape())}, those for validation "
            f"{sizes(pair[1].shape())}."
        )
    return pair


def require_classes(images: Images, what: str) -> None:
    """Raise unless there are at least two classes."""
    count = images.classes if images.labels is None else len(images.labels.unique())
    if count < 2:
        raise BadData(f"{what}: all images are of one class; a search needs at least two classes.")


def as_images(data: Any, what: str, workers: int = 0) -> Images:
    """The caller's data: a pair (images, labels) of arrays, a map-style data set, or `Images`."""
    if isinstance(data, Images):
        return data
    if isinstance(data, DataLoader):
        raise BadData(
            f"{what}: pass the data set, not a DataLoader; a search makes its own batches, so that "
            "it can resume within an epoch."
        )
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return checked_pixels(data[0], data[1], what)
    if (
        isinstance(data, (IterableDataset, str, Tensor, np.ndarray))
        or not hasattr(data, "__getitem__")
        or not hasattr(data, "__len__")
    ):
        hint = (
            f"; `mptify search --data imagefolder:{data}` reads a folder"
            if isinstance(data, str)
            else ""
        )
        raise BadData(
            f"{what}: a pair (images, labels) or a data set with a length and numbers is needed, "
            f"not a {type(data).__name__}{hint}."
        )
    if not len(data):
        raise BadData(f"{what}: the data set is empty.")
    _item(data, 0, what)
    return Images(labels=None, classes=_count_classes(data, what), files=data, workers=workers)


def _count_classes(data: Any, what: str) -> int:
    """The number of classes of a data set, from its attributes or by reading its labels."""
    whole, _ = _behind_subsets(data)
    if isinstance(getattr(whole, "classes", None), Sized):
        return len(whole.classes)
    targets = getattr(whole, "targets", None)
    if (
        targets is not None
        and np.ndim(targets) == 1
        and np.issubdtype(np.asarray(targets).dtype, np.integer)
    ):
        return 1 + int(max(targets))
    return 1 + max(_item(data, index, what)[1] for index in range(len(data)))


def _item(data: Any, index: int, what: str) -> tuple[Tensor, int]:
    """One item of the caller's data set; errors name `what`."""
    try:
        item = data[index]
    except Exception as error:  # any error of the data set
        raise BadData(f"{what}: image {index} can't be read ({first_line(error)}).") from error
    try:
        return checked_item(item, None)
    except BadData as error:
        raise BadData(f"{what}: image {index}: {error}") from None


def checked_pixels(images: Any, labels: Any, what: str) -> Images:
    """Images in memory, from the caller's arrays."""
    pixels = as_array(images, f"{what}: images")
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.ndim != 4 or pixels.dtype != np.uint8:
        got = f"{pixels.dtype} of {sizes(pixels.shape)}" if pixels.ndim else shown(images)
        raise BadData(
            f"{what}: images are uint8 of shape images × height × width × channels, not {got}."
        )
    if not pixels.size:
        raise BadData(f"{what}: there are no pixels in {sizes(pixels.shape)}.")
    labels = checked_labels(labels, len(pixels), what)
    if pixels.shape[1] in (1, 3) and pixels.shape[3] not in (1, 3, 4):
        pixels = pixels.transpose(0, 2, 3, 1)
    values = torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))
    mean, std = _statistics(values)
    return Images(
        labels=torch.from_numpy(labels),
        classes=int(labels.max()) + 1,
        pixels=values,
        mean=mean,
        std=std,
    )


def _statistics(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, over about 10,000 images."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in pixels[:: max(1, len(pixels) // 10_000)].unbind(1):
        counts = torch.bincount(channel.reshape(-1), minlength=256).double()
        mean = (counts * levels).sum() / counts.sum()
        variance = (counts * (levels - mean) ** 2).sum() / (counts.sum() - 1).clamp_min(1)
        means.append(float(mean))
        stds.append(max(float(variance.sqrt()), 1e-3))
    return tuple(means), tuple(stds)
