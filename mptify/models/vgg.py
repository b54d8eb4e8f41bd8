"""VGG-Small, the usual benchmark of binary networks (from BinaryConnect; named by LQ-Nets)."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["VGGSmall", "vgg_small"]


class VGGSmall(nn.Module):
    """Six 3×3 convs of 128 to 512 channels with BatchNorm and ReLU, and one linear layer.

    Every second conv is max-pooled before its norm, as a sign in place of the ReLU requires.
    """

    def __init__(
        self, width: float = 1.0, num_classes: int = 10, in_chans: int = 3, input_size: int = 32
    ):
        super().__init__()
        side = input_size // 8
        if side < 1:
            raise ValueError(f"images of {input_size} pixels are too small for 3 max-pools")
        layers: list[nn.Module] = []
        channels = in_chans
        for pair in range(3):
            for pooled in (False, True):
                wide = max(1, round(128 * 2**pair * width))
                layers.append(nn.Conv2d(channels, wide, 3, padding=1, bias=False))
                layers += [nn.MaxPool2d(2)] if pooled else []
                layers += [nn.BatchNorm2d(wide), nn.ReLU()]
                channels = wide
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(channels * side * side, num_classes, bias=False)
        )
        self.num_classes = num_classes
        for layer in self.modules():  # appendix A, for dense training too
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


def vgg_small(
    width: float = 1.0, num_classes: int = 10, in_chans: int = 3, input_size: int = 32
) -> VGGSmall:
    """Six convs with norms and one linear layer; 4.66 M weights at width 1."""
    return VGGSmall(width, num_classes, in_chans, input_size)
