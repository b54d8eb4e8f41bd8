"""Read image files as 8-bit pixels. Nothing else in mptify opens an image."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np

__all__ = ["BACKGROUND", "plain", "read_image"]

BACKGROUND = 255  # the background of transparent images: white, as on most web pages


def read_image(file: str | Path | IO[bytes], mode: str = "RGB") -> Any:
    """Read an image as a `PIL.Image` of mode `"RGB"` or `"L"` (grey).

    EXIF rotation is applied, 16 bits are scaled to 8, and transparent parts become white. CMYK is
    converted as if inks were ideal; colour profiles are ignored. Of an animation, the first frame
    is read.

    Raises whatever Pillow raises for a file that it can't read.
    """
    from PIL import Image

    with Image.open(file) as opened:
        return plain(opened, mode)


def plain(image: Any, mode: str = "RGB") -> Any:
    """Convert an opened image to `"RGB"` or `"L"`, unless it is one already."""
    from PIL import ImageOps

    image = _eight_bits(ImageOps.exif_transpose(image))
    if any(band in "Aa" for band in image.getbands()) or "transparency" in image.info:
        image = _on_background(image)
    if image.mode == mode:
        return image
    return image.convert("RGB").convert(mode)  # not every mode converts to grey directly


def _eight_bits(image: Any) -> Any:
    """Scale grey levels of 16 or 32 bits to 8, where Pillow would clip them."""
    from PIL import Image

    if not image.mode.startswith("I") and image.mode != "F":
        return image
    values = np.asarray(image)
    white = 1.0 if image.mode == "F" else 65535.0
    if not (values.min() >= 0 and values.max() <= white):  # also false for NaN
        found = f"{values.min():g} to {values.max():g}"
        raise ValueError(f"grey levels from {found}, of which none is known to be white")
    grey = Image.fromarray(np.round(values * (255 / white)).astype(np.uint8))
    key = image.info.get("transparency")
    if isinstance(key, int):  # the transparent level, in 16 bits
        grey.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return grey


def _on_background(image: Any) -> Any:
    from PIL import Image

    layer = image.convert("RGBA")
    below = Image.new("RGBA", layer.size, (BACKGROUND,) * 3 + (255,))
    return Image.alpha_composite(below, layer).convert("RGB")
