"""Injections as JSON-able settings, and regularizers and schedules made from them again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hookdrop import schedules
from hookdrop.errors import StateError, nearest
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.skip_hook import SkipHook
from hookdrop.hooks.state import InjectionState
from hookdrop.regularizers import REGULARIZERS, ForeignFunction, ForeignModule, Regularizer, as_regularizer
from hookdrop.schedules import Schedule

VERSION = 1

Allowed = Sequence[Callable[..., Any]]

SCHEDULES: dict[str, type[Schedule]] = {
    cls.__name__: cls
    for cls in (
        schedules.ConstantSchedule,
        schedules.LinearSchedule,
        schedules.CosineSchedule,
        schedules.ExponentialSchedule,
        schedules.EarlySchedule,
        schedules.LateSchedule,
        schedules.ChainedSchedule,
        schedules.LambdaSchedule,
    )
}


def to_config(state: InjectionState, hooks: Sequence[SiteHook]) -> dict[str, Any]:
    """Settings and resolved site names, as JSON takes them.

    Raises:
        StateError: something in it is not JSON, such as a function in a schedule.
    """
    at = next((hook.at for hook in hooks if hook.at != "skip"), "output")
    config = {
        "version": VERSION,
        "name": state.name,
        "at": at,
        "tensor": hooks[0].tensor,
        "schedule": _schedule_config(state.schedule),
        "sites": [
            {"name": hook.site, "p_scale": hook.p_scale, "regularizer": _regularizer_config(hook)}
            | ({} if hook.at == at else {"at": hook.at})
            | ({"branch": hook.branch} if isinstance(hook, SkipHook) else {})
            for hook in hooks
        ],
    }
    return _as_json(config, state.name)


def regularizer_of(config: Mapping[str, Any], allow: Allowed) -> Regularizer:
    """The regularizer that `to_config` wrote; another class or function than ours must be in `allow`."""
    name, settings = _typed(config, "regularizer")
    if name in REGULARIZERS:
        return REGULARIZERS[name](**{key: _tuples(value) for key, value in settings.items()})
    made = _allowed(name, allow, REGULARIZERS)
    return as_regularizer(made(**settings) if isinstance(made, type) else made)


def schedule_of(config: Mapping[str, Any], allow: Allowed) -> Schedule:
    """The schedule that `to_config` wrote."""
    name, settings = _typed(config, "schedule")
    if "schedules" in settings:
        settings = settings | {"schedules": [schedule_of(part, allow) for part in settings["schedules"]]}
    made = SCHEDULES[name] if name in SCHEDULES else _allowed(name, allow, SCHEDULES)
    schedule = made(**settings)
    if not isinstance(schedule, Schedule):
        raise StateError(f"the config's schedule {name!r} makes a {type(schedule).__name__}, not a Schedule.")
    return schedule


def qualified(thing: Any) -> str:
    """`package.module.Name`, as `allow` is compared by."""
    return f"{thing.__module__}.{thing.__qualname__}"


def _schedule_config(schedule: Schedule) -> dict[str, Any]:
    name = type(schedule).__name__ if type(schedule) in SCHEDULES.values() else qualified(type(schedule))
    if not dataclasses.is_dataclass(schedule):
        raise StateError(f"the schedule {schedule!r} is not a dataclass: its settings can't be read off.")
    fields = {field.name: getattr(schedule, field.name) for field in dataclasses.fields(schedule)}
    if isinstance(schedule, schedules.ChainedSchedule):
        fields["schedules"] = [_schedule_config(part) for part in schedule.schedules]
    return {"type": name, **fields}


def _regularizer_config(hook: SiteHook) -> dict[str, Any]:
    regularizer = hook.regularizer
    if isinstance(regularizer, ForeignFunction):
        if not hasattr(regularizer.function, "__qualname__"):
            raise StateError(
                f"{regularizer.title} at {hook.site!r} is not a plain function: it has no name for a config."
            )
        return {"type": qualified(regularizer.function)}
    try:
        settings = regularizer.settings()
    except AttributeError as error:
        raise StateError(f"{regularizer.title} at {hook.site!r} does not keep its settings: {error}.") from None
    kind = type(regularizer.module) if isinstance(regularizer, ForeignModule) else type(regularizer)
    rate_name = regularizer.rate_attribute if isinstance(regularizer, ForeignModule) else regularizer.rate_name
    if rate_name is not None:
        settings[rate_name] = hook.target  # not the scheduled rate of the moment
    return {"type": kind.__name__ if kind in REGULARIZERS.values() else qualified(kind), **settings}


def _as_json(config: dict[str, Any], name: str) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(config, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise StateError(
            f"{name!r} can't be written as a config: {error}.\n"
            "  a function is code: keep it in code, and save state_dict() instead."
        ) from None
    return plain


def _typed(config: Any, what: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(config, Mapping) or not isinstance(config.get("type"), str):
        raise StateError(f"the config's {what} must be a mapping with a 'type', got {config!r}.")
    return config["type"], {key: value for key, value in config.items() if key != "type"}


def _allowed(name: str, allow: Allowed, known: Mapping[str, Any]) -> Callable[..., Any]:
    for candidate in allow:
        if qualified(candidate) == name:
            return candidate
    near = nearest(name, known)
    raise StateError(
        f"the config names {name!r}, which is not hookdrop's{f' (did you mean {near[0]!r}?)' if near else ''}.\n"
        f"  if you trust it: from_config(..., allow=[{name.rpartition('.')[2]}])"
    )


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
