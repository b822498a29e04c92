"""One recorded layer."""

from __future__ import annotations

import torch
from torch import nn

from hookdrop import (
    Dropout,
    Injection,
    inject,
)

X = torch.ones(8, 16)


def layer(p: float = 0.5, **settings: object) -> tuple[nn.Sequential, Injection]:
    model = nn.Sequential(nn.Identity())
    return model, inject(model, Dropout(p), layers="0", **settings)
