"""Check that hookdrop leaves no objects, hooks or listeners behind."""

import collections
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from hookdrop import Dropout, inject
from hookdrop.core.registry import hidden_modules


def ours() -> collections.Counter[str]:
    """Count live hookdrop objects and hook handles that were created since `gc.freeze()`."""
    gc.collect()
    names = [f"{type(thing).__module__}.{type(thing).__name__}" for thing in gc.get_objects()]
    return collections.Counter(name for name in names if name.startswith("hookdrop.") or "RemovableHandle" in name)


def entries(model: nn.Module) -> int:
    """The number of entries in the hook dictionaries of `model`."""
    tables = [name for name in vars(nn.Module()) if "hooks" in name]
    return sum(len(getattr(module, name)) for module in model.modules() for name in tables)


@contextmanager
def no_leaks(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Check at the end that no hookdrop object, hook or listener that was created inside is left."""
    inject(model, Dropout(0.5), layers="*").remove()
    gc.collect()
    listeners = set(_global_optimizer_post_hooks)
    gc.freeze()
    yield
    assert ours() == {}
    assert entries(model) == 0
    assert not optimizer._optimizer_step_post_hooks
    assert set(_global_optimizer_post_hooks) <= listeners
    assert not list(hidden_modules)
