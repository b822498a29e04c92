"""Models and hooks that do next to nothing, so that what is measured is the hook."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def twin(model: nn.Module) -> nn.Module:
    """A copy with the same parameters and buffers: where weights lie in memory makes a difference of its own."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


class Tiny(nn.Module):
    """Does nothing, but has a weight: on a layer without one a hook counts calls, and tells at the thousandth."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x


class EmptyModule(nn.Module):
    """A hook that is a module."""

    def forward(self, *_: Any) -> None:
        """Nothing."""


def empty(*_: Any) -> None:
    """A hook that is a function."""


def in_a_row(count: int) -> nn.Sequential:
    """So many small layers."""
    return nn.Sequential(*(Tiny() for _ in range(count)))


def nested(count: int, depth: int) -> nn.Module:
    """So many in so many in ..."""
    return nn.Sequential(*(nested(count, depth - 1) for _ in range(count))) if depth else Tiny()
