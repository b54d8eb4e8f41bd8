"""Networks and kernels for tests of the packed runtime."""

import random

import torch
from torch import nn
from torch.nn import functional as F

import mptify
from mptify.runtime import geometry as geometry_module
from mptify.runtime.chain import Call, Chain
from mptify.runtime.geometry import Geometry
from mptify.runtime.kernels.pack import Pack
from mptify.runtime.kernels.unpack import Unpack
from tests.nets import images

# Networks whose convolutions have three dimensions, which stay float.
THREE_DIMENSIONS = {"r3d_18", "mc3_18", "r2plus1d_18", "s3d"}


def shaken_(model):
    """Norms with weights of all kinds: negative, zero, huge and tiny."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            kinds = torch.tensor([1.0, -1.0, 0.0, 1e6, -1e-6])
            module.weight = nn.Parameter(
                kinds[torch.randint(5, (module.num_features,))] * torch.rand(module.num_features)
            )
            module.bias = nn.Parameter(torch.randn(module.num_features))
            module.running_mean.normal_()
    return model


def packed_pair(network, prune=0.5):
    ticketed = mptify.transform(network, bits="1/1", prune=prune).eval()
    return mptify.pack(ticketed, images()), ticketed


def signs(*shape):
    return torch.where(torch.randn(shape) >= 0, 1.0, -1.0)


def ternary(*shape, kept):
    """-1, 0 and 1; at least one weight is kept."""
    weight = signs(*shape) * (torch.rand(shape) < kept)
    weight.view(-1)[random.randrange(weight.numel())] = 1.0
    return weight


def chain_of(kernel, inputs, layout="channels"):
    """A kernel that reads signs of a `layout`, or numbers without one, between pack and unpack."""
    names = [f"input_{number}" for number in range(inputs)]
    kernels, calls, read = {"kernel": kernel}, [], names
    if layout:
        kernels |= {f"pack_{name}": Pack(layout) for name in names}
        calls = [Call(f"pack_{name}", (name,), f"bits_{name}") for name in names]
        read = [f"bits_{name}" for name in names]
    calls.append(Call("kernel", tuple(read), "made"))
    if getattr(kernel, "thresholds", True) is not None:
        kernels["unpack"] = Unpack()
        calls.append(Call("unpack", ("made",), "numbers"))
    return Chain(kernels, calls, names, [calls[-1].output])


def through(kernel, *inputs, layout="channels", cpu=-1):
    """What a kernel makes of signs, as numbers."""
    chain = chain_of(kernel, len(inputs), layout)
    chain.instruction_set = cpu
    return chain(*inputs)[0]


def randomize_tiles(monkeypatch):
    """Planes in one tile or in several, for words of any width."""
    for name, choices in (
        ("_L1_BYTES", (0, 24 << 10)),
        ("_MIN_USES", (0, 8)),
        ("_TILE_BYTES", (0, 2000, 16 << 10)),
    ):
        monkeypatch.setattr(geometry_module, name, random.choice(choices))
    word = random.choice([16, 32, 64])
    monkeypatch.setattr(geometry_module, "word_bytes", lambda: word)


def random_layer(channels=9):
    """Images, a weight, the sums and the geometry: of any kind and size."""
    groups = random.choice([1, 1, 2, 3])
    inputs, filters = groups * random.randint(1, channels), groups * random.randint(1, 7)
    kernel, stride, padding, dilation = (
        (random.randint(low, high), random.randint(low, high))
        for low, high in ((1, 5), (1, 3), (0, 3), (1, 3))
    )
    least = [step * (taps - 1) + 1 for taps, step in zip(kernel, dilation, strict=True)]
    size = (
        random.randint(least[0], 30),
        random.choice([random.randint(least[1], 30), 60, 64, 65, 70, 130]),
    )
    images = signs(random.randint(1, 2), inputs, *size)
    weight = ternary(filters, inputs // groups, *kernel, kept=random.choice([0.02, 0.3, 0.6, 1.0]))
    sums = F.conv2d(images, weight, None, stride, padding, dilation, groups)
    return images, weight, sums, Geometry(inputs, size, kernel, stride, padding, dilation)
