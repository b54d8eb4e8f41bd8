"""A 1/1 ticket model, and its packed program."""

import torch

import mptify
from mptify.models import resnet18_cifar

model = mptify.transform(resnet18_cifar(), bits="1/1", prune=0.75).eval()
images = torch.randint(-8, 9, (2, 3, 32, 32)) / 8  # sums of these are exact
program = mptify.pack(model, images)
with torch.no_grad():
    print("the same logits:", torch.equal(program(images), model(images)))
