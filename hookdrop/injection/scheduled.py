"""The base of handles whose rates follow a schedule: counts optimizer steps and drives the rates."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from functools import partial
from typing import ClassVar, TypeVar

from torch import nn
from torch.optim import Optimizer

from hookdrop.errors import InjectionError
from hookdrop.guards import progress
from hookdrop.guards.updates import restarted, trains_other_model
from hookdrop.hooks import compiling
from hookdrop.hooks.optimizer import Follower, innermost
from hookdrop.hooks.state import InjectionState
from hookdrop.schedules import Schedule
from hookdrop.utils.validation import count

Self = TypeVar("Self", bound="ScheduledHandle")

rate_lock = threading.RLock()
"""Held while rates change, so that a concurrent change cannot leave some at their old value."""


class ScheduledHandle(ABC):
    """Base class of the handles of `inject` and `set_dropout`."""

    _state: InjectionState
    _made_by: ClassVar[str] = "inject()"
    """The function to call again after the handle was removed."""

    @property
    def schedule(self) -> Schedule:
        """The schedule of the rate; `ConstantSchedule()` if none was given."""
        return self._state.schedule

    @property
    def step_count(self) -> int:
        """Number of optimizer steps taken."""
        return self._state.step_count

    def step(self, n: int = 1) -> None:
        """Count `n` optimizer steps. Call it after each `optimizer.step()`, unless `follow` does.

        Raises:
            InjectionError: the handle follows an optimizer, so each step would be counted twice.
        """
        self._check_not_following()
        self._advance(count(n, "n", "step"))

    def seek(self, step: int) -> None:
        """Set the number of optimizer steps taken. Idempotent, for trainers and for resuming."""
        self._check_not_removed("seek()")
        step = count(step, "step", "seek", 0)
        self._seek(step)

    def follow(self: Self, optimizer: Optimizer | None) -> Self:
        """Count the steps that `optimizer` takes; skipped steps do not count.

        Args:
            optimizer: any torch optimizer, also inside a wrapper of Accelerate, Lightning, Lookahead, or fastai.
                Following the same optimizer again has no effect; None stops following.

        Returns:
            This handle.

        Raises:
            InjectionError: the handle follows another optimizer.
        """
        self._check_not_removed("follow()")
        current = self._follower
        if optimizer is None:
            if current is not None:
                current.detach()
            self._state.live.follower, self._state.live.was_stepped = None, False
            return self
        inner = innermost(optimizer)
        if current is not None and current.follows(inner):
            return self
        if current is not None:
            raise InjectionError(
                f"{self._state.name!r} already follows an optimizer ({current.title}); nothing changed.\n"
                "  to switch: drop.follow(None), then drop.follow(optimizer)"
            )
        trains_other_model(self._state, self._require_model(), inner)
        self._state.live.follower = Follower(inner, self._advance, partial(restarted, self._state))
        return self

    def disable(self) -> None:
        """Drop nothing until `enable`; the schedule continues."""
        self._set_enabled(False)

    def enable(self) -> None:
        """Drop again after `disable`."""
        self._set_enabled(True)

    def _set_enabled(self, enabled: bool) -> None:
        self._check_not_removed("enable()" if enabled else "disable()")
        with self._changing():
            self._state.set_enabled(enabled)

    @property
    def _follower(self) -> Follower | None:
        return self._state.live.follower if self._state.followed else None

    def _advance(self, n: int = 1) -> None:
        if self._follower is not None and not self._is_attached():
            # The modules no longer exist, so the optimizer must stop counting.
            self._follower.release()
        self._check_not_removed("step()")
        with rate_lock:
            self._seek(self._state.step_count + n)

    def _stop(self) -> None:
        """Mark the handle as removed."""
        live = self._state.live
        if live.follower is not None:
            live.follower.detach()
        live.follower = None
        self._state.removed = True
        progress.unwatch(self._state)

    # --- checks

    def _check_not_following(self) -> None:
        if self._follower is not None:
            name = repr(self._state.name)
            raise InjectionError(
                f"{name} follows an optimizer, which counts the steps: this call would count them twice.\n"
                f"  remove drop.step(), or stop following with drop.follow(None). Still at step {self.step_count}."
            )

    def _check_not_removed(self, what: str) -> None:
        if self._state.removed:
            raise InjectionError(
                f"{what}: {self._state.name!r} was removed from its model.\n  call {self._made_by} again."
            )
        compiling.raise_if_tracing(what)

    # --- what a handle defines

    @abstractmethod
    def _seek(self, step: int) -> None:
        """Set the step count and the rates, or neither after an error."""

    @abstractmethod
    def _changing(self) -> AbstractContextManager[None]:
        """Change settings inside the block; undo the change, with its rates, if a rate is out of range."""

    @abstractmethod
    def _is_attached(self) -> bool:
        """Whether any of the changed modules still exists."""

    @abstractmethod
    def _require_model(self) -> nn.Module:
        """Return the model, or raise if it was deleted."""
