"""The validation images that `mptify eval` and `mptify export` read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from mptify.config import DataConfig, checked
from mptify.errors import MptifyError
from mptify.recipe_files import with_settings
from mptify.ticket.codec import Ticket
from mptify.training.data import Images
from mptify.training.labels import as_seen, with_labels_of
from mptify.training.setup import classes_of
from mptify.training.sources import is_in_files, load_data

__all__ = ["labelled_as", "validation_images"]


def validation_images(
    file: Path, ticket: Ticket, source: str | None, changes: Sequence[str], most: int | None = None
) -> Images:
    """The validation images of a data set.

    Args:
        file: The ticket file.
        ticket: What it holds.
        source: The source of the images; None takes the data of the ticket's search.
        changes: Changes of the data's settings, such as `"size=192"`.
        most: How many images to take, if neither the search nor a change says so.
    """
    settings = _data_settings(ticket, source)
    if "source" not in settings:
        raise MptifyError(f"{file} does not say which data it was searched on; pass --data.")
    if settings.get("val_images") is None and most is not None:
        settings["val_images"] = most
    return load_data(checked(DataConfig, with_settings(settings, changes)), only_val=True)[1]


def labelled_as(images: Images, ticket: Ticket, model: nn.Module, device: str = "cpu") -> Images:
    """The images as the ticket's search normalized them and numbered their classes."""
    notes = ticket.notes
    return with_labels_of(as_seen(images, notes), notes, classes_of(model, images, device))


def _data_settings(ticket: Ticket, source: str | None) -> dict[str, Any]:
    """The settings of the ticket's search; for another source, only those that still apply."""
    recipe = ticket.notes.get("recipe")
    searched = recipe.get("data") if isinstance(recipe, dict) else None
    settings: dict[str, Any] = dict(searched) if isinstance(searched, dict) else {}
    if source is None:
        return settings
    settings = {"source": source} | {
        key: value for key, value in settings.items() if key == "workers"
    }
    seen = ticket.notes.get("input")
    shape = seen.get("shape") if isinstance(seen, dict) else None
    if is_in_files(source) and isinstance(shape, list) and shape:
        settings["size"] = shape[-1]
    return settings
