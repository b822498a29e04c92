"""Schedules spelled as text, with fractions of a training for their steps."""

from __future__ import annotations

from typing import Any

import hookdrop
from comparison.spec.call_syntax import read
from comparison.spec.errors import or_nearest

KNOWN = ("ConstantSchedule", "LinearSchedule", "CosineSchedule", "ExponentialSchedule", "EarlySchedule", "LateSchedule")
_IN_STEPS = ("steps", "cutoff", "delay")


def schedule_of(text: str, steps: int) -> hookdrop.Schedule | None:
    """The schedule for a training of so many optimizer steps; None for `none`.

    `LinearSchedule` is over all steps. A `steps`, `delay` or `cutoff` with a decimal point is a fraction of them:
    `LinearSchedule(steps=0.5)` reaches the full rate after half of the training.

    Raises:
        ValueError: no such schedule, or one that does not take these settings.
    """
    call = read(text)
    if call.name == "none":
        return None
    if call.name not in KNOWN:
        raise ValueError(f"no schedule is called {call.name!r}.\n{or_nearest(call.name, ('none', *KNOWN))}")
    call = call.bound("cutoff" if call.name in ("EarlySchedule", "LateSchedule") else "steps")
    settings = {name: _in_steps(name, value, steps) for name, value in call.kwargs.items()}
    if call.name in ("LinearSchedule", "CosineSchedule", "ExponentialSchedule"):
        settings.setdefault("steps", steps)
    try:
        schedule: hookdrop.Schedule = getattr(hookdrop, call.name)(**settings)
    except TypeError as error:
        raise ValueError(f"{call}: {error}") from None
    return schedule


def _in_steps(name: str, value: Any, steps: int) -> Any:
    if name not in _IN_STEPS or not isinstance(value, float):
        return value
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is no fraction of the training: from 0.0 to 1.0, or whole optimizer steps.")
    return max(1, round(value * steps)) if name != "delay" else round(value * steps)
