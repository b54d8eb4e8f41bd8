"""Check the caller's images and labels."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mptify.errors import BadData, first_line, shown

__all__ = ["as_array", "checked_item", "checked_labels", "shown", "sizes"]


def sizes(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def as_array(value: Any, what: str) -> np.ndarray:
    try:
        return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise BadData(f"{what}: can't be converted to an array ({first_line(error)}).") from None


def checked_labels(labels: Any, count: int, what: str) -> np.ndarray:
    """Check the labels of `count` images; return them as integers."""
    if labels is None:
        raise BadData(
            f"{what}: labels are whole numbers from 0, one per image, and these are None."
        )
    found = as_array(labels, f"{what}: labels")
    if found.ndim == 2 and found.shape[0] == count and found.shape[1] > 1:
        raise BadData(
            f"{what}: labels are one number per image, and these are {sizes(found.shape)}; if they "
            "are one-hot, pass labels.argmax(1)."
        )
    if found.size != count:
        plural = "" if found.size == 1 else "s"
        raise BadData(f"{what}: {count:,} images and {found.size:,} label{plural}.")
    found = found.reshape(-1)
    if np.issubdtype(found.dtype, np.floating):
        odd = next((label for label in found.tolist() if label != label // 1), found.tolist()[0])
        raise BadData(
            f"{what}: labels are whole numbers from 0, and these are {found.dtype}, such as {odd}."
        )
    if not np.issubdtype(found.dtype, np.integer) or found.min() < 0:
        place, label = next(
            (at for at in enumerate(found.tolist()) if not _is_label(at[1])), (0, found.tolist()[0])
        )
        raise BadData(
            f"{what}: labels are whole numbers from 0, and the {_ordinal(place)} is {shown(label)}."
        )
    return found.astype(np.int64)


def checked_item(item: Any, classes: int | None) -> tuple[Tensor, int]:
    """Check an item of a data set: a pair (tensor, label), with a label below `classes`."""
    if not isinstance(item, (tuple, list)) or len(item) != 2 or not isinstance(item[0], Tensor):
        raise BadData(f"each item must be a pair (tensor, label), and this is {_kind(item)}.")
    label = item[1].tolist() if isinstance(item[1], (Tensor, np.ndarray, np.generic)) else item[1]
    few = "from 0" if classes is None else f"from 0 to {classes - 1}"
    if isinstance(label, (list, tuple)):
        count = int(torch.as_tensor(item[1]).numel()) if isinstance(item[1], Tensor) else len(label)
        raise BadData(
            f"its label has {count:,} numbers; labels are whole numbers {few}, one per image."
        )
    if not _is_label(label) or (classes is not None and label >= classes):
        raise BadData(f"its label is {shown(label)}; labels are whole numbers {few}.")
    return item[0], int(label)


def _is_label(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0


def _kind(item: Any) -> str:
    if isinstance(item, (tuple, list)):
        if len(item) != 2:
            return f"a {type(item).__name__} of {len(item)}"
        return f"a pair that begins with a {type(item[0]).__name__}; a transform may be missing"
    return (
        f"a {type(item).__name__}; a transform may be missing"
        if isinstance(item, (int, str))
        else f"a {type(item).__name__}"
    )


def _ordinal(place: int) -> str:
    return ("first", "second", "third")[place] if place < 3 else f"{place + 1:,}th"
