"""Models and hooks that do almost nothing, so that the overhead of a hook dominates."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def twin(model: nn.Module) -> nn.Module:
    """Copy the modules and share parameters and buffers, as the memory location of weights affects the time."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


class Tiny(nn.Module):
    """An identity with a weight; on a layer without weights, a hook counts its calls and may warn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x


class EmptyModule(nn.Module):
    """An empty hook that is a module."""

    def forward(self, *_: Any) -> None:
        """Do nothing."""


def empty(*_: Any) -> None:
    """An empty hook that is a function."""


def sequence(count: int) -> nn.Sequential:
    """Create a sequence of `count` small layers."""
    return nn.Sequential(*(Tiny() for _ in range(count)))


def nested(count: int, depth: int) -> nn.Module:
    """Create a tree of small layers with `count` children per module."""
    return nn.Sequential(*(nested(count, depth - 1) for _ in range(count))) if depth else Tiny()
