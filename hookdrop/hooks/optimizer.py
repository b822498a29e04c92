"""Counting the steps of an optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

# Where wrappers keep the optimizer whose `step` runs: Accelerate's and Lightning's, timm's Lookahead, PostLocalSGD.
_INNER = ("optimizer", "base_optimizer", "_base_optimizer", "optim")


class Follower:
    """Calls `advance` after every step of an optimizer that was not skipped."""

    def __init__(self, optimizer: Optimizer, advance: Callable[[], None]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._advance = advance
        # In a compiled optimizer step, counting would compile anew for each count.
        count = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
        self._handle = optimizer.register_step_post_hook(count)

    @property
    def title(self) -> str:
        """The optimizer's class."""
        return type(self._optimizer()).__name__

    @property
    def alive(self) -> bool:
        """Whether the optimizer still exists."""
        return self._optimizer() is not None

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether this is the optimizer that is followed."""
        return self._optimizer() is optimizer

    def detach(self) -> None:
        """Follow no more."""
        self._handle.remove()

    def release(self) -> None:
        """Count no more and hold nothing; from within a step, where to `detach` would break the optimizer's loop."""
        self._advance = _nothing

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _was_skipped(optimizer):
            self._advance()


def _nothing() -> None:
    pass


def innermost(optimizer: object) -> Optimizer:
    """The optimizer inside Accelerate's, Lightning's and Lookahead's wrappers.

    Raises:
        TypeError: it is no optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"follow: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.\n"
            "  without one, call drop.step() after each step or drop.seek(global_step)."
        )
    for name in _INNER:
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer) and inner is not optimizer:
            return innermost(inner)
    return optimizer


def _was_skipped(optimizer: Optimizer) -> bool:
    """A fused optimizer under a GradScaler runs its hooks for a skipped step too; it is told by `found_inf`."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf.item())
