import numpy as np

import mptify
from mptify.models import conv4
from mptify.registry import init_schemes


@init_schemes.register("two_sizes")
def two_sizes(draw):
    """Half of the magnitudes are 0.5, half are 1.5 times the standard deviation."""
    large = np.unpackbits(draw.words(-(-draw.count // 64)).view(np.uint8), count=draw.count)
    return (0.5 + large) * draw.std


ticketed = mptify.transform(conv4(), prune=0.8, init="two_sizes")
print(mptify.summary(ticketed).kept, "weights survive")
