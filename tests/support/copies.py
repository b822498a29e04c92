"""A hooked model to copy, and running it with a fixed seed."""

from __future__ import annotations

import torch
from torch import nn

from hookdrop import DropBlock, Injection, LinearSchedule, inject


def run(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return model(images)


def half_ramped(model: nn.Module) -> Injection:
    """Inject DropBlock halfway through its schedule."""
    drop = inject(model, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(10), p_scale="depth")
    drop.seek(5)
    return drop
