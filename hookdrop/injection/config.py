"""Injections as JSON-able settings, and regularizers and schedules made from them again."""

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
_SITE_KEYS = ("name", "p_scale", "regularizer")

Allowed = Sequence[Callable[..., Any]]
T = TypeVar("T")

SCHEDULES: dict[str, type[Schedule]] = {
    name: cls
    for name, cls in vars(schedules).items()
    if isinstance(cls, type) and issubclass(cls, Schedule) and not inspect.isabstract(cls)
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
    try:
        return json.loads(json.dumps(config, allow_nan=False))  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise StateError(
            f"{state.name!r} can't be written as a config: {error}.\n"
            "  a function is code: keep it in code, and save state_dict() instead."
        ) from None


class ConfiguredSite(NamedTuple):
    """A site of a config."""

    name: str
    p_scale: float
    regularizer: Regularizer
    at: str
    branch: str


class Configured(NamedTuple):
    """A config that was read."""

    name: str
    tensor: TensorKey
    schedule: Schedule | None
    """None where it does nothing."""
    sites: list[ConfiguredSite]


def read_config(config: Any, allow: Allowed) -> Configured:
    """All of a config, checked as far as it can be without the model.

    Raises:
        StateError: something in it is invalid: the text names the path and the value.
    """
    if not isinstance(config, Mapping) or type(config.get("version")) is not int or config["version"] != VERSION:
        raise StateError(f"this is not a config of an injection (version {VERSION}): {_brief(config)}")
    _must_have(config, "", _KEYS)
    name, at, tensor, sites = config["name"], config["at"], config["tensor"], config["sites"]
    _must_be(isinstance(name, str) and name and "/" not in name, "name", "a text without '/'", name)
    _must_be(at in ("output", "input"), "at", "'output' or 'input'", at)
    fits = isinstance(tensor, TensorKey) and not isinstance(tensor, bool)
    _must_be(fits, "tensor", "an index, a key, 'all' or None", tensor)
    _must_be(isinstance(sites, list | tuple) and sites, "sites", "a list of at least one site", sites)
    schedule = _schedule_of(config["schedule"], "schedule", allow)
    constant = isinstance(schedule, schedules.ConstantSchedule) and schedule.value == 1.0
    read = [_site_of(site, f"sites[{index}]", at, allow) for index, site in enumerate(sites)]
    return Configured(name, tensor, None if constant else schedule, read)


def _site_of(config: Any, path: str, at: str, allow: Allowed) -> ConfiguredSite:
    _must_have(config, path, _SITE_KEYS, ("at", "branch"))
    name, at, branch = config["name"], config.get("at", at), config.get("branch", "")
    _must_be(isinstance(name, str), f"{path}.name", "a text", name)
    _must_be(at in ("output", "input", "skip"), f"{path}.at", "'output', 'input' or 'skip'", at)
    fits = isinstance(branch, str) and bool(branch) == (at == "skip")
    _must_be(fits, f"{path}.branch", "the name of a layer where at='skip', and nothing elsewhere", branch)
    with _reading(f"{path}.p_scale", config["p_scale"]):
        p_scale = rate(config["p_scale"], "p_scale", "from_config", math.inf)
    with _reading(f"{path}.regularizer", config["regularizer"]):
        regularizer = _regularizer_of(config["regularizer"], allow)
    return ConfiguredSite(name, p_scale, regularizer, at, branch)


def _regularizer_of(config: Any, allow: Allowed) -> Regularizer:
    """The regularizer that `to_config` wrote; another class or function than ours must be in `allow`."""
    name, settings = _typed(config)
    if name in REGULARIZERS:
        tupled = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        return _made(REGULARIZERS[name], tupled)
    made = _allowed(name, allow, REGULARIZERS)
    if not isinstance(made, type) and settings:
        raise StateError(f"the function {name!r} takes no settings, got {', '.join(settings)}.")
    return as_regularizer(made(**settings) if isinstance(made, type) else made)


def _schedule_of(config: Any, path: str, allow: Allowed) -> Schedule:
    """The schedule that `to_config` wrote."""
    with _reading(path, config):
        name, settings = _typed(config)
        parts = settings.get("schedules")
        if isinstance(parts, list | tuple):
            settings["schedules"] = [
                _schedule_of(part, f"{path}.schedules[{index}]", allow) for index, part in enumerate(parts)
            ]
        own = name in SCHEDULES
        schedule = _made(SCHEDULES[name], settings) if own else _allowed(name, allow, SCHEDULES)(**settings)
        if not isinstance(schedule, Schedule):
            raise StateError(f"it makes a {type(schedule).__name__}, not a Schedule.")
        number(schedule(0), "the multiplier at step 0", name)
        return schedule


def _made(cls: Callable[..., T], settings: Mapping[str, Any]) -> T:
    """An instance of one of hookdrop's classes, which take anything for True."""
    for name, parameter in inspect.signature(cls).parameters.items():
        if isinstance(parameter.default, bool) and not isinstance(settings.get(name, True), bool):
            raise TypeError(f"{name} must be True or False, got {settings[name]!r}.")
    return cls(**settings)


@contextmanager
def _reading(path: str, value: Any) -> Iterator[None]:
    """Errors inside say which part of the config is invalid."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StateError) and str(error).startswith("the config's "):  # of a part of this part
            raise
        raise StateError(f"the config's {path} is invalid: {error}\n  got {_brief(value)}") from error


def _must_have(config: Any, path: str, keys: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raise `StateError` unless `config` is a mapping of all these keys and no others."""
    _must_be(isinstance(config, Mapping), path, f"a mapping of {', '.join(keys)}", config)
    where = f"the config's {path}" if path else "the config"
    missing = [key for key in keys if key not in config]
    if missing:
        raise StateError(f"{where} lacks {', '.join(missing)}: {_brief(config)}")
    unknown = [key for key in config if key not in (*keys, *optional)]
    if unknown:
        near = nearest(str(unknown[0]), (*keys, *optional))
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise StateError(f"{where} has an unknown key {unknown[0]!r}{hint}: {_brief(config)}")


def _must_be(fits: Any, path: str, what: str, got: Any) -> None:
    if not fits:
        raise StateError(f"the config's {path} must be {what}, got {_brief(got)} ({type(got).__name__}).")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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


def _typed(config: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(config, Mapping) or not isinstance(config.get("type"), str):
        raise StateError("it must be a mapping with a 'type'.")
    return config["type"], {key: value for key, value in config.items() if key != "type"}


def _allowed(name: str, allow: Allowed, known: Mapping[str, Any]) -> Callable[..., Any]:
    for candidate in allow:
        if qualified(candidate) == name:
            return candidate
    near = nearest(name, known)
    raise StateError(
        f"it names {name!r}, which is not hookdrop's{f' (did you mean {near[0]!r}?)' if near else ''}.\n"
        f"  if you trust it: from_config(..., allow=[{name.rpartition('.')[2]}])"
    )
