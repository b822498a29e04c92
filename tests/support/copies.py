"""Running a model with a fixed seed."""

from __future__ import annotations

import torch
from torch import nn


def run(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return model(images)
