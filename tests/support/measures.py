"""Measurements of outputs."""

from __future__ import annotations

import torch


def zero_fraction(y: torch.Tensor) -> float:
    """The fraction of elements that are 0."""
    return (y == 0).float().mean().item()
