"""ResNet-18 for 32×32 images."""

from __future__ import annotations

from torch import nn

__all__ = ["resnet18_cifar"]


def resnet18_cifar(num_classes: int = 10, in_chans: int = 3, input_size: int = 32) -> nn.Module:
    """torchvision's ResNet-18 as it is used on 32×32 images: a 3×3 stem of stride 1, and no max-pool. Any size will do."""
    import torchvision

    model = torchvision.models.resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(in_chans, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model
