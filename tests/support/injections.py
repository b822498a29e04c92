"""Models with an injection."""

from __future__ import annotations

import torch
from torch import nn

from hookdrop import DropBlock, Dropout, Injection, LinearSchedule, inject
from tests.support.models import Small

UNCHANGED = "No hook was placed; the model is unchanged."
"""The last line of the errors of `inject`."""


def layer(p: float = 0.5, **settings: object) -> tuple[nn.Sequential, Injection]:
    """An identity with Dropout."""
    model = nn.Sequential(nn.Identity())
    return model, inject(model, Dropout(p), layers="0", **settings)


def injected(**kwargs: object) -> tuple[Small, Injection]:
    """DropBlock on two layers, with a schedule."""
    torch.manual_seed(0)
    model = Small()
    settings = {"layers": "layer1.*", "schedule": LinearSchedule(20)} | kwargs
    return model, inject(model, settings.pop("regularizer", DropBlock(0.4, 3)), **settings)


def half_ramped(model: nn.Module) -> Injection:
    """Inject DropBlock halfway through its schedule."""
    drop = inject(model, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(10), p_scale="depth")
    drop.seek(5)
    return drop


def scheduled(**optimizer: object) -> tuple[nn.Module, Injection, torch.optim.Optimizer]:
    """Dropout with a schedule, and an optimizer that it can follow."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    drop = inject(model, Dropout(0.5), layers="1", schedule=LinearSchedule(100))
    return model, drop, torch.optim.SGD(model.parameters(), 0.1, **optimizer)


def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2
