from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

import mptify
from mptify.registry import kernels
from mptify.runtime.kernel import Candidate, TorchKernel


@kernels.register("reflect_conv")
class ReflectConv(TorchKernel):
    """Binary convolutions that pad by reflection, which mptify has no kernel for."""

    SETTINGS: ClassVar = {"padding": int}
    BUFFERS = ("weight", "least")

    def __init__(self, pattern):
        super().__init__()
        self.padding = pattern.branch.layer.padding[0]
        self.register_buffer("weight", pattern.rising_weight.float())
        self.register_buffer("least", pattern.thresholds.least[0])

    @classmethod
    def matches(cls, pattern):
        mode = getattr(pattern.branch.layer, "padding_mode", "zeros")
        makes_signs = pattern.reads_signs and pattern.makes_signs and pattern.is_plain
        return mode == "reflect" and makes_signs

    @classmethod
    def candidate(cls, pattern):
        if pattern.thresholds is None:
            return None
        return Candidate(20_000.0, lambda: cls(pattern))

    def forward(self, x):
        padded = F.pad(x, [self.padding] * 4, mode="reflect")
        sums = F.conv2d(padded, self.weight)
        return torch.where(sums >= self.least.view(-1, 1, 1), 1.0, -1.0)


reflecting = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
first = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
second = [reflecting, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
network = nn.Sequential(*first, *second, nn.Linear(8 * 30 * 30, 10))
model = mptify.transform(network, bits="1/1", prune=0.5).eval()
images = torch.randint(-8, 9, (2, 3, 32, 32)) / 8
program = mptify.pack(model, images)
assert any(isinstance(module, ReflectConv) for module in program.modules())
with torch.no_grad():
    print("the same logits:", torch.equal(program(images), model(images)))
