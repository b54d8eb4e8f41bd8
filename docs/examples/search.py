import numpy as np
from sklearn.datasets import load_digits

import mptify
from mptify.models import conv2

digits = load_digits()
images, labels = (digits.images * 15).astype(np.uint8)[..., None], digits.target
train, val = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])

settings = {"epochs": 3, "batch": 64, "ticket": {"bits": "1/32", "prune": 0.8, "bn": "insert"}}
network = conv2(in_chans=1, input_size=8)
result = mptify.search(network, train, val, settings)  # out="runs/mine" keeps a folder
print(f"{100 * result.accuracy:.1f} % of the validation images", *result.warnings)
