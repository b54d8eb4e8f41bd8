"""A finished 1/32 ticket gets 8-bit inputs."""

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import mptify
from mptify.models import conv2

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
labels = torch.tensor(digits.target)

model = mptify.transform(conv2(in_chans=1, input_size=8), bits="1/32", prune=0.8, bn="insert")
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
for batch in torch.randperm(1400).repeat(3).split(64):
    loss = F.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()  # stays as it is
batches = [(images[1400:], labels[1400:])]
program = mptify.pack(model, activation_bits=8, calibrate=batches)
print(program.calibration)
