"""Count the steps of an optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hookdrop.core.compiling import GraphBreak

# The attributes in which wrappers hold the inner optimizer: Accelerate, Lightning, timm's Lookahead, PostLocalSGD,
# fastai's OptimWrapper, Opacus.
_INNER = ("optimizer", "base_optimizer", "_base_optimizer", "optim", "opt", "original_optimizer")


class Follower:
    """Calls `advance` after every optimizer step, except for steps that a GradScaler skips."""

    def __init__(self, optimizer: Optimizer, advance: Callable[[], None]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._advance = advance
        self._is_stepping = False
        """Whether a step has begun and was not counted yet. PyTorch calls hooks also for a `super().step()` inside a
        step: the innermost counts."""
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, while it exists."""
        return self._optimizer()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._is_stepping = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Inside a compiled optimizer step, counting would trigger recompilation at every step.
        if torch.compiler.is_compiling():
            _COUNT.call(self, optimizer)
        elif self._is_stepping:
            self._is_stepping = False
            _count(self, optimizer)


def _count(follower: Follower, optimizer: Optimizer) -> None:
    # Fused optimizers run their hooks also in steps that a GradScaler skips, with `found_inf` set.
    found_inf = getattr(optimizer, "found_inf", None)
    if not (isinstance(found_inf, torch.Tensor) and found_inf.item()):
        follower._advance()


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
