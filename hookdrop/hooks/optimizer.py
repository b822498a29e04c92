"""Count the steps of an optimizer, and the updates of a model's weights."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from hookdrop.hooks.compiling import GraphBreak
from hookdrop.utils.torch_internals import parameters_of, version_of

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
    def title(self) -> str:
        """The class name of the optimizer."""
        return type(self._optimizer()).__name__

    @property
    def alive(self) -> bool:
        """Whether the optimizer still exists."""
        return self._optimizer() is not None

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether this follower follows `optimizer`."""
        return self._optimizer() is optimizer

    def detach(self) -> None:
        """Stop following the optimizer."""
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
    """Return the torch optimizer inside wrappers such as those of Accelerate, Lightning, Lookahead and fastai.

    Raises:
        TypeError: there is no torch optimizer inside.
    """
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


# --- updates of the weights


class WeightUpdates:
    """Counts the updates of a model by its first trainable weight. Holds the model weakly."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.updates = 0
        self._owner: tuple[weakref.ref[nn.Module], str] | None = None
        """The module and name of the weight. A weak reference to the parameter itself would prevent swapping it."""
        weight = self.weight()
        self._first_version = self._version = None if weight is None else version_of(weight)

    def weight(self) -> nn.Parameter | None:
        """Return the first trainable parameter. It is cached, because a search at every step would be slow."""
        module = None if self._owner is None else self._owner[0]()
        weight = None if module is None or self._owner is None else parameters_of(module).get(self._owner[1])
        if weight is None or not weight.requires_grad:
            model = self.model()
            weight, self._owner = (None, None) if model is None else _first_weight(model)
        return weight

    def is_trained_by(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer updates the weight."""
        weight = self.weight()
        return any(weight is parameter for group in optimizer.param_groups for parameter in group["params"])

    @property
    def updates_so_far(self) -> int:
        """The number of updates, including those that were not noticed, if they increment the version."""
        weight = self.weight()
        moved = 0 if weight is None or self._first_version is None else version_of(weight) - self._first_version
        return max(self.updates, moved)

    def notice(self, after: Optimizer | None = None) -> bool:
        """Return whether the weight changed since the last call, and count it; `after` has just taken a step."""
        weight = self.weight()
        before, self._version = self._version, None if weight is None else version_of(weight)
        # Fused kernels do not increment the version.
        fused = after is not None and any(group.get("fused") for group in after.param_groups[:1])
        changed = before != self._version or (fused and after is not None and self.is_trained_by(after))
        self.updates += changed
        return changed


def _first_weight(model: nn.Module) -> tuple[nn.Parameter | None, tuple[weakref.ref[nn.Module], str] | None]:
    """Find the first parameter that an optimizer may update, and its location."""
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is None or isinstance(parameter, UninitializedParameter):
                continue
            if parameter.requires_grad and not parameter.is_inference():
                return parameter, (weakref.ref(module), name)
    return None, None
