"""Models without hooks, and the names that patterns select in them."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.core.selection import select


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class Small(nn.Module):
    """A small residual network with the layer names of a ResNet."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1)
        self.layer1 = nn.Sequential(Block(channels), Block(channels))
        self.layer2 = nn.Sequential(Block(channels), Block(channels))
        self.fc = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.conv1(x))).mean((2, 3)))


def toy(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    """A module whose forward is a function of the module and its arguments."""
    model = type("Toy", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


KEPT: dict[int, Tensor] = {}


def kept_ones(size: int) -> Tensor:
    return KEPT.setdefault(size, torch.ones(size))


ROWS = torch.ones(5000, 8)
"""An input of `pair`."""


def pair() -> nn.Sequential:
    """Two pairs of layers: "0.0", "0.1", "1.0" and "1.1"."""
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def mlp() -> nn.Sequential:
    """A network whose activations save their outputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())


def without_zeros() -> nn.Sequential:
    """Two layers whose outputs have no zeros of their own."""
    return nn.Sequential(nn.Linear(8, 8), nn.Hardtanh(1.0, 2.0))


def randomize_norms(model: nn.Module) -> nn.Module:
    """Randomize norms and layer scales, so that no residual branch is initialized to 0."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "layer_scale" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def from_timm(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: import_module("timm").create_model(name, **settings)


def from_torchvision(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: import_module("torchvision").models.get_model(name, weights=None, **settings)


def names(model: nn.Module, layers: object, exclude: object = ()) -> list[str]:
    return [layer.name for layer in select(model, layers, exclude).layers]
