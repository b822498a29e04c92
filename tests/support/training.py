"""Short training loops."""

from __future__ import annotations

import torch
from torch import nn

UNCHANGED = "No hook was placed; the model is unchanged."


def train(model: nn.Module, x: torch.Tensor, times: int = 1) -> None:
    for _ in range(times):
        model(x)


def optimize(model: nn.Module, steps: int) -> None:
    """A training loop without hookdrop calls."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
