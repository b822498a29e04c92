"""What the tests of threads and of leaks share."""

from __future__ import annotations

import collections
import gc

import torch
from torch import nn

X = torch.ones(64, 8)


def pair() -> nn.Sequential:
    """Two layers whose outputs are not 0 by themselves."""
    return nn.Sequential(nn.Linear(8, 8), nn.Hardtanh(1.0, 2.0))


def zeroed(y: torch.Tensor) -> float:
    return (y == 0).float().mean().item()


def ours() -> collections.Counter[str]:
    """How many objects of hookdrop's classes were made since `gc.freeze()` and are still there; and handles of hooks."""
    gc.collect()
    names = [f"{type(thing).__module__}.{type(thing).__name__}" for thing in gc.get_objects()]
    return collections.Counter(name for name in names if name.startswith("hookdrop.") or "RemovableHandle" in name)


def entries(model: nn.Module) -> int:
    """How many entries the hook dictionaries of `model` have."""
    tables = [name for name in vars(nn.Module()) if "hooks" in name]
    return sum(len(getattr(module, name)) for module in model.modules() for name in tables)
