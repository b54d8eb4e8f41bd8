"""Conv-2, Conv-4, Conv-6 and Conv-8: VGG-like networks for 32×32 images (paper, section 3)."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["ConvN", "conv2", "conv4", "conv6", "conv8"]


class ConvN(nn.Module):
    """Pairs of 3×3 convs with 64 to 512 channels and a max-pool, then three linear layers."""

    def __init__(
        self,
        depth: int,
        width: float = 1.0,
        num_classes: int = 10,
        in_chans: int = 3,
        input_size: int = 32,
    ):
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_chans
        for pair in range(depth // 2):
            for _ in range(2):
                wide = max(1, round(64 * 2**pair * width))
                layers += [nn.Conv2d(channels, wide, 3, padding=1, bias=False), nn.ReLU()]
                channels = wide
            layers.append(nn.MaxPool2d(2))
        side = input_size // 2 ** (depth // 2)
        if side < 1:
            raise ValueError(
                f"images of {input_size} pixels are too small for {depth // 2} max-pools"
            )
        hidden = max(1, round(256 * width))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * side * side, hidden, bias=False),
            nn.ReLU(),
            nn.Linear(hidden, hidden, bias=False),
            nn.ReLU(),
            nn.Linear(hidden, num_classes, bias=False),
        )
        self.num_classes = num_classes
        # Appendix A, for dense training too; torch's default is smaller and slower to learn.
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


def conv2(
    width: float = 1.0, num_classes: int = 10, in_chans: int = 3, input_size: int = 32
) -> ConvN:
    """Two convs and three linear layers."""
    return ConvN(2, width, num_classes, in_chans, input_size)


def conv4(
    width: float = 1.0, num_classes: int = 10, in_chans: int = 3, input_size: int = 32
) -> ConvN:
    """Four convs and three linear layers."""
    return ConvN(4, width, num_classes, in_chans, input_size)


def conv6(
    width: float = 1.0, num_classes: int = 10, in_chans: int = 3, input_size: int = 32
) -> ConvN:
    """Six convs and three linear layers."""
    return ConvN(6, width, num_classes, in_chans, input_size)


def conv8(
    width: float = 1.0, num_classes: int = 10, in_chans: int = 3, input_size: int = 32
) -> ConvN:
    """Eight convs and three linear layers."""
    return ConvN(8, width, num_classes, in_chans, input_size)
