"""An injection as plain values, to be placed when the model and the length of the training are known."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.state import InjectionState
from hookdrop.injection.resolve import as_source, check_options, check_recipe_arguments, resolve
from hookdrop.injection.sinks import RateSink
from hookdrop.injection.text import Allowed, as_schedule, read, text_of
from hookdrop.recipes.base import Recipe
from hookdrop.regularizers import Regularizer
from hookdrop.regularizers.base import at_rate
from hookdrop.schedules import ConstantSchedule, Schedule
from hookdrop.utils.errors import StateError, did_you_mean
from hookdrop.utils.select import as_entries


@dataclass(frozen=True)
class InjectionSpec:
    """The arguments of `inject`, for trainers that build the model later and for configuration files.

    Strings work for all of them. They are parsed at once, so that a typo is found before the model is built, and never
    evaluated. `inject(model, spec, total_steps=N)` places it, and `plan(model, spec)` shows what that would do.

    Args:
        regularizer: a string such as `"DropBlock(p=0.1, block_size=7)"` or `"stochastic_depth(p=0.1)"`, or what
            `inject` takes.
        layers, exclude, at, tensor, schedule, p_scale, name, on_existing, portable: as in `inject`. With a recipe,
            `layers` are the full names of the sites that it must choose; another choice is a `StateError`.

    Raises:
        TypeError, ValueError: a setting is invalid.

    Example:
        >>> spec = InjectionSpec("Dropout(p=0.2)", layers="0", schedule="LinearSchedule(steps=1.0)")
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> drop = inject(model, spec, total_steps=100)
        >>> drop
        <Injection 'dropout': 1 site, p=0 of 0.2, step 0 of LinearSchedule(steps=100)>
        >>> drop.spec.to_dict()
        {'regularizer': 'Dropout(p=0.2)', 'layers': ['0'], 'schedule': 'LinearSchedule(steps=100)', 'name': 'dropout'}
    """

    regularizer: Any
    layers: Any = None
    exclude: Any = ()
    at: str = "output"
    tensor: Any = None
    schedule: Any = None
    p_scale: Any = None
    name: str | None = None
    on_existing: str = "error"
    portable: bool = False

    def __post_init__(self) -> None:
        """Find invalid settings before there is a model, by resolving them for one that has any layer."""
        check_options(self.at, self.tensor, self.name, self.on_existing, self.portable)
        as_entries(() if self.exclude is None else self.exclude, "`exclude`")
        toy = nn.Sequential(nn.Identity(), nn.Identity())
        given = self.arguments(toy)
        source, layers = given["regularizer"], given["layers"]
        if isinstance(source, Recipe):
            check_recipe_arguments(source, None, self.at, self.tensor)
            as_schedule(self.schedule or ConstantSchedule(), "InjectionSpec")
            return
        as_entries(() if layers is None else layers, "`layers`")
        for key in source if isinstance(source, Mapping) else ():
            as_entries(key, "a key of the mapping")
        # Factors by pattern or by a function depend on the names of the layers.
        p_scale: Any = self.p_scale if isinstance(self.p_scale, str | int | float) else None
        everywhere = None if layers is None else "*"
        for one in [{"*": value} for value in source.values()] if isinstance(source, Mapping) and source else [source]:
            resolve(toy, one, everywhere, (), self.schedule, p_scale, self.at, total_steps=1_000_000)

    @property
    def is_relative(self) -> bool:
        """Whether the schedule has fractions of the training, so that `inject` needs `total_steps`."""
        return self.schedule is not None and as_schedule(self.schedule, "InjectionSpec").is_relative

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, ready for JSON or YAML.

        Raises:
            StateError: a setting is not a plain value, such as a function.
        """
        return described(self, strict=True)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any], allow: Allowed = ()) -> InjectionSpec:
        """Create a spec from the result of `to_dict`, or from a section of a configuration file.

        Args:
            settings: the settings by name.
            allow: classes and functions from outside hookdrop that the settings may name. Nothing is imported.

        Raises:
            TypeError, ValueError: a setting is unknown or invalid, or a name is not allowed.
        """
        if not isinstance(settings, Mapping):
            several = isinstance(settings, list | tuple)
            raise TypeError(
                f"a spec must be an InjectionSpec or a mapping of its settings, got {reprlib.repr(settings)}.\n"
                + ("  pass several specs as separate arguments: InjectionCallback(*specs)" if several else _EXAMPLE)
            )
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in settings if name not in known]:
            raise TypeError(
                f"InjectionSpec has no setting {unknown[0]!r}.{did_you_mean(str(unknown[0]), known)}\n"
                f"  available: {', '.join(known)}"
            )
        if "regularizer" not in settings:
            raise TypeError(f"a spec needs a regularizer, got {reprlib.repr(dict(settings))}.\n{_EXAMPLE}")
        read_here = {"regularizer", "schedule"} & set(settings) if allow else ()
        return cls(**dict(settings) | {name: _read(settings[name], allow) for name in read_here})

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        """Return the arguments of `inject` for a model; the empty name stands for the model itself."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["regularizer"] = as_source(self.regularizer)
        if isinstance(given["regularizer"], Recipe):
            given["layers"] = None
        return given | {name: _with_root(given[name], model) for name in ("regularizer", "layers", "p_scale")}

    def check_sites(self, sites: Sequence[str]) -> None:
        """Raise `StateError` if a recipe chose other sites than `layers`."""
        if self.layers is None or list(sites) == list(self.layers):
            return
        lines = [f"the recipe {self.regularizer} chooses other sites here than in the spec."]
        lines += [f"  only in the spec: {site!r}" for site in self.layers if site not in sites]
        lines += [f"  only here:        {site!r}" for site in sites if site not in self.layers]
        raise StateError("\n".join([*lines, "  to place it anyway: remove `layers` from the spec"]))


_EXAMPLE = '  for example: InjectionSpec("Dropout(p=0.1)", layers="head")'


def _with_root(value: Any, model: nn.Module) -> Any:
    if isinstance(value, Mapping):
        return {model if key == "" else key: one for key, one in value.items()}
    return [model if entry == "" else entry for entry in value] if isinstance(value, list | tuple) else value


def spec_of(state: InjectionState, sinks: Sequence[RateSink], declared: bool = False) -> InjectionSpec:
    """Return the spec of what was injected, with the current target rates, or with those that the code declared."""
    schedule = None if state.schedule == ConstantSchedule() else state.schedule
    names = [sink.site for sink in sinks]
    common: dict[str, Any] = {"schedule": schedule, "name": state.name, "portable": state.portable}
    if state.recipe is not None:
        return InjectionSpec(**state.recipe, layers=names, **common)
    hooks = [sink for sink in sinks if isinstance(sink, SiteHook)]
    each = {hook.site: at_rate(hook.regularizer, hook.initial_target if declared else hook.target) for hook in hooks}
    one = next(iter(each.values())) if len(set(map(repr, each.values()))) == 1 else None
    inside = any(hook.at == "input" and hook.regularizer.only_at is None for hook in hooks)
    return InjectionSpec(
        each if one is None else one,
        layers=None if one is None else names,
        at="input" if inside else "output",
        tensor=hooks[0].tensor,
        p_scale={h.site: h.p_scale for h in hooks} if any(h.p_scale != 1.0 for h in hooks) else None,
        **common,
    )


def described(spec: InjectionSpec, strict: bool = False) -> dict[str, Any]:
    """Return the settings of a spec that differ from their defaults, as plain values.

    Without `strict`, settings that cannot be saved are described, for comparisons.
    """
    changed = {f.name: getattr(spec, f.name) for f in fields(spec) if getattr(spec, f.name) is not f.default}
    changed = {name: value for name, value in changed.items() if value not in ((), "output", "error", False)}
    found = {}
    for name, value in changed.items():
        try:
            found[name] = json.loads(json.dumps(_plain(value), allow_nan=False))
        except (TypeError, ValueError) as error:
            if strict:
                if isinstance(error, StateError):
                    raise
                raise StateError(f"InjectionSpec: {name}={value!r} cannot be saved: use a string.") from None
            found[name] = repr(value)
    return found


def _plain(value: Any) -> Any:
    """Write regularizers, recipes and schedules as text."""
    if isinstance(value, Regularizer | Recipe | Schedule):
        return text_of(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _read(value: Any, allow: Allowed) -> Any:
    if isinstance(value, Mapping):
        return {key: _read(one, allow) for key, one in value.items()}
    return read(value, allow) if isinstance(value, str) else value
