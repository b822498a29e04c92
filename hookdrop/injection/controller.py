"""The base of handles: finds the hooks, changes their rates together, and removes them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from hookdrop.errors import InjectionError
from hookdrop.guards.problems import STEPS_BEFORE_WARNING, find_problems, warn_about_shape
from hookdrop.hooks.hook import NO_RATE, CurrentRate, SiteHook
from hookdrop.hooks.registry import hooks_of, remove_hooks
from hookdrop.hooks.state import InjectionState, Override
from hookdrop.injection.scheduled import ScheduledHandle, rate_lock


class Controller(ScheduledHandle):
    """Base class of handles. Holds the model weakly and the state strongly; hooks hold neither handle nor model."""

    def __init__(self, model: nn.Module, state: InjectionState, hooks: list[SiteHook] | None = None) -> None:
        self._model = weakref.ref(model)
        self._state = state
        self._cached_hooks = hooks

    # Handles on the same hooks are equal. Copying or pickling a handle includes its model.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Controller) and other._state is self._state

    def __hash__(self) -> int:
        return id(self._state)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._require_model(), "state": self._state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The hooks are found on first use: the model may still be under construction here.
        Controller.__init__(self, state["model"], state["state"])

    @property
    def _hooks(self) -> list[SiteHook]:
        state = self._state
        if self._cached_hooks is None and state.live.hidden_count:
            # `without_hooks` has taken the hooks off the model for now, so this list must not be cached.
            placed = {hook.site: hook for hook in state.live.members if hook.placed}
            return [placed[site] for site in state.sites if site in placed]
        if self._cached_hooks is None:
            self._cached_hooks = [hook for _, hook in hooks_of(self._require_model()) if hook.state is state]
        return self._cached_hooks if state.removed else [hook for hook in self._cached_hooks if hook.placed]

    def _require_model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise self._model_gone_error()
        return model

    def _model_gone_error(self) -> InjectionError:
        return InjectionError(
            f"the model that {self._state.name!r} was injected into was deleted.\n"
            "  a handle does not keep its model alive: keep a reference to the model. For a copied model: find(copy).\n"
            "  if your trainer built a new model, inject into that one in a trainer callback."
        )

    # --- units: rates with the same unit can be compared and set together

    @property
    def _units(self) -> dict[str, list[SiteHook]]:
        """The hooks that have a rate, grouped by its unit."""
        units: dict[str, list[SiteHook]] = {}
        for hook in self._state.live.members:
            if hook.target is not None:
                units.setdefault(_unit(hook), []).append(hook)
        return dict(sorted(units.items(), key=lambda item: (item[0] != "p", item[0])))

    @property
    def _target(self) -> float | None:
        """The target rate of the largest magnitude; None if there is no rate or the units differ."""
        units = list(self._units.values())
        return largest_target(units[0]) if len(units) == 1 else None

    def _require_common_unit(self, what: str) -> float:
        """Return the largest target rate, or raise if there is no rate or the units differ."""
        units = self._units
        if not units:
            raise InjectionError(
                f"{what}: {self._state.name!r} has no rate to set: {self._hooks[0].describe()} has none of "
                "p, drop_prob, drop_rate."
            )
        if len(units) > 1:
            sites = "\n".join(
                f"  {unit}: {', '.join(sorted(repr(hook.site) for hook in hooks))}" for unit, hooks in units.items()
            )
            raise InjectionError(
                f"{what}: the sites of {self._state.name!r} have rates with different units.\n{sites}\n"
                "  use separate injections, each with its own target. No rate was changed."
            )
        return largest_target(next(iter(units.values())))

    # --- changing rates

    def _is_attached(self) -> bool:
        # Check the hooks, not the model: a wrapper may be deleted before its parts.
        return any(hook.is_attached for hook in self._state.live.members)

    def _seek(self, step: int) -> None:
        state, live = self._state, self._state.live
        with rate_lock:
            before, state.step_count = state.step_count, step
            try:
                self._check_and_update_rates(settings_changed=False)
            except BaseException:
                state.step_count = before
                self._update_rates()
                raise
        live.was_stepped = True
        self._warn_about_shapes()
        if step != before:
            live.moves += 1
            if live.moves % STEPS_BEFORE_WARNING == 0:
                self._warn_about_problems()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change settings inside the block; undo the change, with its rates, if a rate is out of range."""
        with rate_lock:
            state, members = self._state, list(self._state.live.members)
            before = state.step_count, state.enabled, list(state.live.overrides)
            targets = [hook.target for hook in members]
            try:
                yield
                self._check_and_update_rates()
            except BaseException:
                state.step_count, state.enabled, state.live.overrides = before
                for hook, target in zip(members, targets, strict=True):
                    hook.target = target
                self._update_rates()
                raise
        self._warn_about_shapes()

    @contextmanager
    def _overriding(self, override: Override) -> Iterator[None]:
        self._check_not_removed("contexts")
        with ExitStack() as stack:
            # Enter and exit under the lock, so that no other thread sees the override without its rates.
            with rate_lock:
                stack.enter_context(self._updating_rates_after(self._state.overriding(override)))
                self._check_and_update_rates()
            yield

    @contextmanager
    def _updating_rates_after(self, context: AbstractContextManager[None]) -> Iterator[None]:
        context.__enter__()
        try:
            yield
        finally:
            with rate_lock:
                context.__exit__(None, None, None)
                self._update_rates()

    def _check_and_update_rates(self, settings_changed: bool = True) -> None:
        """Check the current rates, then apply them.

        Multipliers in [0, peak] need no check: inject and every change of settings checked the rate at the peak.
        """
        multiplier, peak = self._state.multiplier, self._state.schedule.peak
        if settings_changed or peak is None or not 0.0 <= multiplier <= peak:
            self._check_rates(multiplier, peak)
        self._update_rates(multiplier)

    def _update_rates(self, multiplier: float | None = None) -> None:
        """Apply the current rates at all sites, including those outside this handle's part of the model."""
        state, members = self._state, list(self._state.live.members)
        rates = self._rates(members, state.multiplier if multiplier is None else multiplier)
        on, sampling = state.on, state.sampling
        created: dict[tuple[float, float], CurrentRate] = {}
        for hook, value in zip(members, rates, strict=True):
            if value is None:
                hook.set_rate(NO_RATE, on, sampling)
                continue
            key = value, hook.rate.neutral
            if key not in created:
                created[key] = CurrentRate(value, value == key[1])
            hook.set_rate(created[key], on, sampling)

    def _warn_about_shapes(self) -> None:
        """Emit the shape warnings that compiled code had to defer; called when a rate changes."""
        for hook in self._state.live.members:
            if hook.last_shape is not None and hook.listeners:
                warn_about_shape(hook)

    def _rates(self, members: list[SiteHook], multiplier: float) -> list[float | None]:
        """Return target * multiplier * p_scale per hook; in a context, p replaces the largest target."""
        override = self._state.override
        if override is None or override.p is None:
            return [None if hook.target is None else hook.target * multiplier * hook.p_scale for hook in members]
        p, largest = override.p, self._target or 0.0
        return [
            None if hook.target is None else p * (hook.target / largest if largest else 1.0) * hook.p_scale
            for hook in members
        ]

    def _check_rates(self, multiplier: float, peak: float | None) -> None:
        """Raise `ValueError` if a rate is out of range now, at the peak of the schedule, or in a context."""
        members = list(self._state.live.members)
        for hook, rate in zip(members, self._rates(members, multiplier), strict=True):
            if rate is None or hook.target is None:
                continue
            _require_valid(hook, hook.target, multiplier, f"at step {self._state.step}")
            if peak is not None:
                _require_valid(hook, hook.target, peak, "at its peak")
            if self._state.override is not None and self._state.override.p is not None:
                _require_valid(hook, rate / hook.p_scale if hook.p_scale else 0.0, 1.0, "in this context")

    # --- warnings and removal

    def _warn_about_problems(self) -> None:
        model = self._model()
        found = {} if model is None else find_problems(model, self._state, self._hooks)
        for kind, text in found.items():
            self._state.warn_once(kind, text)

    def _detach(self) -> None:
        """Remove the hooks without emitting warnings; a handle on part of a model removes only that part's."""
        model = self._model()
        remove_hooks(model, self._hooks if model is not None else self._cached_hooks or [])
        state, live = self._state, self._state.live
        removed = [hook for hook in live.members if not hook.placed]
        remaining = {hook.site for hook in live.members if hook.placed}
        state.sites = tuple(site for site in state.sites if site in remaining)
        if not remaining:
            self._stop()
        for hook in removed:
            hook.train_rate = hook.eval_rate = None
            if remaining:  # the removed targets no longer count
                live.members.discard(hook)


def _require_valid(hook: SiteHook, target: float, multiplier: float, when: str) -> None:
    """Raise `ValueError` if a rate is out of the range of the hook's regularizer."""
    try:
        hook.valid_target(target * multiplier * hook.p_scale)
    except ValueError as error:
        raise ValueError(
            f"{error}\n  at {hook.site!r}: target {target:g} x p_scale {hook.p_scale:g} x schedule {multiplier:g} "
            f"{when}. No rate was changed."
        ) from None


def _unit(hook: SiteHook) -> str:
    return "p" if hook.rate.kind == "drop" else f"{hook.rate.attribute} of {hook.regularizer.title}"


def largest_target(hooks: list[SiteHook]) -> float:
    """Return the target with the largest magnitude among hooks that have a target."""
    return max((hook.target for hook in hooks if hook.target is not None), key=abs)
