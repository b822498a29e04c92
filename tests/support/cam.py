"""Normalization of class activation maps."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("pytorch_grad_cam")


def scaled(maps: torch.Tensor) -> torch.Tensor:
    """Scale each map to [0, 1], as pytorch-grad-cam does."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    return (maps - low) / (high - low + 1e-7)
