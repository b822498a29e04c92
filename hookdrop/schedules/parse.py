"""Create a schedule from a string, without evaluating it."""

from __future__ import annotations

from typing import Any

from hookdrop.schedules.base import Schedule
from hookdrop.schedules.curves import (
    ChainedSchedule,
    ConstantSchedule,
    CosineSchedule,
    EarlySchedule,
    ExponentialSchedule,
    LateSchedule,
    LinearSchedule,
)
from hookdrop.utils.call_syntax import Call, CallSyntax, parse_call, signature_of

SCHEDULES: dict[str, type[Schedule]] = {
    schedule.__name__: schedule
    for schedule in (
        ConstantSchedule,
        LinearSchedule,
        CosineSchedule,
        ExponentialSchedule,
        EarlySchedule,
        LateSchedule,
        ChainedSchedule,
    )
}
_SYNTAX = CallSyntax("schedule", "schedule", SCHEDULES, "LinearSchedule(steps=1.0)", nested=True)


def parse_schedule(text: str) -> Schedule:
    """Create a schedule from a string such as `"LinearSchedule(steps=1.0)"`. The string is never evaluated as code.

    Raises:
        TypeError: `text` is not a string, or the schedule does not accept the settings.
        ValueError: the text is not such a call, or a setting is invalid.

    Example:
        >>> parse_schedule("ChainedSchedule([LinearSchedule(steps=2), ConstantSchedule(0.0)], [4])").simulate(6)
        [0.0, 0.5, 1.0, 1.0, 0.0, 0.0]
    """
    return _build(parse_call(text, _SYNTAX))


def as_schedule(given: object, owner: str) -> Schedule:
    """Return a schedule as it is, and create one from a string.

    Raises:
        TypeError: `given` is neither.
        ValueError: the string is invalid.
    """
    if isinstance(given, str):
        return parse_schedule(given)
    if isinstance(given, Schedule):
        return given
    name = getattr(given, "__name__", "fn")
    if isinstance(given, type):
        write = f"{name}(steps=N)"
    else:
        write = f"LambdaSchedule({name})" if callable(given) else "LinearSchedule(steps=N)"
    raise TypeError(f"{owner}: schedule must be a hookdrop schedule, got {given!r}.\n  write: schedule={write}")


def _build(call: Call) -> Schedule:
    args, kwargs = [_built(arg) for arg in call.args], {name: _built(value) for name, value in call.kwargs}
    try:
        return SCHEDULES[call.name](*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"schedule: {str(call)!r}: {error}{signature_of(call.name, _SYNTAX)}") from None


def _built(value: Any) -> Any:
    if isinstance(value, Call):
        return _build(value)
    return [_built(element) for element in value] if isinstance(value, list) else value
