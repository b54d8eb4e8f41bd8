"""The picture on the first page: a random layer, what a search keeps of it, and its signs.

python docs/examples/figure.py OUT.png
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import mptify
from mptify.models import conv2

digits = load_digits()
images, labels = (digits.images * 15).astype(np.uint8)[..., None], digits.target
train, val = (images[::2], labels[::2]), (images[1::2], labels[1::2])
network = conv2(width=0.5, in_chans=1, input_size=8)
result = mptify.search(network, train, val, {"epochs": 3, "ticket": {"prune": 0.8, "bn": "insert"}})

layer = mptify.ticket_layers(result.model)["features.2"]
random = layer.frozen.detach()[:16].flatten(1)[:, :48]
kept = layer.weight.detach()[:16].flatten(1)[:, :48]
panels = [
    ("random, and never trained", random),
    ("a fifth of it is kept", random * (kept != 0)),
    ("of that, the signs", kept.sign()),
]
figure = Figure(figsize=(9, 1.5), layout="constrained")
for axes, (title, numbers) in zip(figure.subplots(1, 3), panels, strict=True):
    most = float(numbers.abs().max())
    look = {"cmap": "RdBu", "aspect": "auto", "interpolation": "nearest"}
    axes.imshow(numbers.numpy(), vmin=-most, vmax=most, **look)
    axes.set_title(title, fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])
path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "figure.png"
figure.savefig(path, dpi=110)
print(f"{path}: {100 * result.accuracy:.1f} % of the digits are right")
