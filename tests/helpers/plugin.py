"""A package of somebody else's: it registers one toy variant of each kind, and mptify does not know it."""

import numpy as np

from mptify.registry import init_schemes


@init_schemes.register("toy_uniform")
def toy_uniform(draw):
    """Magnitudes between half of the standard deviation and one and a half times it."""
    steps = draw.words(draw.count) >> np.uint64(40)  # 24 bits
    return (0.5 + steps.astype(np.float64) / 2**24) * draw.deviation
