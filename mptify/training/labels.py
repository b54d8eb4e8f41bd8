"""Match images to a ticket: normalize them and number their classes as its search did.

Classes are matched by name, since folders number their classes by what they contain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mptify.errors import BadData
from mptify.training.data import Images

__all__ = ["as_seen", "labels_in", "with_labels_of"]

_MOST_NAMED = 10


def labels_in(notes: Mapping[str, Any], classes: int) -> tuple[str, ...]:
    """The names of a ticket's classes, if its notes hold one for each."""
    labels = notes.get("labels")
    if not isinstance(labels, list) or len(labels) != classes:
        return ()
    return tuple(labels) if all(isinstance(label, str) for label in labels) else ()


def as_seen(images: Images, notes: Mapping[str, Any]) -> Images:
    """Normalize images as the search did, if the ticket's notes say how."""
    seen = notes.get("input")
    if not images.mean or not isinstance(seen, dict):
        return images
    found = [seen.get(key) for key in ("mean", "std")]
    for one in found:
        if not isinstance(one, list) or len(one) != len(images.mean):
            return images
        if not all(isinstance(value, (int, float)) for value in one):
            return images
    mean, std = (tuple(float(value) for value in one) for one in found if one is not None)
    return replace(images, mean=mean, std=std)


def with_labels_of(images: Images, notes: Mapping[str, Any], classes: int) -> Images:
    """Number the classes of images as a ticket's network does.

    Classes are matched by name; the data may have some of them, in any order. If either side has no
    names, numbers are compared: labels without names are taken as the network's own, and a folder
    must have as many classes as the network.

    Raises:
        BadData: The data has classes that the ticket does not know, or another number of classes.
    """
    known = labels_in(notes, classes)
    if not known or not images.names:
        if images.classes > classes or (images.names and images.classes < classes):
            count = f"The data has {images.classes} classes, and the network tells {classes} apart"
            raise BadData(f"{count}; the ticket has no names to match them by.")
        return images
    if images.names == known:
        return images
    unknown = [name for name in images.names if name not in known]
    if unknown:
        raise BadData(
            f"The data has classes that the ticket does not know: {_listed(unknown)}; "
            f"the ticket's are {_listed(known)}. Rename them or leave them out."
        )
    twice = next((name for name in images.names if known.count(name) > 1), None)
    if twice is not None:
        raise BadData(f"{twice!r} is the name of two of the ticket's classes; which one is meant?")
    numbers = torch.tensor([known.index(name) for name in images.names])
    found = replace(images, classes=len(known), names=known)
    if images.labels is not None:
        return replace(found, labels=numbers[images.labels])
    return replace(found, numbers=numbers)


def _listed(names: Any) -> str:
    shown = ", ".join(map(repr, names[:_MOST_NAMED]))
    return shown + (f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else "")
