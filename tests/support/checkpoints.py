"""Run a model with and without activation checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def non_reentrant(model: nn.Module, x: torch.Tensor, **settings: Any) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=False, **settings)


def reentrant(model: nn.Module, x: torch.Tensor, **settings: Any) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=True, **settings)


MODES = [reentrant, non_reentrant]
