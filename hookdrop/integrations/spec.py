"""An injection as plain values, to be placed when the model and the length of the training are known."""

from __future__ import annotations

import inspect
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from hookdrop.errors import StateError, did_you_mean
from hookdrop.injection.handle import Injection
from hookdrop.injection.plan import Plan
from hookdrop.injection.text import as_schedule
from hookdrop.injection.verbs import plan
from hookdrop.recipes import RECIPES
from hookdrop.regularizers import Dropout, Regularizer
from hookdrop.schedules import LinearSchedule, Schedule
from hookdrop.utils.call_syntax import CallSyntax, parse_call, signature_of
from hookdrop.utils.select import as_entries
from hookdrop.utils.validation import rate

_RECIPE = CallSyntax("InjectionSpec", "recipe", RECIPES, "stochastic_depth(p=0.1)", bare=True)


@dataclass(frozen=True)
class InjectionSpec:
    """The arguments of `inject` or of a recipe, for trainers that build the model later and for configuration files.

    Strings work for all of them. They are parsed at once, so that a typo is found before the model is built, and never
    evaluated.

    Args:
        regularizer: a string such as `"DropBlock(p=0.1, block_size=7)"`, or what `inject` takes.
        layers, exclude, at, tensor, schedule, p_scale, name, on_existing, portable: as in `inject`.
        recipe: a recipe with its settings, such as `"stochastic_depth(p=0.1)"`, instead of `regularizer` and `layers`.

    Raises:
        TypeError, ValueError: a setting is invalid, or both or neither of `regularizer` and `recipe` are given.

    Example:
        >>> spec = InjectionSpec("Dropout(p=0.2)", layers="0", schedule="LinearSchedule(steps=1.0)")
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> spec.place(model, total_steps=100)
        <Injection 'dropout': 1 site, p=0 of 0.2, step 0 of LinearSchedule(steps=100)>
    """

    regularizer: Any = None
    layers: Any = None
    exclude: Any = ()
    at: str = "output"
    tensor: Any = None
    schedule: Any = None
    p_scale: Any = None
    name: str | None = None
    on_existing: str = "error"
    portable: bool = False
    recipe: str | None = None

    def __post_init__(self) -> None:
        if (self.regularizer is None) == (self.recipe is None):
            given = "both" if self.recipe is not None else "neither"
            raise ValueError(f"InjectionSpec takes either a regularizer and layers, or a recipe; got {given}.")
        if isinstance(self.regularizer, str) and self.regularizer.partition("(")[0] in RECIPES:
            raise ValueError(f"InjectionSpec: {self.regularizer!r} is a recipe: write recipe={self.regularizer!r}.")
        self._rehearse()

    @property
    def is_relative(self) -> bool:
        """Whether the schedule has fractions of the training, so that `place` needs `total_steps`."""
        settings = {"schedule": self.schedule} | ({} if self.recipe is None else self._recipe_arguments(None))
        schedule = settings["schedule"]
        if isinstance(schedule, str):
            schedule = as_schedule(schedule, "InjectionSpec")
        return isinstance(settings.get("steps"), float) or (isinstance(schedule, Schedule) and schedule.is_relative)

    def plan(self, model: nn.Module, total_steps: int | None = None, example_input: Any = None) -> Plan:
        """Show what `place` would do, without changing the model."""
        if self.recipe is not None:
            arguments = self._recipe_arguments(model, total_steps=total_steps, example_input=example_input)
            planned: Plan = RECIPES[parse_call(self.recipe, _RECIPE).name].plan(**arguments)
            return planned
        return plan(model, **self._settings, total_steps=total_steps, example_input=example_input)

    def place(self, model: nn.Module, total_steps: int | None = None) -> Injection:
        """Inject into `model`.

        Args:
            model: the model.
            total_steps: the length of the training in optimizer steps, for a schedule with fractions of it.

        Raises:
            The same errors as `inject`.
        """
        return self.plan(model, total_steps).apply()

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, ready for JSON or YAML.

        Raises:
            StateError: a setting is not a plain value, such as a function.
        """
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        plain = {name: _plain(value) for name, value in changed.items()}
        for name, value in plain.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                raise StateError(f"InjectionSpec: {name}={value!r} cannot be saved: use a string.") from None
        return plain

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> InjectionSpec:
        """Create a spec from the result of `to_dict`, or from a section of a configuration file.

        Raises:
            TypeError, ValueError: a setting is unknown or invalid.
        """
        if not isinstance(settings, Mapping):
            several = isinstance(settings, list | tuple)
            raise TypeError(
                f"a spec must be an InjectionSpec or a mapping of its settings, got {reprlib.repr(settings)}.\n"
                + ("  pass several specs as separate arguments: InjectionCallback(*specs)" if several else _EXAMPLE)
            )
        known = [f.name for f in fields(cls)]
        if unknown := [name for name in settings if name not in known]:
            raise TypeError(
                f"InjectionSpec has no setting {unknown[0]!r}.{did_you_mean(str(unknown[0]), known)}\n"
                f"  available: {', '.join(known)}"
            )
        return cls(**settings)

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "recipe"}

    def _recipe_arguments(self, model: nn.Module | None, **options: Any) -> dict[str, Any]:
        """The arguments of the recipe: those in the text, the settings of the spec, and `options`."""
        assert self.recipe is not None
        call = parse_call(self.recipe, _RECIPE)
        signature = inspect.signature(RECIPES[call.name])
        own = {name: value for name, value in self._settings.items() if value != _DEFAULTS[name]}
        if unused := [name for name in own if name not in signature.parameters or name in ("regularizer", "layers")]:
            raise TypeError(f"InjectionSpec: the recipe {call.name} does not take {unused[0]!r}: remove it.")
        try:
            bound = signature.bind(model, *call.args, **dict(call.kwargs), **own, **options)
        except TypeError as error:
            raise TypeError(f"InjectionSpec: {self.recipe!r}: {error}{signature_of(call.name, _RECIPE)}") from None
        return dict(bound.arguments)

    def _rehearse(self) -> None:
        """Find invalid settings before there is a model, by planning them for one that has any layer."""
        settings = self._settings
        if self.recipe is None:
            as_entries(() if self.layers is None else self.layers, "`layers`")
            as_entries(() if self.exclude is None else self.exclude, "`exclude`")
            for key in self.regularizer if isinstance(self.regularizer, Mapping) else ():
                as_entries(key, "a key of the mapping")
            settings |= {"layers": None if self.layers is None else "*", "exclude": ()}
        else:
            arguments = self._recipe_arguments(None, total_steps=None, example_input=None)
            settings |= {name: value for name, value in arguments.items() if name in settings}
            p = rate(arguments.get("p", 0.1), "p", f"InjectionSpec: {self.recipe!r}")
            settings |= {"regularizer": Dropout(p), "layers": "*"}
            if arguments.get("steps") is not None:
                settings["schedule"] = LinearSchedule(steps=arguments["steps"])
        if isinstance(self.p_scale, Mapping) or callable(self.p_scale):
            settings["p_scale"] = None  # it depends on the names of the layers
        given = settings.pop("regularizer")
        each = [{"*": value} for value in given.values()] if isinstance(given, Mapping) and given else [given]
        for regularizer in each:
            plan(nn.Sequential(nn.Identity(), nn.Identity()), regularizer, **settings, total_steps=1_000_000)


_EXAMPLE = '  for example: InjectionSpec("Dropout(p=0.1)", layers="head")'
_DEFAULTS = {f.name: f.default for f in fields(InjectionSpec)}


def _plain(value: Any) -> Any:
    """Write regularizers and schedules as text."""
    if isinstance(value, Regularizer | Schedule):
        return repr(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
