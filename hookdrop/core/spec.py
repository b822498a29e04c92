"""An injection as plain values, to be placed when the model and the length of the training are known."""

from __future__ import annotations

import json
import pickle
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

from torch import Tensor, nn

from hookdrop.core.arguments import NamedArguments, one_of, unknown_argument
from hookdrop.core.errors import InjectionError, LayerError, StateError
from hookdrop.core.hook import SiteHook
from hookdrop.core.parts import PARTS
from hookdrop.core.recipe import Recipe
from hookdrop.core.regularizer import Regularizer, at_rate
from hookdrop.core.schedules import ConstantSchedule, Schedule
from hookdrop.core.selection import Entries, as_entries
from hookdrop.core.sink import RateSink
from hookdrop.core.state import InjectionState
from hookdrop.core.tensor_tree import TensorKey
from hookdrop.core.text import Allowed, read, text_of

Source: TypeAlias = Regularizer | nn.Module | Callable[[Tensor], Tensor] | str
Regularizers: TypeAlias = Source | Mapping[Any, Source] | Recipe
PScale: TypeAlias = str | Mapping[Any, float] | Callable[[str, int, int], float]
P_SCALES = (None, "equal", "depth", "depth_from_zero", "depth_reversed")
PLACES = ("output", "input", "parameters")


@dataclass(frozen=True, eq=False)
class InjectionSpec(metaclass=NamedArguments):
    """The arguments of `inject`, for trainers that build the model later and for configuration files.

    Plain values work for all of them. Strings are parsed at once, so that a typo is found before the model is built,
    and never evaluated. `inject(model, spec, total_steps=N)` places it, and `plan(model, spec)` shows what that would
    do. Specs are equal if their settings are.

    Args:
        regularizer: a string such as `"DropBlock(p=0.1, block_size=7)"` or `"stochastic_depth(p=0.1)"`, or what
            `inject` takes.
        layers: as in `inject`. With a recipe, the full names of the sites that it must choose; another choice is a
            `StateError`.
        exclude, at, tensor, schedule, p_scale, name, on_existing, portable: as in `inject`.

    Raises:
        TypeError, ValueError: a setting is invalid.

    Example:
        >>> ramp = "LinearSchedule(steps=1.0)"
        >>> spec = InjectionSpec("Dropout(p=0.2)", layers="0", schedule=ramp)
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> drop = inject(model, spec, total_steps=100)
        >>> drop
        <Injection 'dropout': 1 site, p=0 of 0.2, step 0 of LinearSchedule(steps=100)>
        >>> drop.spec.to_dict()["schedule"]
        'LinearSchedule(steps=100)'
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

    _argument_note: ClassVar[str] = "\n  of inject itself: inject(model, spec, total_steps=N, example_input=x)"

    def __post_init__(self) -> None:
        """Find settings that are invalid for any model."""
        one_of(self.at, "at", "inject", PLACES)
        one_of(self.on_existing, "on_existing", "inject", ("error", "replace", "stack"))
        one_of(self.portable, "portable", "inject", (True, False))
        if isinstance(self.tensor, bool) or not isinstance(self.tensor, TensorKey):
            raise TypeError(f"inject: tensor must be an index, a key, 'all' or None, got {self.tensor!r}.")
        if self.at == "parameters" and isinstance(self.tensor, int):
            raise TypeError(
                f"inject: for parameters, tensor must be a pattern such as 'weight_hh_*', got {self.tensor}."
            )
        if self.name is not None and (not isinstance(self.name, str) or not self.name or "/" in self.name):
            raise InjectionError(f"inject: name must be a non-empty string without '/', got {self.name!r}.")
        scale = self.p_scale
        if not (scale in P_SCALES if isinstance(scale, str | None) else isinstance(scale, Mapping) or callable(scale)):
            hint = "\n  one factor for all sites? multiply p by it." if isinstance(scale, int | float) else ""
            raise ValueError(
                f"p_scale must be 'depth', 'depth_from_zero', 'depth_reversed', 'equal', a mapping of patterns to "
                f"factors, or a function of (name, index, count), got {scale!r}.{hint}"
            )
        for entries in ("layers", "exclude"):
            if isinstance(getattr(self, entries), Iterator):  # can be read only once
                object.__setattr__(self, entries, list(getattr(self, entries)))
        if self.exclude not in ((), None):
            as_entries(self.exclude, "`exclude`")
        _ = self.timing
        if isinstance(self.source, Recipe):
            names_only = isinstance(self.layers, str | list | tuple)
            check_recipe_arguments(self.source, None if names_only else self.layers, self.at, self.tensor)
        else:
            _ = self.chosen

    @cached_property
    def source(self) -> Any:
        """The regularizer, the recipe or the mapping, made from strings."""
        if isinstance(self.regularizer, Mapping) and {"regularizer", "layers"} <= self.regularizer.keys():
            raise TypeError(
                "inject got a mapping of settings.\n  write: inject(model, InjectionSpec.from_dict(settings))"
            )
        found = _read(self.regularizer)
        for one in found.values() if isinstance(found, Mapping) else [found]:
            if isinstance(one, Schedule):
                raise TypeError(
                    f"{one!r} is a schedule, not a regularizer.\n  write: inject(model, ..., schedule={one!r})"
                )
        return found

    @cached_property
    def chosen(self) -> tuple[list[Regularizer], Entries]:
        """A regularizer for each entry, or one for all, and the entries."""
        source = self.source
        if not isinstance(source, Mapping):
            regularizer = _regularizer(source)
            if self.layers is None:
                raise LayerError(
                    "`layers` is missing: pass a name, a glob such as 'layer3.*', a class, or a list of these.\n"
                    "  see all:      print(hookdrop.layers(model))"
                )
            as_entries(self.layers, "`layers`")
            return [regularizer], self.layers
        if recipe := next((value for value in source.values() if isinstance(value, Recipe)), None):
            raise TypeError(f"the recipe {recipe!r} chooses its layers: pass it alone, not in a mapping.")
        if self.layers is not None:
            raise LayerError("pass either `layers` or a mapping of layers to regularizers, not both.")
        as_entries(list(source), "a key of the mapping")
        return [_regularizer(value) for value in source.values()], list(source)

    @cached_property
    def timing(self) -> Schedule | None:
        """The schedule, possibly in fractions of the training."""
        if self.schedule is None:
            return None
        if isinstance(found := _read(self.schedule), Schedule):
            return found
        raise TypeError(
            f"inject: schedule must be a hookdrop schedule, got {self.schedule!r}.\n"
            "  write: schedule=LinearSchedule(steps=N)   of a function: LambdaSchedule(function)"
        )

    def __eq__(self, other: object) -> bool:
        """Whether both have the same settings; a string is what it stands for. A function equals only itself."""
        if not isinstance(other, InjectionSpec):
            return NotImplemented
        try:
            return self is other or _settings(self) == _settings(other)
        except StateError:  # of a regularizer that has no text
            return False

    @property
    def is_relative(self) -> bool:
        """Whether the schedule has fractions of the training, so that `inject` needs `total_steps`."""
        return self.timing is not None and self.timing.is_relative

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
            raise TypeError(
                f"a spec must be an InjectionSpec or a mapping of its settings, got {reprlib.repr(settings)}.\n"
                f"{_EXAMPLE}   several: InjectionCallback(*specs)"
            )
        if unknown := unknown_argument(cls, (), settings):
            raise TypeError(unknown)
        if "regularizer" not in settings:
            raise TypeError(f"a spec needs a regularizer, got {reprlib.repr(dict(settings))}.\n{_EXAMPLE}")
        texts = ("regularizer", "schedule") if allow else ()
        return cls(**{key: _read(value, allow) if key in texts else value for key, value in settings.items()})


_EXAMPLE = '  for example: InjectionSpec("Dropout(p=0.1)", layers="head")'


def _read(given: Any, allow: Allowed = ()) -> Any:
    if isinstance(given, Mapping):
        return {key: _read(value, allow) for key, value in given.items()}
    return read(given, allow) if isinstance(given, str) else given


def _settings(spec: InjectionSpec) -> Any:
    """Return the settings to compare, with regularizers, recipes and schedules as text."""
    found = spec.source
    if isinstance(found, Mapping):
        found = {key: as_regularizer(value) for key, value in found.items()}
    elif not isinstance(found, Recipe):
        found = as_regularizer(found)
    entries = {name: [one] if isinstance(one := getattr(spec, name), str) else one for name in ("layers", "exclude")}
    made = entries | {"regularizer": found, "schedule": spec.timing or ConstantSchedule()}
    return _plain({field.name: made.get(field.name, getattr(spec, field.name)) for field in fields(spec)})


def as_regularizer(given: object) -> Regularizer:
    """Convert a regularizer, a module without state or a function to a `Regularizer`, if it can be pickled."""
    if isinstance(given, nn.Module) and (
        owned := [name for name, _ in (*given.named_parameters(), *given.named_buffers())]
    ):
        raise InjectionError(
            f"{type(given).__name__} owns parameters or buffers ({', '.join(owned[:3])}), which the optimizer and "
            "the state_dict would miss.\n  make it a layer of the model, or remove its state."
        )
    found: Regularizer = given if isinstance(given, Regularizer) else PARTS["adapted"](given)
    check_picklable(found, "the regularizer")
    return found


def check_picklable(value: object, what: str) -> None:
    """Raise `InjectionError` if `value`, which a hook will hold, cannot be pickled."""
    try:
        pickle.dumps(value)
    except Exception as error:
        raise InjectionError(
            f"{what} can't be pickled ({error}), so torch.save(model) and worker processes would fail.\n"
            "  instead of a lambda or a local function, use a function or class at the top level of a module."
        ) from error


def _regularizer(given: object) -> Regularizer:
    # A copy, so that changes of the original do not affect a plan. A deep copy takes ten times as long.
    copied: Regularizer = pickle.loads(pickle.dumps(as_regularizer(given)))
    return copied


def check_recipe_arguments(recipe: Recipe, layers: Entries | None, at: str, tensor: TensorKey) -> None:
    """Raise for arguments of `inject` that a recipe replaces."""
    given = {"layers": layers is not None, "at": at != "output", "tensor": tensor is not None}
    if used := [name for name, is_given in given.items() if is_given]:
        raise TypeError(
            f"the recipe {type(recipe).__name__} chooses its layers: remove {' and '.join(f'{n}=' for n in used)}.\n"
            "  to leave some out: exclude=   to choose them yourself: pass a regularizer instead of a recipe"
        )


def spec_of(state: InjectionState, sinks: Sequence[RateSink], declared: bool = False) -> InjectionSpec:
    """Return the spec of what was injected, with the current target rates, or with those that the code declared."""
    schedule = None if state.schedule == ConstantSchedule() else state.schedule
    names = [sink.site for sink in sinks]
    common: dict[str, Any] = {"schedule": schedule, "name": state.name, "portable": state.portable}
    if state.recipe is not None:
        recipe, targets = state.recipe["regularizer"], {sink.target for sink in sinks}
        if not declared and len(targets) == 1 and targets != {sink.initial_target for sink in sinks}:
            recipe = replace(recipe, **{sinks[0].rate.attribute: targets.pop()})
        return InjectionSpec(**{**state.recipe, "regularizer": recipe}, layers=names, **common)
    hooks = [sink for sink in sinks if isinstance(sink, SiteHook)]
    each = {hook.site: at_rate(hook.regularizer, hook.initial_target if declared else hook.target) for hook in hooks}
    one = next(iter(each.values())) if len(set(map(repr, each.values()))) == 1 else None
    places = {hook.at for hook in hooks if hook.regularizer.only_at is None}
    return InjectionSpec(
        each if one is None else one,
        layers=None if one is None else names,
        at=min(places, default="output", key=PLACES.index),
        tensor=hooks[0].tensor,
        p_scale={h.site: h.p_scale for h in hooks} if any(h.p_scale != 1.0 for h in hooks) else None,
        **common,
    )


def described(spec: InjectionSpec, strict: bool = False) -> dict[str, Any]:
    """Return the settings of a spec that differ from their defaults; unless `strict`, also what cannot be saved."""
    found = {}
    for field in fields(spec):
        name, value = field.name, getattr(spec, field.name)
        if value == field.default:
            continue
        try:
            found[name] = json.loads(json.dumps(_plain(value), allow_nan=False))
        except (TypeError, ValueError) as error:
            if strict and isinstance(error, StateError):
                raise
            if strict:
                use = _SAVED.get(name, "a string")
                raise StateError(f"InjectionSpec: {name}={value!r} cannot be saved.\n  use {use}.") from None
            found[name] = re.sub(" at 0x[0-9a-f]+", "", repr(value))  # of a function
    return found


_NAMES = "names or globs; the spec of an injection, drop.spec, has the names of its sites"
_SAVED = {"regularizer": "a string such as 'Dropout(p=0.1)'", "layers": _NAMES, "exclude": _NAMES}
"""What to write instead of a setting that cannot be saved."""


def _plain(value: Any) -> Any:
    """Write regularizers, recipes and schedules as text."""
    if isinstance(value, Regularizer | Recipe | Schedule):
        return text_of(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
