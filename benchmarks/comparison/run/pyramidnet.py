"""PyramidNet for 32x32 images, which neither timm nor torchvision has."""

from __future__ import annotations

from torch import Tensor, nn

EXPANSION = 4


class Bottleneck(nn.Module):
    """BN, 1x1, BN, ReLU, 3x3, BN, ReLU, 1x1, BN, and a zero-padded identity skip."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * EXPANSION, 1, bias=False)
        self.bn4 = nn.BatchNorm2d(width * EXPANSION)
        self.shrink = nn.AvgPool2d(2, 2, ceil_mode=True) if stride == 2 else nn.Identity()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Downsample by the stride and add channels."""
        y = self.conv1(self.bn1(x_NCHW))
        y = self.conv2(self.bn2(y).relu())
        y = self.bn4(self.conv3(self.bn3(y).relu()))
        skip = self.shrink(x_NCHW)
        total: Tensor = y + nn.functional.pad(skip, (0, 0, 0, 0, 0, y.shape[1] - skip.shape[1]))
        return total


class PyramidNet(nn.Module):
    """A network of 9 n + 2 layers whose width grows linearly over its blocks, from 16 to 16 + alpha (times 4).

    Reference: Han et al. 2017, arXiv:1610.02915, with additive widening and bottlenecks. PyramidNet-200 with alpha 240
    is used in the CutMix paper (Yun et al. 2019, arXiv:1905.04899): 26.8 million parameters with 100 classes.
    """

    def __init__(self, depth: int = 200, alpha: int = 240, classes: int = 100, channels: int = 3) -> None:
        super().__init__()
        if (depth - 2) % 9:
            below = depth - (depth - 2) % 9
            raise ValueError(f"PyramidNet: depth must be 9 n + 2, such as {below} or {below + 9}, got {depth}.")
        blocks = (depth - 2) // 9
        self.stem = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        width, inside, stages = 16.0, 16, []
        for stage in (1, 2, 3):
            layers = []
            for i in range(blocks):
                width += alpha / (3 * blocks)
                layers.append(Bottleneck(inside, round(width), 2 if stage > 1 and i == 0 else 1))
                inside = round(width) * EXPANSION
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3 = stages
        self.norm = nn.BatchNorm2d(inside)
        self.fc = nn.Linear(inside, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=(2 / (module.kernel_size[0] ** 2 * module.out_channels)) ** 0.5)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Return logits of shape (N, classes)."""
        x = self.layer3(self.layer2(self.layer1(self.stem(x_NCHW))))
        logits: Tensor = self.fc(self.norm(x).relu().mean((2, 3)))
        return logits
