"""Searches that start from something else: python docs/examples/starts.py [magnitude|narrow|last_norm] [cifar10.npz]

Judged by training images that are held out, as the study in docs/search.md is.
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
    train, val = load_data(DataConfig(source=f"arrays:{sys.argv[2]}", train_images=10_000, holdout=5_000, crop=4, flip=True))
else:
    network, epochs = conv2(in_chans=1, input_size=8), 2
    train, val = load_data(DataConfig(source="digits", crop=1))

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
