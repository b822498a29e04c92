"""Inputs and tolerances for statistical tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def within(found: Tensor, expected: float, spread: float, draws: float) -> bool:
    """Whether a mean over `draws` draws with standard deviation `spread` is within 4 standard errors."""
    return abs(found.double().item() - expected) <= 4 * spread / math.sqrt(draws) + 1e-12


def styled(n: int = 6, channels: int = 3, size: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Samples with different styles."""
    return (
        torch.randn(n, channels, size, size) * (1 + torch.rand(n, channels, 1, 1)) + torch.arange(n).view(-1, 1, 1, 1)
    ).to(dtype)
