"""The rates of injections: target x schedule x p_scale, set at all sinks or at none.

Each function takes the states of one or several injections, and acts on all sinks of each, also on those outside the
part of the model that a handle was made for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from hookdrop.core import events
from hookdrop.core.regularizer import NO_RATE, CurrentRate
from hookdrop.core.sink import RateSink
from hookdrop.core.state import InjectionState, Override

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


def seek(states: States, step_of: Callable[[InjectionState], int]) -> list[InjectionState]:
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
    """Override settings inside the block, in all states or in none."""
    # Enter and exit under the lock, so that no other thread sees the overrides without their rates.
    with rate_lock, ExitStack() as stack:
        stack.callback(update_rates, states)
        for state in states:
            stack.enter_context(state.overriding(Override(sampling, p, step)))
        update_rates(states, check=True)
        leave = stack.pop_all()
    try:
        yield
    finally:
        with rate_lock:
            leave.close()


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
