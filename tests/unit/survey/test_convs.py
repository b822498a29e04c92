"""Blocks, stages and sites of hand-written CNNs, whose names are those of no library."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookdrop import InjectionError, plan
from hookdrop.recipes import dropblock_resnet
from tests.support.models import toy

WIDTHS = (8, 8, 16, 16, 32)


class Unit(nn.Module):
    """A block with an in-place addition, a gain, a gate, and functions instead of modules."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.alpha, self.beta = nn.Conv2d(channels, width, 3, stride, 1), nn.GroupNorm(2, width)
        self.gamma, self.delta = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.squeeze, self.excite = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)
        self.gain = nn.Parameter(torch.ones(width, 1, 1))
        self.short = None if stride == 1 else nn.Conv2d(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.delta(self.gamma(F.relu(self.beta(self.alpha(x)))))
        y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        y = y * self.gain
        y += x if self.short is None else self.short(x)
        return F.relu(y)


class PreActivation(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.n1, self.c1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, width, 3, 1 + (width > channels), 1)
        self.n2, self.c2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c2(F.relu(self.n2(self.c1(F.relu(self.n1(x))))))
        if y.shape == x.shape:
            return x + y
        x = self.pool(x)
        return torch.cat([x, x], 1) + y


def net(block: type[nn.Module]) -> nn.Sequential:
    blocks = (block(a, b) for a, b in pairwise(WIDTHS))
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))


def sites(model: nn.Module) -> dict[str, float]:
    planned = plan(model, dropblock_resnet(p=0.4), example_input=torch.zeros(2, 3, 34, 34))
    return {f"{site.name} (skip)" if site.at == "skip" else site.name: site.p for site in planned.sites}


def test_names_do_not_matter() -> None:
    assert sites(net(Unit)) == {
        **dict.fromkeys(("2.beta", "2.delta", "2.short", "3 (skip)", "3.beta", "3.delta"), 0.1),
        **dict.fromkeys(("4.beta", "4.delta", "4.short"), 0.4),
    }


def test_a_pre_activation_block_has_a_site_before_the_addition() -> None:
    found = sites(net(PreActivation))
    assert {name for name in found if name.startswith("3")} == {"3 (skip)", "3.n2", "3.c2"}
    assert {name for name in found if name.startswith("4")} == {"4.pool", "4.n2", "4.c2"}


def test_a_skip_of_functions_is_dropped_at_the_input_of_the_block() -> None:
    class Padded(Unit):
        """The shortcut of the ResNets for CIFAR."""

        def __init__(self, channels: int, width: int) -> None:
            super().__init__(channels, width)
            self.width = width
            del self.short
            self.__dict__["short"] = self.pad

        def pad(self, x: Tensor) -> Tensor:
            step = 1 if x.shape[1] == self.width else 2
            return F.pad(x[:, :, ::step, ::step], (0, 0, 0, 0, 0, self.width - x.shape[1]))

    assert {name for name in sites(net(Padded)) if name.startswith("4")} == {"4 (skip)", "4.beta", "4.delta"}


def test_a_wrapper_around_the_branch() -> None:
    def body(width: int) -> nn.Module:
        layers = [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        branch = nn.Sequential(*layers, nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))
        return toy(lambda m, x: torch.add(m.body(x), x), body=branch)

    model = nn.Sequential(nn.Conv2d(3, 8, 3), body(8), nn.Conv2d(8, 16, 2, 2), nn.BatchNorm2d(16), body(16))
    assert sites(model) == {
        **dict.fromkeys(("1 (skip)", "1.body.1", "1.body.4"), 0.1),
        **dict.fromkeys(("4 (skip)", "4.body.1", "4.body.4"), 0.4),
    }


def test_an_addition_without_a_module_of_its_own_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.first(x)
        for i in (0, 2):
            y = F.relu(m.norms[i](m.units[i](x)))
            x = F.max_pool2d(x + m.norms[i + 1](m.units[i + 1](y)), 2)
        return x

    units = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
    flat = toy(forward, first=nn.Conv2d(3, 8, 3), units=units, norms=nn.ModuleList(nn.BatchNorm2d(8) for _ in units))
    with pytest.raises(InjectionError, match="no hook can reach"):
        sites(flat)
