"""What ties a handle to its hooks: finding them, changing their shared state, and letting go."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hookdrop import compiling
from hookdrop.errors import InjectionError, warn
from hookdrop.follow import Follower
from hookdrop.hooks import Override, SiteHook, State, hooks_of
from hookdrop.problems import MOVES_TO_JUDGE, problems


class Handle:
    """Holds the model weakly and the state strongly; the hooks hold neither handle nor model."""

    def __init__(self, model: nn.Module, state: State, hooks: list[SiteHook] | None = None) -> None:
        self._model = weakref.ref(model)
        self._state = state
        self._found = hooks

    # Handles are interchangeable, and are copied and pickled with the model.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other._state is self._state

    def __hash__(self) -> int:
        return id(self._state)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._alive(), "state": self._state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The hooks are found at the first use: the model may still be under construction here.
        Handle.__init__(self, state["model"], state["state"])

    @property
    def _hooks(self) -> list[SiteHook]:
        if self._found is None:
            self._found = [hook for _, hook in hooks_of(self._alive()) if hook.state is self._state]
        return self._found

    @property
    def _follower(self) -> Follower | None:
        follower: Follower | None = self._state.follower
        return follower if follower is not None and follower.alive else None

    def _alive(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise InjectionError(f"the model that {self._state.name!r} was injected into is gone.")
        return model

    def _must_be_there(self, what: str) -> None:
        if self._state.removed:
            raise InjectionError(f"{what}: {self._state.name!r} was removed from its model.\n  inject again.")
        compiling.not_while_tracing(what)

    def _advance(self, n: int = 1) -> None:
        self._must_be_there("step()")
        self._seek(self._state.step_count + n)

    def _seek(self, step: int) -> None:
        before, self._state.step_count = self._state.step_count, step
        try:
            self._refresh()
        except Exception:
            self._state.step_count = before
            raise
        self._state.driven = True
        if step != before:
            self._state.moves += 1
            if self._state.moves == MOVES_TO_JUDGE:
                self._tell_problems()

    @property
    def _target(self) -> float | None:
        """The largest target rate."""
        return max((hook.target for hook in self._hooks if hook.target is not None), default=None)

    @property
    def _multiplier(self) -> float:
        return self._state.schedule(self._state.step_count)

    def _refresh(self) -> None:
        """Bring all rates up to date, or none if one would leave its range."""
        multiplier, largest = self._multiplier, self._target or 0.0
        for hook in self._hooks:
            rate = hook.rate_at(multiplier, largest)
            if rate is not None:
                self._valid(hook, rate, multiplier)
        for hook in self._hooks:
            hook.refresh(largest)

    def _valid(self, hook: SiteHook, rate: float, multiplier: float) -> None:
        try:
            hook.regularizer.valid_rate(rate)
        except ValueError as error:
            raise ValueError(
                f"{error}\n  at {hook.site!r}: target {hook.target:g} x p_scale {hook.p_scale:g} x schedule "
                f"{multiplier:g} at step {self._state.step_count}. No rate was changed."
            ) from None

    def _switch(self, **changes: Any) -> None:
        self._must_be_there("disable(), enable() and their contexts")
        before = {key: getattr(self._state, key) for key in changes}
        self._state.__dict__.update(changes)
        try:
            self._refresh()
        except Exception:
            self._state.__dict__.update(before)
            raise

    @contextmanager
    def _overriding(self, override: Override) -> Iterator[None]:
        before = {"enabled": self._state.enabled, "override": self._state.override}
        self._switch(override=override)
        try:
            yield
        finally:
            if not self._state.removed:
                self._switch(**before)

    def _tell_problems(self) -> None:
        model = self._model()
        found = {} if model is None else problems(model, self._state, self._hooks)
        for kind, text in found.items():
            if kind not in self._state.told:
                self._state.told.add(kind)
                warn(text)

    def _detach(self) -> None:
        """Take the hooks off, without a word."""
        model = self._model()
        hooks = self._hooks if model is not None else self._found or []
        for hook in hooks:
            hook.remove()
        if self._follower is not None:
            self._follower.detach()
        self._state.follower = None
        self._state.removed = True
        compiling.reset()

    def _warn_of_foreign(self, optimizer: Optimizer) -> None:
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in trained for parameter in self._alive().parameters()):
            warn(
                f"{self._state.name!r} follows an optimizer that trains no parameter of this model: "
                "is it the one of another model?"
            )
