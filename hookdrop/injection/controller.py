"""What ties a handle to its hooks: finding them, changing their shared state, and letting go."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hookdrop.diagnostics import watchdog as watch
from hookdrop.diagnostics.checks import MOVES_TO_JUDGE, problems
from hookdrop.errors import InjectionError, warn
from hookdrop.hooks import compiling
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.optimizer import Follower
from hookdrop.hooks.registry import hooks_of, take_off
from hookdrop.hooks.state import Override, State

_changes = threading.RLock()
"""Held while rates change: a change by another thread in between would leave hooks at the rates of before."""


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
        state = self._state
        if self._found is None and state.hidden:
            # They are off just now, and this is not to be remembered.
            placed = {hook.site: hook for hook in state.members if hook.placed}
            return [placed[site] for site in state.sites if site in placed]
        if self._found is None:
            self._found = [hook for _, hook in hooks_of(self._alive()) if hook.state is state]
        return self._found if state.removed else [hook for hook in self._found if hook.placed]

    @property
    def _follower(self) -> Follower | None:
        follower: Follower | None = self._state.follower
        return follower if follower is not None and follower.alive else None

    def _alive(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise InjectionError(
                f"the model that {self._state.name!r} was injected into is gone.\n"
                "  no handle keeps its model, and the copy of a handle alone has none: find(model) gives the handles."
            )
        return model

    def _must_be_there(self, what: str) -> None:
        if self._state.removed:
            raise InjectionError(f"{what}: {self._state.name!r} was removed from its model.\n  inject again.")
        compiling.not_while_tracing(what)

    def _advance(self, n: int = 1) -> None:
        if self._follower is not None and not any(hook.sits_somewhere for hook in self._state.members):
            # An optimizer that outlives the model would keep its hooks. A wrapper or a part may go without the rest.
            self._follower.release()
        self._must_be_there("step()")
        self._seek(self._state.step_count + n)

    def _seek(self, step: int) -> None:
        before = self._state.step_count
        with self._changing():
            self._state.step_count = step
        self._state.driven, self._state.updates = True, 0
        if step != before:
            self._state.moves += 1
            if self._state.moves % MOVES_TO_JUDGE == 0:
                self._tell_problems()

    @property
    def _target(self) -> float | None:
        """The largest target rate, whatever its sign."""
        return max((hook.target for hook in self._state.members if hook.target is not None), key=abs, default=None)

    @property
    def _neutral(self) -> float:
        """The rate at which nothing is done, if the sites have one in common; else 0."""
        found = {hook.regularizer.neutral for hook in self._state.members}
        return found.pop() if len(found) == 1 else 0.0

    @property
    def _multiplier(self) -> float:
        return float(self._state.schedule(self._state.step_count))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """A change of the state that is undone if it does not fit, rates and all."""
        with _changes:
            state, members = self._state, list(self._state.members)
            before = state.step_count, state.enabled, list(state.overrides)
            targets = [hook.target for hook in members]
            try:
                yield
                self._check_rates()
            except BaseException:
                state.step_count, state.enabled, state.overrides = before
                for hook, target in zip(members, targets, strict=True):
                    hook.target = target
                raise
            finally:
                self._refresh()

    def _check_rates(self) -> None:
        """Raise `ValueError` if a rate has left its range, also one that a context has out of force."""
        multiplier, largest = self._multiplier, self._target or 0.0
        for hook in self._state.members:
            for rate in (hook.rate_at(multiplier), hook.rate_in_force(multiplier, largest)):
                if rate is not None:
                    self._valid(hook, rate, multiplier)

    def _refresh(self) -> None:
        """Bring all rates up to date: also those of hooks that are not on this handle's part of the model."""
        largest = self._target or 0.0
        for hook in self._state.members:
            hook.refresh(largest)
        # After all of them: where a warning is an error, no rate may be left behind.
        for hook in self._state.members:
            if hook.seen is not None and not hook.doubted:
                hook.tell_doubts()

    def _valid(self, hook: SiteHook, rate: float, multiplier: float) -> None:
        try:
            hook.regularizer.valid_rate(rate)
        except ValueError as error:
            raise ValueError(
                f"{error}\n  at {hook.site!r}: target {hook.target:g} x p_scale {hook.p_scale:g} x schedule "
                f"{multiplier:g} at step {self._state.step_count}. No rate was changed."
            ) from None

    @contextmanager
    def _overriding(self, override: Override) -> Iterator[None]:
        self._must_be_there("contexts")
        context = self._state.overriding(override)
        with _changes:
            context.__enter__()
        try:
            with _changes:
                self._check_rates()
                self._refresh()
            yield
        finally:
            with _changes:
                context.__exit__(None, None, None)
                self._refresh()

    def _tell_problems(self) -> None:
        model = self._model()
        found = {} if model is None else problems(model, self._state, self._hooks)
        for kind, text in found.items():
            self._state.tell(kind, text)

    def _detach(self) -> None:
        """Take the hooks off, without a word; on a part of a model those of that part alone."""
        model = self._model()
        take_off(model, self._hooks if model is not None else self._found or [])
        state = self._state
        gone = [hook for hook in state.members if not hook.placed]
        left = {hook.site for hook in state.members if hook.placed}
        state.sites = tuple(site for site in state.sites if site in left)
        if not left:
            if state.follower is not None:
                state.follower.detach()
            state.follower = None
            state.removed = True
            watch.forget(state)
        for hook in gone:
            hook.switch()
            if left:  # is not to be held to the target of what is gone
                state.members.discard(hook)
        compiling.reset()

    def _warn_of_foreign(self, optimizer: Optimizer) -> None:
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in trained for parameter in self._alive().parameters()):
            warn(
                f"{self._state.name!r} follows an optimizer that trains no parameter of this model: "
                "is it the one of another model?"
            )
