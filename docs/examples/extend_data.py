import numpy as np

from mptify.config import DataConfig
from mptify.registry import data_sources
from mptify.training.sources import load_data


@data_sources.register("stripes")
def stripes(config, place, splits):
    """Stripes along rows or columns; `stripes:200` makes 200 images."""
    count = int(place or 100)
    images = np.random.default_rng(0).integers(0, 60, (count, 8, 8, 1), np.uint8)
    labels = np.arange(count) % 2
    images[labels == 0, ::2] += 150
    images[labels == 1, :, ::2] += 150
    half = count // 2
    return (images[:half], labels[:half]), (images[half:], labels[half:])


train, val = load_data(DataConfig(source="stripes:200"))
print(len(train), "images to train with,", len(val), "to validate with")
