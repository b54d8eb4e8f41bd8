import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

import mptify
from mptify.models import conv2

digits = load_digits()
images, labels = (digits.images * 15).astype(np.uint8)[..., None], digits.target
folder = Path(tempfile.mkdtemp())
network = conv2(width=0.25, in_chans=1, input_size=8)
train, val = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])
mptify.search(network, train, val, {"epochs": 2}, out=folder / "run")

path = folder / "run" / "last.ticket"
seen = mptify.read(path).notes["input"]
mean, std = (torch.tensor(seen[key]).view(-1, 1, 1) for key in ("mean", "std"))
pixels = torch.from_numpy(images[1400:]).permute(0, 3, 1, 2)
network = conv2(width=0.25, in_chans=1, input_size=8)  # your own network: build it again
logits = mptify.load(path, model=network)((pixels / 255 - mean) / std)
print(f"{100 * (logits.argmax(1).numpy() == labels[1400:]).mean():.1f} % are right")
