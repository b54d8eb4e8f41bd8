"""A package of somebody else's: it registers one toy variant of each kind, and mptify does not know it."""

from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from mptify.export import Artifact, ExportTarget
from mptify.nn.scopes import SharedThreshold
from mptify.registry import data_sources, export_targets, init_schemes, kernels, scopes
from mptify.runtime.kernel import Candidate, TorchKernel


@init_schemes.register("toy_uniform")
def toy_uniform(draw):
    """Magnitudes between half of the standard deviation and one and a half times it."""
    steps = draw.words(draw.count) >> np.uint64(40)  # 24 bits
    return (0.5 + steps.astype(np.float64) / 2**24) * draw.deviation


@data_sources.register("toy_stripes")
def toy_stripes(config, place, splits):
    """Two classes of grey images: stripes along rows, and along columns; `place` says how many."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 60, (int(place or 40), 8, 8, 1), np.uint8), np.arange(int(place or 40)) % 2
    images[labels == 0, ::2] += 150
    images[labels == 1, :, ::2] += 150
    return (images, labels), (images, labels)


@export_targets.register("toy_state")
class ToyState(ExportTarget):
    """The state dict of the ticket model, as torch.save writes it."""

    suffix = ".toy"

    def make(self, ticket, model, images):
        import io

        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        return Artifact(buffer.getvalue(), model)


@scopes.register("toy_first")
class ToyFirst(SharedThreshold):
    """Each layer keeps its floor, the first weights of it; and the earliest layers take what is left."""

    def select(self, scores, kept):
        floors = [self.floor_of(values.numel()) for values in scores]
        left, masks = kept - sum(floors), []
        for floor, values in zip(floors, scores):
            own = min(values.numel(), floor + left)
            left -= own - floor
            masks.append((torch.arange(values.numel()) < own).view(values.shape))
        return masks


@kernels.register("toy_conv")
class ToyConv(TorchKernel):
    """A convolution that reads two channels of signs, and makes signs."""

    SETTINGS: ClassVar = {"padding": int}
    BUFFERS = ("weight", "least")

    def __init__(self, pattern):
        super().__init__()
        self.padding = pattern.branch.layer.padding[0]
        self.register_buffer("weight", pattern.rising_weight)
        self.register_buffer("least", pattern.thresholds.least[0])

    @classmethod
    def matches(cls, pattern):
        reads_two = pattern.reads_signs and getattr(pattern.branch.layer, "in_channels", 0) == 2
        return reads_two and pattern.makes_signs and pattern.is_plain

    @classmethod
    def candidate(cls, pattern):
        return None if pattern.thresholds is None else Candidate(0.0, lambda: cls(pattern))

    def validate(self):
        if self.weight.dim() != 4 or self.least.shape != self.weight.shape[:1]:
            raise ValueError("its thresholds are not one per filter")

    def forward(self, x):
        sums = F.conv2d(x, self.weight.float(), padding=self.padding)
        return torch.where(sums >= self.least.view(-1, 1, 1), 1.0, -1.0)
