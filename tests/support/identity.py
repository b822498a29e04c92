"""One hooked identity layer."""

from __future__ import annotations

import torch
from torch import nn

from hookdrop import Dropout, inject
from tests.support.measures import zero_fraction


def zeroed(model: nn.Module, x: torch.Tensor) -> float:
    """The fraction of zeros in the output."""
    with torch.no_grad():
        return zero_fraction(model(x))


def layer(p: float = 0.5, **kwargs: object) -> tuple[nn.Module, object]:
    model = nn.Sequential(nn.Identity())
    return model, inject(model, Dropout(p), layers="0", **kwargs)


X = torch.ones(40_000)
