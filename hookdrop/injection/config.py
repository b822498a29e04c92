"""Convert injections to JSON-serializable settings, and read them back."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from hookdrop import schedules
from hookdrop.errors import StateError, nearest
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.skip_hook import SkipHook
from hookdrop.hooks.state import InjectionState
from hookdrop.regularizers import REGULARIZERS, ForeignFunction, ForeignModule, Regularizer, as_regularizer
from hookdrop.schedules import Schedule
from hookdrop.utils.tensor_tree import TensorKey
from hookdrop.utils.validation import number, rate

VERSION = 1
_KEYS = ("version", "name", "at", "tensor", "schedule", "sites")
_OPTIONAL_KEYS = ("portable",)
_SITE_KEYS = ("name", "p_scale", "regularizer")

Allowed = Sequence[Callable[..., Any]]
T = TypeVar("T")

SCHEDULES: dict[str, type[Schedule]] = {
    name: cls
    for name, cls in vars(schedules).items()
    if isinstance(cls, type) and issubclass(cls, Schedule) and not inspect.isabstract(cls)
}


def to_config(state: InjectionState, hooks: Sequence[SiteHook]) -> dict[str, Any]:
    """Return settings and resolved site names, ready for JSON.

    Raises:
        StateError: a setting is not JSON-serializable, such as a function in a schedule.
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
    } | ({"portable": True} if state.portable else {})
    try:
        return json.loads(json.dumps(config, allow_nan=False))  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise StateError(
            f"{state.name!r} can't be saved as a config: {error}.\n"
            "  functions can't be saved: keep them in code, and save state_dict() instead."
        ) from None


class ConfiguredSite(NamedTuple):
    """A site of a config."""

    name: str
    p_scale: float
    regularizer: Regularizer
    at: str
    branch: str


class InjectionConfig(NamedTuple):
    """A parsed config."""

    name: str
    tensor: TensorKey
    schedule: Schedule | None
    """None if it always returns 1."""
    sites: list[ConfiguredSite]
    portable: bool


def read_config(config: Any, allow: Allowed) -> InjectionConfig:
    """Parse a config, and check everything that does not depend on the model.

    Raises:
        StateError: the config is invalid; the message has the path and the value.
    """
    if not isinstance(config, Mapping) or type(config.get("version")) is not int or config["version"] != VERSION:
        raise StateError(f"this is not an injection config (version {VERSION}): {_truncated(config)}")
    _require_keys(config, "", _KEYS, _OPTIONAL_KEYS)
    name, at, tensor, sites = config["name"], config["at"], config["tensor"], config["sites"]
    _require(isinstance(name, str) and name and "/" not in name, "name", "a non-empty string without '/'", name)
    _require(at in ("output", "input"), "at", "'output' or 'input'", at)
    fits = isinstance(tensor, TensorKey) and not isinstance(tensor, bool)
    _require(fits, "tensor", "an index, a key, 'all' or None", tensor)
    _require(isinstance(sites, list | tuple) and sites, "sites", "a list of at least one site", sites)
    portable = config.get("portable", False)
    _require(isinstance(portable, bool), "portable", "true or false", portable)
    schedule = _schedule_of(config["schedule"], "schedule", allow)
    constant = isinstance(schedule, schedules.ConstantSchedule) and schedule.value == 1.0
    read = [_site_of(site, f"sites[{index}]", at, allow) for index, site in enumerate(sites)]
    return InjectionConfig(name, tensor, None if constant else schedule, read, portable)


def _site_of(config: Any, path: str, at: str, allow: Allowed) -> ConfiguredSite:
    _require_keys(config, path, _SITE_KEYS, ("at", "branch"))
    name, at, branch = config["name"], config.get("at", at), config.get("branch", "")
    _require(isinstance(name, str), f"{path}.name", "a string", name)
    _require(at in ("output", "input", "skip"), f"{path}.at", "'output', 'input' or 'skip'", at)
    fits = isinstance(branch, str) and bool(branch) == (at == "skip")
    _require(fits, f"{path}.branch", "the name of a layer if at='skip', and empty otherwise", branch)
    with _error_path(f"{path}.p_scale", config["p_scale"]):
        p_scale = rate(config["p_scale"], "p_scale", "from_config", math.inf)
    with _error_path(f"{path}.regularizer", config["regularizer"]):
        regularizer = _regularizer_of(config["regularizer"], allow)
    return ConfiguredSite(name, p_scale, regularizer, at, branch)


def _regularizer_of(config: Any, allow: Allowed) -> Regularizer:
    """Rebuild a regularizer from its config; classes and functions from outside hookdrop must be in `allow`."""
    name, settings = _type_and_settings(config)
    if name in REGULARIZERS:
        tupled = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        return _construct(REGULARIZERS[name], tupled)
    allowed = _find_allowed(name, allow, REGULARIZERS)
    if not isinstance(allowed, type) and settings:
        raise StateError(f"the function {name!r} takes no settings, got {', '.join(settings)}.")
    return as_regularizer(allowed(**settings) if isinstance(allowed, type) else allowed)


def _schedule_of(config: Any, path: str, allow: Allowed) -> Schedule:
    """Rebuild a schedule from its config."""
    with _error_path(path, config):
        name, settings = _type_and_settings(config)
        parts = settings.get("schedules")
        if isinstance(parts, list | tuple):
            settings["schedules"] = [
                _schedule_of(part, f"{path}.schedules[{index}]", allow) for index, part in enumerate(parts)
            ]
        known = name in SCHEDULES
        schedule = _construct(SCHEDULES[name], settings) if known else _find_allowed(name, allow, SCHEDULES)(**settings)
        if not isinstance(schedule, Schedule):
            raise StateError(f"it creates a {type(schedule).__name__}, not a Schedule.")
        if not schedule.is_relative:
            number(schedule(0), "the multiplier at step 0", name)
        return schedule


def _construct(cls: Callable[..., T], settings: Mapping[str, Any]) -> T:
    """Construct one of hookdrop's classes. The classes accept any truthy value for a bool; a config must not."""
    for name, parameter in inspect.signature(cls).parameters.items():
        if isinstance(parameter.default, bool) and not isinstance(settings.get(name, True), bool):
            raise TypeError(f"{name} must be True or False, got {settings[name]!r}.")
    return cls(**settings)


@contextmanager
def _error_path(path: str, value: Any) -> Iterator[None]:
    """Turn errors inside into a `StateError` that names the invalid part of the config."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StateError) and str(error).startswith("the config's "):  # of a nested part
            raise
        raise StateError(f"the config's {path} is invalid: {error}\n  got {_truncated(value)}") from error


def _require_keys(config: Any, path: str, keys: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raise `StateError` unless `config` is a mapping with all of `keys` and no unknown ones."""
    _require(isinstance(config, Mapping), path, f"a mapping of {', '.join(keys)}", config)
    where = f"the config's {path}" if path else "the config"
    missing = [key for key in keys if key not in config]
    if missing:
        raise StateError(f"{where} lacks {', '.join(missing)}: {_truncated(config)}")
    unknown = [key for key in config if key not in (*keys, *optional)]
    if unknown:
        near = nearest(str(unknown[0]), (*keys, *optional))
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise StateError(f"{where} has an unknown key {unknown[0]!r}{hint}: {_truncated(config)}")


def _require(fits: Any, path: str, what: str, got: Any) -> None:
    if not fits:
        raise StateError(f"the config's {path} must be {what}, got {_truncated(got)} ({type(got).__name__}).")


def _truncated(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def qualified_name(thing: Any) -> str:
    """Return `package.module.Name`, which is compared with the entries of `allow`."""
    return f"{thing.__module__}.{thing.__qualname__}"


def _schedule_config(schedule: Schedule) -> dict[str, Any]:
    name = type(schedule).__name__ if type(schedule) in SCHEDULES.values() else qualified_name(type(schedule))
    if not dataclasses.is_dataclass(schedule):
        raise StateError(f"the schedule {schedule!r} is not a dataclass: its settings can't be read.")
    fields = {field.name: getattr(schedule, field.name) for field in dataclasses.fields(schedule)}
    if isinstance(schedule, schedules.ChainedSchedule):
        fields["schedules"] = [_schedule_config(part) for part in schedule.schedules]
    return {"type": name, **fields}


def _regularizer_config(hook: SiteHook) -> dict[str, Any]:
    regularizer = hook.regularizer
    if isinstance(regularizer, ForeignFunction):
        if not hasattr(regularizer.function, "__qualname__"):
            raise StateError(f"{regularizer.title} at {hook.site!r} is not a plain function: a config can't name it.")
        return {"type": qualified_name(regularizer.function)}
    try:
        settings = regularizer.settings()
    except AttributeError as error:
        raise StateError(f"{regularizer.title} at {hook.site!r} does not store its settings: {error}.") from None
    kind = type(regularizer.module) if isinstance(regularizer, ForeignModule) else type(regularizer)
    rate = type(regularizer).rate
    if rate is not None:
        rate_name = regularizer.attribute if isinstance(regularizer, ForeignModule) else rate.attribute
        settings[rate_name] = hook.target  # not the current scheduled rate
    return {"type": kind.__name__ if kind in REGULARIZERS.values() else qualified_name(kind), **settings}


def _type_and_settings(config: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(config, Mapping) or not isinstance(config.get("type"), str):
        raise StateError("it must be a mapping with a 'type'.")
    return config["type"], {key: value for key, value in config.items() if key != "type"}


def _find_allowed(name: str, allow: Allowed, known: Mapping[str, Any]) -> Callable[..., Any]:
    for candidate in allow:
        if qualified_name(candidate) == name:
            return candidate
    near = nearest(name, known)
    raise StateError(
        f"it names {name!r}, which is not part of hookdrop{f' (did you mean {near[0]!r}?)' if near else ''}.\n"
        f"  if you trust it: from_config(..., allow=[{name}])"
    )
