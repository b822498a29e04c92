"""Run a model with and without activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[[nn.Sequential, torch.Tensor], torch.Tensor]


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def non_reentrant(model: nn.Module, x: torch.Tensor, **settings: Any) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=False, **settings)


def reentrant(model: nn.Module, x: torch.Tensor, **settings: Any) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=True, **settings)


MODES = [reentrant, non_reentrant]


def run(model: nn.Sequential, x: torch.Tensor, way: Forward, between: Callable[[], object] = lambda: None) -> list[Any]:
    """Return the output and all gradients from a fixed seed; `between` is called between forward and backward."""
    torch.manual_seed(1)
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = way(model, x)
    between()
    (y * y).sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]
