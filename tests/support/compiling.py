"""A model to compile, and measurements of compiled code."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters


class Net(nn.Module):
    """x -> weight * inner(x), where `inner` is the layer to hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.weight


def graphs() -> int:
    """The number of graphs that were compiled in this test."""
    return counters["stats"]["unique_graphs"]
