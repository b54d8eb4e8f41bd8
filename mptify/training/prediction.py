"""Classify images with a ticket."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mptify.errors import DamagedTicket, MptifyError, first_line, shown
from mptify.runtime.loading import example_of, load
from mptify.runtime.packed_file import is_packed, open_packed
from mptify.ticket.codec import Ticket
from mptify.ticket.state import read
from mptify.training.images import read_image

__all__ = ["Prediction", "predict"]

# ImageNet's, which most networks were made for.
_MEAN, _DEVIATION = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one image, with probabilities, and its time in milliseconds."""

    path: Path
    labels: tuple[str, ...]
    chances: tuple[float, ...]
    ms: float


def predict(
    file: str | Path,
    pictures: list[Path],
    *,
    top: int = 5,
    runtime: str | None = None,
    threads: int | None = None,
) -> Iterator[Prediction]:
    """Classify images with a ticket file or a packed file, one by one.

    1/1 tickets run as packed programs unless `runtime` says otherwise. Without `threads`, either
    one thread or as many as torch has are used, whichever is faster at the moment.
    """
    ticket = open_packed(file).ticket if is_packed(file) else read(file)
    image = example_of(ticket)
    if ticket.architecture is None:
        raise MptifyError(
            f"{file}: holds a ticket of a model that no registry knows; mptify.load(path, "
            "model=...) loads it into yours."
        )
    if image is None:
        raise MptifyError(f"{file}: this network is not a classifier.")
    # Unreadable images are reported before anything runs.
    inputs = [_pixels(path, tuple(image.shape[1:]), ticket.notes.get("input")) for path in pictures]
    model = load(file, runtime=runtime or ("packed" if ticket.config.bits == "1/1" else None))
    names = _names(ticket)
    with torch.no_grad():
        model(image)  # warm up
        count = threads or _fastest(model, image)
    for path, one in zip(pictures, inputs, strict=True):
        with torch.no_grad(), _threads(count):
            start = time.perf_counter()
            chances = _logits(model(one), file).float().softmax(1)[0]
            ms = 1e3 * (time.perf_counter() - start)
        best = chances.topk(min(top, len(chances)))
        labels = tuple(names[i] if i < len(names) else f"class {i}" for i in best.indices.tolist())
        yield Prediction(path, labels, tuple(best.values.tolist()), ms)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fastest(model: Any, image: Tensor) -> int:
    """Choose one thread or as many as torch has; on a busy machine one can be far faster."""

    def seconds(count: int) -> float:
        times = []
        with _threads(count):
            for _ in range(3):
                start = time.perf_counter()
                model(image)
                times.append(time.perf_counter() - start)
        return min(times)

    most = torch.get_num_threads()
    return 1 if most == 1 else min((1, most), key=seconds)


def _pixels(path: Path, shape: tuple[int, ...], seen: Any) -> Tensor:
    """An image as the search saw its own: cropped to size, and normalized."""
    from torchvision.transforms import v2

    channels, height, width = shape
    if path.is_dir():
        raise MptifyError(f"{path}: is a folder; name its images: {path}/*.")
    try:
        picture = read_image(path, "RGB" if channels == 3 else "L")
    except Exception as error:  # Pillow's plugins raise any kind of error
        if isinstance(error, FileNotFoundError):
            raise MptifyError(f"{path}: there is no such file.") from None
        raise MptifyError(f"{path}: this image can't be read ({first_line(error)}).") from None
    if channels not in (1, 3):
        raise MptifyError(
            f"{path}: images have 1 or 3 channels, but this network takes {channels}."
        )
    # Small images are not cropped.
    shorter = round(max(height, width) / 0.875) if min(height, width) > 64 else max(height, width)
    cropped = v2.Compose(
        [
            v2.Resize(shorter, antialias=True),
            v2.CenterCrop((height, width)),
            v2.ToImage(),
            v2.ToPureTensor(),
        ]
    )
    by_channel = [torch.tensor(some).view(-1, 1, 1) for some in _normalization(seen, channels)]
    return ((cropped(picture).float() / 255 - by_channel[0]) / by_channel[1])[None]


def _normalization(seen: Any, channels: int) -> tuple[Any, Any]:
    """Mean and standard deviation of each channel, from the ticket's notes or ImageNet's."""
    if not isinstance(seen, dict) or not {"mean", "std"} & seen.keys():
        return _MEAN[:channels], _DEVIATION[:channels]
    found = (seen.get("mean"), seen.get("std"))
    for some in found:
        numbers = (
            isinstance(some, list)
            and len(some) == channels
            and all(isinstance(one, (int, float)) for one in some)
        )
        if not numbers:
            raise DamagedTicket(
                f"The ticket's notes normalize images by {shown(some)}; {channels} numbers are "
                "needed, one per channel."
            )
    return found


def _logits(output: Any, file: str | Path) -> Tensor:
    if not isinstance(output, Tensor) or output.dim() != 2:
        raise MptifyError(f"{file}: this network is not a classifier.")
    return output


def _names(ticket: Ticket) -> list[str]:
    labels = ticket.notes.get("labels")
    return [str(label) for label in labels] if isinstance(labels, list) else []
