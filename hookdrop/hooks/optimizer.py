"""Counting the steps of an optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hookdrop.hooks.compiling import keep_outside_of_graphs, outside_of_graphs

# Where wrappers keep the optimizer whose `step` runs: Accelerate's and Lightning's, timm's Lookahead, PostLocalSGD,
# fastai's OptimWrapper.
_INNER = ("optimizer", "base_optimizer", "_base_optimizer", "optim", "opt")

_COUNT = "hookdrop counts the steps of an optimizer."


class Follower:
    """Calls `advance` after every step of an optimizer that was not skipped."""

    def __init__(self, optimizer: Optimizer, advance: Callable[[], None], on_first_step: Callable[[int], None]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._advance = advance
        self._on_first_step: Callable[[int], None] | None = on_first_step
        """Called with the number of steps that the optimizer knows of, before the first one is counted."""
        keep_outside_of_graphs(_count, _COUNT)
        self._handle = optimizer.register_step_post_hook(self._after_step)

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
        """Count no more and hold nothing; called within a step, where to `detach` would break the optimizer's loop."""
        self._advance, self._on_first_step = _nothing, None

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # In a compiled optimizer step, counting would compile the code again for each count.
        if torch.compiler.is_compiling():
            outside_of_graphs[_COUNT](self, optimizer)
        else:
            _count(self, optimizer)


def _count(follower: Follower, optimizer: Optimizer) -> None:
    if _was_skipped(optimizer):
        return
    first, follower._on_first_step = follower._on_first_step, None
    if first is not None:
        first(_steps_taken(optimizer))
    follower._advance()


def _nothing() -> None:
    pass


def _was_skipped(optimizer: Optimizer) -> bool:
    """A fused optimizer under a GradScaler runs its hooks for a skipped step too, with `found_inf` set."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf.item())


def _steps_taken(optimizer: Optimizer) -> int:
    """The steps that the optimizer's own state counts, as Adam's does; 0 where it does not count."""
    steps = (state["step"] for state in optimizer.state.values() if isinstance(state, dict) and "step" in state)
    return int(next(steps, 0))


def innermost(optimizer: object) -> Optimizer:
    """The torch optimizer inside of wrappers such as Accelerate's, Lightning's, Lookahead and fastai's.

    Raises:
        TypeError: there is none.
    """
    inner = next((i for name in _INNER if _has_steps(i := getattr(optimizer, name, None)) and i is not optimizer), None)
    if inner is not None:
        return innermost(inner)
    if isinstance(optimizer, Optimizer):
        return optimizer
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    raise TypeError(
        f"follow: expected a torch.optim.Optimizer, got {cls.__module__}.{cls.__qualname__}"
        f"{' (the class)' if isinstance(optimizer, type) else ''}.\n"
        "  without a torch optimizer, call drop.step() after each step, or drop.seek(global_step)."
    )


def _has_steps(value: object) -> bool:
    return isinstance(value, Optimizer) or (
        callable(getattr(value, "step", None)) and any(hasattr(value, name) for name in _INNER)
    )
