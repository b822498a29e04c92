"""Count the steps of an optimizer."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from hookdrop.core.compiling import GraphBreak

# The attributes in which wrappers hold the inner optimizer: Accelerate, Lightning, timm's Lookahead, PostLocalSGD,
# fastai's OptimWrapper, Opacus.
_INNER = ("optimizer", "base_optimizer", "_base_optimizer", "optim", "opt", "original_optimizer")


class Follower:
    """Calls `advance` after every optimizer step, except for steps that a GradScaler skips."""

    def __init__(
        self, optimizer: Optimizer, advance: Callable[[], None], on_first_step: Callable[[int, bool], None]
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._advance = advance
        self._on_first_step: Callable[[int, bool], None] | None = on_first_step
        """Called before the first step is counted, with the step count in the optimizer's state, and with whether it
        had a state before that step, such as momentum."""
        self._had_state = False
        self._handle = optimizer.register_step_post_hook(self._after_step)
        self._first_handle = optimizer.register_step_pre_hook(self._before_first_step)

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, while it exists."""
        return self._optimizer()

    def detach(self) -> None:
        self._handle.remove()
        self._first_handle.remove()

    def release(self) -> None:
        """Stop counting and drop all references, without `detach`: a step is iterating over the optimizer's hooks."""
        self._advance, self._on_first_step = lambda: None, None

    def _before_first_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._had_state = any(optimizer.state.values())

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Inside a compiled optimizer step, counting would trigger recompilation at every step.
        if torch.compiler.is_compiling():
            _COUNT.call(self, optimizer)
        elif not is_inside_step(optimizer):
            _count(self, optimizer)


def _count(follower: Follower, optimizer: Optimizer) -> None:
    # Fused optimizers run their hooks also in steps that a GradScaler skips, with `found_inf` set.
    found_inf = getattr(optimizer, "found_inf", None)
    if isinstance(found_inf, torch.Tensor) and found_inf.item():
        return
    first, follower._on_first_step = follower._on_first_step, None
    if first is not None:
        follower._first_handle.remove()
        # The step count in the optimizer's state, as in Adam.
        steps = (state["step"] for state in optimizer.state.values() if isinstance(state, dict) and "step" in state)
        first(int(next(steps, 0)), follower._had_state)
    follower._advance()


def is_inside_step(optimizer: Optimizer) -> bool:
    """Whether a hook runs after `super().step()`, inside the step of the class: PyTorch calls the hooks for both."""
    hooks_of_this = sys._getframe(2)  # the function of PyTorch that calls the step and its hooks
    frame: FrameType | None = hooks_of_this.f_back
    while frame is not None:
        if frame.f_code is hooks_of_this.f_code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


_COUNT = GraphBreak(_count, "hookdrop counts optimizer steps.")


def innermost(optimizer: object) -> Optimizer:
    """Return the torch optimizer inside wrappers such as those of Accelerate, Lightning, Lookahead and fastai."""
    inner = next((i for name in _INNER if _has_steps(i := getattr(optimizer, name, None)) and i is not optimizer), None)
    if inner is not None:
        return innermost(inner)
    if isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_post_hooks"):
        return optimizer
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    which = " (the class)" if isinstance(optimizer, type) else ""
    which = ", whose __init__ does not call that of Optimizer" if isinstance(optimizer, Optimizer) else which
    raise TypeError(
        f"follow: expected a torch.optim.Optimizer with hooks, got {cls.__module__}.{cls.__qualname__}{which}.\n"
        "  without it, call drop.step() after each optimizer.step(), or drop.seek(global_step)."
    )


def _has_steps(value: object) -> bool:
    return isinstance(value, Optimizer) or (
        callable(getattr(value, "step", None)) and any(hasattr(value, name) for name in _INNER)
    )
