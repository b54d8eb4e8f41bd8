import tempfile
from pathlib import Path

import torch
from torch import nn

import mptify


def network():
    convs = nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()
    return nn.Sequential(*convs, nn.Flatten(), nn.LazyLinear(10))


images = torch.randn(8, 3, 16, 16)
mine = network()
mine(images)  # a lazy layer needs to see a batch before it has weights
ticketed = mptify.transform(mine, bits="1/32", prune=0.8).eval()

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "mine.ticket"
    mptify.save(ticketed, path)
    print(f"{path.stat().st_size:,} bytes")

    loaded = mptify.load(path, model=mine)  # a named network needs no `model`
    print(torch.equal(loaded(images), ticketed(images)))

    other = mptify.ticket_of(mptify.transform(mine, bits="1/32", prune=0.8, seed=1).eval())
    mptify.swap_(loaded, other)  # another ticket, in the same memory
    print(mptify.read(path) == other)

    ensemble = mptify.Ensemble(loaded, [mptify.read(path), other]).eval()  # averages predictions
    print(tuple(ensemble(images).shape))
