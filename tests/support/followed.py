"""A model with a followed optimizer."""

from __future__ import annotations

import torch
from torch import nn

from hookdrop import Dropout, Injection, LinearSchedule, inject


def setup(**optimizer: object) -> tuple[nn.Module, Injection, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    drop = inject(model, Dropout(0.5), layers="1", schedule=LinearSchedule(100))
    return model, drop, torch.optim.SGD(model.parameters(), 0.1, **optimizer)


def backward(model: nn.Module, scale: float = 1.0) -> torch.Tensor:
    loss = model(torch.ones(2, 4)).sum() * scale
    loss.backward()
    return loss
