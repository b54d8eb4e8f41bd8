"""A package of somebody else's: it registers one toy variant of each kind, and mptify does not know it."""

from typing import ClassVar

import numpy as np
import torch
from timm.models import register_model
from torch import nn
from torch.nn import functional as F

import mptify
from mptify.export import Artifact, ExportTarget
from mptify.nn.scopes import SharedScope
from mptify.registry import (
    data_sources,
    export_targets,
    init_schemes,
    kernels,
    methods,
    quantizers,
    scopes,
)
from mptify.runtime.kernel import Candidate, TorchKernel
from mptify.training.methods.biprop import Biprop


@init_schemes.register("toy_uniform")
def toy_uniform(draw):
    """Magnitudes between half of the standard deviation and one and a half times it."""
    steps = draw.words(draw.count) >> np.uint64(40)  # 24 bits
    return (0.5 + steps.astype(np.float64) / 2**24) * draw.std


@data_sources.register("toy_stripes")
def toy_stripes(config, place, splits):
    """Two classes of grey images: stripes along rows, and along columns; `place` says how many."""
    rng = np.random.default_rng(0)
    images, labels = (
        rng.integers(0, 60, (int(place or 40), 8, 8, 1), np.uint8),
        np.arange(int(place or 40)) % 2,
    )
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
class ToyFirst(SharedScope):
    """Each layer keeps its floor, the first weights of it; and the earliest layers take what is left."""

    def select(self, scores, kept):
        floors = [self.floor_of(values.numel()) for values in scores]
        left, masks = kept - sum(floors), []
        for floor, values in zip(floors, scores):
            own = min(values.numel(), floor + left)
            left -= own - floor
            masks.append((torch.arange(values.numel()) < own).view(values.shape))
        return masks


class _SignWithFlatGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width):
        ctx.save_for_backward(x)
        ctx.width = width
        return torch.where(x < 0, -1.0, 1.0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= ctx.width), None


@quantizers.register("toy_flat")
def toy_flat(x, *, width=1.0):
    """Forward: sign(x). Backward: the gradient passes where |x| <= width."""
    return _SignWithFlatGradient.apply(x, width)


@quantizers.register("toy_zero")
def toy_zero(x, *, width=1.0):
    """Not a 1-bit quantizer: 0 stays 0."""
    return torch.sign(x)


@methods.register("toy_shrink")
class ToyShrink(Biprop):
    """biprop that halves all scores after every second epoch, which changes no mask by itself."""

    description = "toy_shrink: biprop with smaller and smaller scores"

    def __init__(self):
        self.halved = 0

    def on_epoch_end(self, search, row):
        if search.epoch % 2 == 0:
            self.halved += 1
            row["halved"] = self.halved
            with torch.no_grad():
                for part in search.model.modules():
                    if getattr(part, "scores", None) is not None:
                        part.scores.mul_(0.5)

    def state_dict(self):
        return {"halved": self.halved}

    def load_state_dict(self, state):
        self.halved = state["halved"]


class ToyDense(nn.Module):
    """A linear layer that keeps its weight the other way round, under another name."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x):
        return x @ self.kernel


@mptify.register(ToyDense)
def describe_toy_dense(layer):
    inputs, outputs = layer.kernel.shape
    return mptify.Handler(
        weight="kernel", inputs=inputs, outputs=outputs, axis=-1, fan_in=inputs, kind="ToyDense"
    )


class ToyPair(nn.Module):
    """A module with two weights, for two inputs, in code that torch.fx cannot trace."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.left = nn.Parameter(torch.randn(width, width))
        self.right = nn.Parameter(torch.randn(width, width))

    def forward(self, x, y):
        if float(x.detach().sum()) == float("inf"):
            raise ValueError("too large")
        return F.linear(x, self.left) + F.linear(y, self.right)


class ToyTicketPair(ToyPair):
    left = right = None

    def forward(self, x, y):
        return self.left_ticket.run("linear", x, None) + self.right_ticket.run("linear", y, None)


def convert_toy_pair_(module, tickets, quantizers):
    for name, ticket in tickets.items():
        del module._parameters[name]
        module.add_module(f"{name}_ticket", ticket)
    module.__class__ = ToyTicketPair


@mptify.register(ToyPair)
def describe_toy_pair(layer):
    return mptify.CompositeHandler(
        weights={"left": ("x",), "right": ("y",)}, outputs=layer.width, convert_=convert_toy_pair_
    )


class ToyNet(nn.Module):
    """A network of these layers, which timm knows by name."""

    def __init__(self, num_classes=10, in_chans=3):
        super().__init__()
        self.stem = nn.Conv2d(in_chans, 8, 3, stride=2)
        self.pair = ToyPair(8)
        self.norm = nn.BatchNorm1d(8)
        self.act = nn.ReLU()
        self.head = ToyDense(8, num_classes)
        self.num_classes = num_classes

    def forward(self, x):
        x = self.stem(x).mean((2, 3))
        return self.head(self.act(self.norm(self.pair(x, -x))))


@register_model
def toy_net(pretrained=False, **options):
    return ToyNet(**{key: options[key] for key in ("num_classes", "in_chans") if key in options})


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
