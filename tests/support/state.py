"""A model with an injection to save."""

from __future__ import annotations

import torch

from hookdrop import (
    DropBlock,
    Injection,
    LinearSchedule,
    inject,
)
from tests.support.nets import Small


def injected(**kwargs: object) -> tuple[Small, Injection]:
    torch.manual_seed(0)
    model = Small()
    settings = {"layers": "layer1.*", "schedule": LinearSchedule(20)} | kwargs
    return model, inject(model, settings.pop("regularizer", DropBlock(0.4, 3)), **settings)


def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2
