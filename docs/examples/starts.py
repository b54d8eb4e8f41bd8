"""Searches that start from other scores, or with another norm.

python docs/examples/starts.py [magnitude|narrow|last_norm] [cifar10.npz]

They are evaluated on held-out training images, as in the study in docs/search.md.
"""

import sys

import torch
from torch import nn

import mptify
from mptify.config import DataConfig
from mptify.models import conv2, conv4
from mptify.training.sources import load_data

start = sys.argv[1] if len(sys.argv) > 1 else "magnitude"
if len(sys.argv) > 2:
    network, epochs = conv4(), 3
    source = f"arrays:{sys.argv[2]}"
    data = DataConfig(source=source, train_images=10_000, holdout=5_000, crop=4, flip=True)
else:
    network, epochs = conv2(in_chans=1, input_size=8), 2
    data = DataConfig(source="digits", crop=1)
train, val = load_data(data)

if start == "last_norm":  # a BatchNorm behind the last layer
    network = nn.Sequential(network, nn.BatchNorm1d(10))
ticketed = mptify.transform(network, bits="1/32", prune=0.8)
with torch.no_grad():
    for layer in mptify.ticket_layers(ticketed).values():
        if start == "magnitude":  # large weights are kept first
            layer.scores.copy_(layer.frozen)
        elif start == "narrow":  # no first score is far from the threshold
            size = layer.scores.abs().max()
            layer.scores.copy_(torch.copysign(layer.scores.abs() / 2 + size / 2, layer.scores))

result = mptify.search(ticketed, train, val, {"epochs": epochs})
print(f"{start}: {100 * result.accuracy:.2f} % of the validation images", *result.warnings)
