"""A model with two pairs of layers."""

from __future__ import annotations

import torch
from torch import nn

ROWS = torch.ones(5000, 8)


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)
