"""Parameter gradients by name."""

from __future__ import annotations

import torch
from torch import nn


def gradients(model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(images).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
