"""ResNet-18, ResNet-20 and ResNet-56 for 32×32 images, and the paper's WideResNet-34."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["ResNet", "resnet18_cifar", "resnet20_cifar", "resnet56_cifar", "wide_resnet34_2"]


class ResNet(nn.Module):
    """A stem, stages of torchvision's basic blocks, a global mean, and one linear layer.

    torchvision's own class is fixed to four stages of 64 to 512 channels. Each stage but the first
    halves height and width in its first block, whose shortcut is `shortcut(before, after)`.
    """

    def __init__(
        self,
        stem: nn.Module,
        channels: tuple[int, ...],
        blocks: tuple[int, ...],
        shortcut: Callable[[int, int], nn.Module],
        num_classes: int,
    ):
        from torchvision.models.resnet import BasicBlock

        super().__init__()
        stages = []
        before = channels[0]  # the stem's
        for number, (wide, count) in enumerate(zip(channels, blocks, strict=True)):
            first = (
                BasicBlock(before, wide, stride=2, downsample=shortcut(before, wide))
                if number
                else BasicBlock(before, wide)
            )
            stages.append(nn.Sequential(first, *(BasicBlock(wide, wide) for _ in range(count - 1))))
            before = wide
        self.stem = stem
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes)
        )
        self.num_classes = num_classes
        for layer in self.modules():  # appendix A, for dense training too
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.stages(self.stem(images)))


class Padded(nn.Module):
    """Every second pixel, with zeros for new channels: shortcut A of He et al., without weights."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.more = ((after - before) // 2, after - before - (after - before) // 2)

    def forward(self, values: Tensor) -> Tensor:
        return nn.functional.pad(values[:, :, ::2, ::2], (0, 0, 0, 0, *self.more))


def _projected(before: int, after: int) -> nn.Module:
    """A 1×1 conv and its norm: shortcut B of He et al., as torchvision has it."""
    return nn.Sequential(nn.Conv2d(before, after, 1, stride=2, bias=False), nn.BatchNorm2d(after))


def _small(blocks: int, num_classes: int, in_chans: int) -> ResNet:
    """The CIFAR networks of He et al.: three stages of 16, 32 and 64 channels."""
    stem = nn.Sequential(
        nn.Conv2d(in_chans, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
    )
    return ResNet(stem, (16, 32, 64), (blocks,) * 3, Padded, num_classes)


def resnet20_cifar(num_classes: int = 10, in_chans: int = 3, input_size: int = 32) -> ResNet:
    """He et al.'s ResNet-20 for 32×32 images: three stages of three blocks."""
    return _small(3, num_classes, in_chans)


def resnet56_cifar(num_classes: int = 10, in_chans: int = 3, input_size: int = 32) -> ResNet:
    """He et al.'s ResNet-56 for 32×32 images: three stages of nine blocks."""
    return _small(9, num_classes, in_chans)


def wide_resnet34_2(num_classes: int = 1000, in_chans: int = 3, input_size: int = 224) -> ResNet:
    """The paper's WideResNet-34: stages of 64, 192, 384 and 768 channels, for images of any size.

    The paper does not state its width. These channels are what its authors' code makes of a factor
    of 2, and the only ones that leave the 19.3 M weights of its tables at 60 % pruned; twice
    ResNet-34's channels would leave 34.4 M.
    """
    stem = nn.Sequential(
        nn.Conv2d(in_chans, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    return ResNet(stem, (64, 192, 384, 768), (3, 4, 6, 3), _projected, num_classes)


def resnet18_cifar(num_classes: int = 10, in_chans: int = 3, input_size: int = 32) -> nn.Module:
    """torchvision's ResNet-18 for 32×32 images: a 3×3 stem of stride 1, and no max-pool."""
    import torchvision

    model = torchvision.models.resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(in_chans, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.num_classes = num_classes
    return model
