"""The state and the rates of the hooks of an injection: `InjectionState` is copied with them, `LiveState` is not."""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hookdrop.core import events
from hookdrop.core.errors import warn
from hookdrop.core.follow import Follower
from hookdrop.core.regularizer import NO_RATE, CurrentRate
from hookdrop.core.schedules import ConstantSchedule, Schedule
from hookdrop.core.sink import RateSink


@dataclass(eq=False)
class Override:
    """The settings that a context overrides; None does not override."""

    sampling: bool | None = None  # True enables the hooks, also in eval mode. False disables them.
    p: float | None = None
    step: int | None = None


class LiveState:
    """State that belongs to this process and model. A copied injection starts with a new one."""

    def __init__(self) -> None:
        self.root: weakref.ref[nn.Module] | None = None  # the model that the hooks were placed on; None in a copy
        self.survey: Any = None  # what running the model showed to a recipe over its own dropout
        self.planned: dict[str, str] = {}  # by kind, the warnings of the plan that stay true
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()
        """Weak references to the hooks, so that a copy of one layer does not copy the others."""
        self.known_sites: set[str] = set()  # the sites of all current and former members
        self.follower: Follower | None = None
        self.was_stepped = False  # whether `step`, `seek` or an optimizer has set the step count in this process
        self.steps_ahead: int | None = None
        """How many more steps a followed optimizer has taken, until the step is set; 0 if it does not tell."""
        self.moves = 0  # how many times they changed it
        self.trained = False  # whether any hook ran in training mode
        self.hidden_count = 0  # how many active `without_hooks` contexts hide the hooks
        self.overrides: list[Override] = []  # the active overrides, innermost last
        self.contexts: list[Override] = []  # the overrides of all contexts that have not exited
        self.observe: Callable[..., Tensor] | None = None
        """Called with (hook, tensor, rate, **context) in place of the regularizer by `probe` and `recording`."""
        self.checkpointed: Any = None  # the `CheckpointedCalls` that a backward pass may recompute
        self.loss_terms: Any = None  # the `LossTerms` of penalties; None if no hook has a penalty
        self.update_counter: Any = None  # the `UpdateCounter` of `guards.progress.watch`

    @property
    def has_lost_all_hooks(self) -> bool:
        return bool(self.known_sites) and not any(hook.is_attached for hook in self.members)

    def __reduce__(self) -> Any:
        return LiveState, ()


@dataclass(eq=False)
class InjectionState:
    """Name, sites, schedule, step count and switches, which are copied and pickled with the hooks."""

    name: str
    sites: tuple[str, ...]
    schedule: Schedule
    step_count: int = 0
    enabled: bool = True
    portable: bool = False  # whether pickles of the model leave the hooks out
    recipe: Mapping[str, Any] | None = None
    """The arguments of `inject` with which a recipe chooses the same sites again."""
    removed: bool = False
    training_ended: bool = False  # whether it was placed by a callback for a training that has ended
    warned_kinds: set[str] = field(default_factory=set)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)  # identifies copies of the same original
    live: LiveState = field(default_factory=LiveState)

    @property
    def scheduled(self) -> bool:
        """Whether the schedule is not constant, so that it needs `step`, `seek` or `follow`."""
        return not isinstance(self.schedule, ConstantSchedule)

    @property
    def followed(self) -> bool:
        """Whether steps are counted by an optimizer that still exists."""
        return self.live.follower is not None and self.live.follower.optimizer is not None

    def unfollow(self) -> None:
        """Stop counting the steps of an optimizer."""
        if self.live.follower is not None:
            self.live.follower.detach()
        self.live.follower = None

    @property
    def step(self) -> int:
        return next((one.step for one in reversed(self.live.overrides) if one.step is not None), self.step_count)

    @property
    def multiplier(self) -> float:
        schedule = self.schedule
        return schedule.value if type(schedule) is ConstantSchedule else float(schedule(self.step))

    @property
    def override(self) -> Override | None:
        """The innermost override that enables or disables the hooks."""
        for override in reversed(self.live.overrides):
            if override.sampling is not None:
                return override
        return None

    @property
    def on(self) -> bool:
        """Whether hooks are active in training mode."""
        override = self.override
        return not self.removed and (self.enabled if override is None else bool(override.sampling))

    @property
    def sampling(self) -> bool:
        """Whether hooks are active in eval mode."""
        return not self.removed and self.override is not None and bool(self.override.sampling)

    def warn_once(self, kind: str, text: str) -> None:
        if kind not in self.warned_kinds:
            self.warned_kinds.add(kind)
            warn(text)


# --- the rates: target x schedule x p_scale, set at all sinks or at none

States = Sequence[InjectionState]

rate_lock = threading.RLock()
"""Held while rates change, so that a concurrent change cannot leave some at their old value."""


# --- units: rates with the same unit can be compared and set together


def rates_by_unit(sinks: Sequence[RateSink]) -> dict[str, list[RateSink]]:
    """Group the sinks that have a rate by its unit: `"p"` for drop probabilities, or the name of the rate."""
    units: dict[str, list[RateSink]] = {}
    for sink in sinks:
        if sink.target is not None:
            units.setdefault("p" if sink.rate.kind == "drop" else sink.rate.attribute, []).append(sink)
    return dict(sorted(units.items(), key=lambda item: (item[0] != "p", item[0])))


def largest_target(sinks: Sequence[RateSink]) -> float:
    """Return the target with the largest magnitude among sinks that have one; 0 if there is none."""
    return max((sink.target for sink in sinks if sink.target is not None), key=abs, default=0.0)


def current_rate(sinks: Sequence[RateSink]) -> float:
    """Return the current rate of the largest magnitude among sinks of one unit, before `p_scale`."""
    found = []
    for state in dict.fromkeys(sink.state for sink in sinks):
        own = [sink for sink in sinks if sink.state is state]
        if not state.on:
            neutral = {sink.rate.neutral for sink in own}
            found.append(neutral.pop() if len(neutral) == 1 else 0.0)
        elif state.override is not None and state.override.p is not None:
            found.append(state.override.p)
        else:
            found.append(largest_target(own) * state.multiplier)
    return max(found, key=abs)


def set_targets(sinks: Sequence[RateSink], value: float) -> None:
    """Set the targets of sinks of one unit: the largest to `value`, the others in proportion."""
    zero = largest_target(sinks) == 0
    targets = [(sink.initial_target if zero else sink.target) or 0.0 for sink in sinks]
    reference = max(targets, key=abs, default=0.0)
    for sink, target in zip(sinks, targets, strict=True):
        sink.target = sink.valid_target(value * (target / reference) if reference else value)


# --- changing rates
#
# Each function takes the states of one or several injections, and acts on all sinks of each, also on those outside the
# part of the model that a handle was made for.


def set_steps(states: States, step_of: Callable[[InjectionState], int]) -> list[InjectionState]:
    """Set the step counts and the rates, or none of them after an error. Returns the states that moved."""
    with rate_lock:
        before = [(state, state.step_count) for state in states]
        try:
            for state in states:
                state.step_count = step_of(state)
                multiplier, peak = state.multiplier, state.schedule.peak
                # Multipliers in [0, peak] need no check: inject and every change of settings checked the peak.
                if peak is None or not 0.0 <= multiplier <= peak:
                    _check_rates(state, multiplier, peak)
                _set_rates(state, multiplier)
        except BaseException:
            for state, step in before:
                state.step_count = step
            update_rates(states)
            raise
    moved = [state for state, step in before if state.step_count != step]
    for state in states:
        state.live.was_stepped = True
        state.live.moves += state in moved
        for watch in events.rates_set:
            watch(state)
    return moved


@contextmanager
def changing(states: States) -> Iterator[None]:
    """Change settings inside the block; undo the change, with its rates, if a rate is out of range."""
    with rate_lock:
        before = [(s, s.step_count, s.enabled, list(s.live.overrides)) for s in states]
        targets = [(sink, sink.target) for state in states for sink in state.live.members]
        try:
            yield
            update_rates(states, check=True)
        except BaseException:
            for state, step, enabled, overrides in before:
                state.step_count, state.enabled, state.live.overrides = step, enabled, overrides
            for sink, target in targets:
                sink.target = target
            update_rates(states)
            raise
    for state in states:
        events.announce(events.rates_set, state)


@contextmanager
def overriding(
    states: States, sampling: bool | None = None, p: float | None = None, step: int | None = None
) -> Iterator[None]:
    """Override settings inside the block, in all states or in none. Contexts may exit in any order."""
    override, before = Override(sampling, p, step), list[tuple[InjectionState, bool, list[Override]]]()
    try:
        # Enter and exit under the lock, so that no other thread sees the overrides without their rates.
        with rate_lock:
            for state in states:
                before.append((state, state.enabled, list(state.live.overrides)))
                state.live.contexts.append(override)
                state.live.overrides.append(override)
            update_rates(states, check=True)
        yield
    finally:
        with rate_lock:
            for state, enabled, overrides in before:
                live = state.live
                if live.contexts[-1:] == [override]:
                    state.enabled, live.overrides = enabled, overrides
                live.contexts = [one for one in live.contexts if one is not override]
                live.overrides = [one for one in live.overrides if one in live.contexts]
            update_rates(states)


def update_rates(states: States, *, check: bool = False) -> None:
    """Set the current rates at all sinks; with `check`, after checking all."""
    for state in states if check else ():
        _check_rates(state, state.multiplier, state.schedule.peak)
    for state in states:
        _set_rates(state, state.multiplier)


def _set_rates(state: InjectionState, multiplier: float) -> None:
    members: list[RateSink] = list(state.live.members)
    on, sampling = state.on, state.sampling
    created: dict[tuple[float, float], CurrentRate] = {}
    for sink, value in zip(members, _rates(state, members, multiplier), strict=True):
        if value is None:
            sink.set_rate(NO_RATE, on, sampling)
            continue
        key = value, sink.rate.neutral
        if key not in created:
            created[key] = CurrentRate(value, value == key[1])
        sink.set_rate(created[key], on, sampling)


def _rates(state: InjectionState, members: list[RateSink], multiplier: float) -> list[float | None]:
    """Return target * multiplier * p_scale of each sink; in a context, p replaces the largest target."""
    override = state.override
    if override is None or override.p is None:
        return [None if sink.target is None else sink.target * multiplier * sink.p_scale for sink in members]
    p, largest = override.p, largest_target(members)
    return [
        None if sink.target is None else p * (sink.target / largest if largest else 1.0) * sink.p_scale
        for sink in members
    ]


def _check_rates(state: InjectionState, multiplier: float, peak: float | None) -> None:
    """Raise `ValueError` if a rate is out of range now, at the peak of the schedule, or in a context."""
    members: list[RateSink] = list(state.live.members)
    for sink, rate in zip(members, _rates(state, members, multiplier), strict=True):
        if rate is None or sink.target is None:
            continue
        _require_valid(sink, sink.target, multiplier, f"at step {state.step}")
        if peak is not None:
            _require_valid(sink, sink.target, peak, "at its peak")
        if state.override is not None and state.override.p is not None:
            _require_valid(sink, rate / sink.p_scale if sink.p_scale else 0.0, 1.0, "in this context")


def _require_valid(sink: RateSink, target: float, multiplier: float, when: str) -> None:
    try:
        sink.valid_target(target * multiplier * sink.p_scale)
    except ValueError as error:
        raise ValueError(
            f"{error}\n  at {sink.site!r}: target {target:g} x p_scale {sink.p_scale:g} x schedule {multiplier:g} "
            f"{when}. No rate was changed."
        ) from None
