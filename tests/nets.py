"""Small networks, each with one nasty habit."""

import torch
from torch import nn
from torch.nn import functional as F


def conv(inputs, outputs, size=3, **options):
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, **options)


class Plain(nn.Module):
    """VGG-like: conv, ReLU, pool, and a linear head that reads unpooled features."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            conv(3, 8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            conv(8, 16),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(16 * 16, 32), nn.ReLU(inplace=True), nn.Linear(32, 10)
        )

    def forward(self, x):
        return self.classifier(self.features(x))


class OneReluManyTimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.a, self.b, self.c = conv(3, 8), conv(8, 8), conv(8, 8)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.relu(self.norm(self.a(x)))
        y = self.relu(self.b(x))
        y = self.relu(self.c(y) + x)
        return self.head(y.mean((2, 3)))


class TiedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = conv(3, 8)
        self.first, self.second = conv(8, 8), conv(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.head(x.mean((2, 3)))


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = conv(3, 8)
        self.body = conv(8, 8)
        self.alias = self.body
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.relu(self.body(x)) + x
        return self.head(torch.relu(self.alias(x)).mean((2, 3)))


class FunctionalEverything(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(8, 3, 3, 3) * 0.2)
        self.grouped = nn.Parameter(torch.randn(8, 4, 3, 3) * 0.2)
        self.matrix = nn.Parameter(torch.randn(10, 8) * 0.3)
        self.offset = nn.Parameter(torch.zeros(10))

    def forward(self, x):
        x = F.relu(F.conv2d(x, self.kernel, padding=1))
        x = F.relu(F.conv2d(x, weight=self.grouped, bias=None, padding=1, groups=2))
        return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), self.matrix, self.offset)


class DynamicControlFlow(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = conv(3, 8)
        self.often = nn.Sequential(conv(8, 8), nn.BatchNorm2d(8), nn.ReLU())
        self.gate = conv(8, 8, 1)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        if x.mean() > -1e9:
            x = self.often(x)
        while x.abs().max() > 1e6:
            x = x / 2
        x = F.relu(self.gate(x))
        return self.head(x.mean((2, 3)))


class TrainOnlyBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body = conv(3, 8), conv(8, 8)
        self.aux = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        aux = self.aux(x) if self.training else None
        x = F.dropout(F.relu(self.body(x)), 0.3, self.training)
        x = self.head(self.dropout(x.mean((2, 3))))
        return (x, aux) if self.training else x


class PickedAtRunTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = conv(3, 8)
        self.paths = nn.ModuleDict({"small": conv(8, 8, 1), "large": conv(8, 8, 3)})
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        key = "small" if x.sum() < -1e9 else "large"
        x = F.relu(self.paths[key](x))
        x = F.relu(self.paths["small"](x))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.attention = nn.MultiheadAttention(16, 4, **options)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.embed(x.flatten(1).unflatten(1, (-1, 12)))
        x = x if self.attention.batch_first else x.transpose(0, 1)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x if self.attention.batch_first else x.transpose(0, 1)
        return self.head(x.mean(1))


class CachesShapes(nn.Module):
    """Leaves what it saw in an attribute, as torchvision's RoI pooling does."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = conv(3, 8), nn.Linear(8, 10)
        self.seen = None

    def forward(self, x):
        self.seen = x.shape
        return self.head(F.relu(self.stem(x)).mean((2, 3)))


NASTY = {
    "plain": Plain,
    "one_relu_many_times": OneReluManyTimes,
    "tied_weights": TiedWeights,
    "used_twice": UsedTwice,
    "functional_everything": FunctionalEverything,
    "dynamic_control_flow": DynamicControlFlow,
    "train_only_branch": TrainOnlyBranch,
    "picked_at_run_time": PickedAtRunTime,
    "attention": lambda: Attention(batch_first=True),
    "attention_time_first": Attention,
    "caches_shapes": CachesShapes,
}


def images(batch=4):
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(7))
