"""An injection as plain values, to be placed when the model and the length of the training are known."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from hookdrop.errors import StateError, did_you_mean
from hookdrop.injection.handle import Injection
from hookdrop.injection.plan import Plan
from hookdrop.injection.verbs import plan
from hookdrop.recipes import RECIPES
from hookdrop.regularizers import Regularizer, parse
from hookdrop.schedules import Schedule
from hookdrop.schedules.parse import parse_schedule
from hookdrop.utils.call_syntax import Call, CallSyntax, parse_call, signature_of

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
        if isinstance(self.schedule, str):
            parse_schedule(self.schedule)
        if self.recipe is not None:
            self._recipe_arguments(None)
            return
        regularizers = self.regularizer.values() if isinstance(self.regularizer, Mapping) else [self.regularizer]
        for regularizer in regularizers:
            if isinstance(regularizer, str):
                parse(regularizer)

    @property
    def is_relative(self) -> bool:
        """Whether the schedule has fractions of the training, so that `place` needs `total_steps`."""
        settings = {"schedule": self.schedule} | ({} if self.recipe is None else self._recipe_arguments(None))
        schedule = settings["schedule"]
        if isinstance(schedule, str):
            schedule = parse_schedule(schedule)
        return isinstance(settings.get("steps"), float) or (isinstance(schedule, Schedule) and schedule.is_relative)

    def plan(self, model: nn.Module, total_steps: int | None = None, example_input: Any = None) -> Plan:
        """Show what `place` would do, without changing the model."""
        options = {"total_steps": total_steps, "example_input": example_input}
        if self.recipe is not None:
            arguments = self._recipe_arguments(model)
            planned: Plan = RECIPES[parse_call(self.recipe, _RECIPE).name].plan(**arguments, **options)
            return planned
        return plan(model, **{name: value for name, value in vars(self).items() if name != "recipe"}, **options)

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
        known = [f.name for f in fields(cls)]
        if unknown := [name for name in settings if name not in known]:
            raise TypeError(
                f"InjectionSpec has no setting {unknown[0]!r}.{did_you_mean(unknown[0], known)}\n"
                f"  available: {', '.join(known)}"
            )
        return cls(**settings)

    def _recipe_arguments(self, model: nn.Module | None) -> dict[str, Any]:
        """The arguments of the recipe: those in the text, and the settings of the spec."""
        assert self.recipe is not None
        call = parse_call(self.recipe, _RECIPE)
        signature = inspect.signature(RECIPES[call.name])
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "recipe"}
        own = {name: value for name, value in own.items() if value != _DEFAULTS[name]}
        if unused := [name for name in own if name not in signature.parameters or name in ("regularizer", "layers")]:
            raise TypeError(f"InjectionSpec: the recipe {call.name} does not take {unused[0]!r}: remove it.")
        return self._bound(call, signature, model, own)

    def _bound(self, call: Call, signature: inspect.Signature, model: nn.Module | None, own: Any) -> dict[str, Any]:
        try:
            bound = signature.bind(model, *call.args, **dict(call.kwargs), **own)
        except TypeError as error:
            raise TypeError(f"InjectionSpec: {self.recipe!r}: {error}{signature_of(call.name, _RECIPE)}") from None
        return dict(bound.arguments)


_DEFAULTS = {f.name: f.default for f in fields(InjectionSpec)}


def _plain(value: Any) -> Any:
    """Write regularizers and schedules as text."""
    if isinstance(value, Regularizer | Schedule):
        return repr(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
