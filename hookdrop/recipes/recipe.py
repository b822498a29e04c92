"""What every recipe has in common: places, each with settings, that become one plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec

from torch import nn

from hookdrop.errors import LayerError, nothing_placed
from hookdrop.hooks import compiling
from hookdrop.injection.handle import Injection
from hookdrop.injection.plan import Plan, make_plan
from hookdrop.injection.resolve import resolve
from hookdrop.schedules import Schedule

P = ParamSpec("P")
Factory = Callable[..., Any]


@dataclass(frozen=True)
class Place:
    """One site of a recipe."""

    name: str
    """The layer's fully qualified name; empty for the model itself."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the factory of its regularizer is called with besides `p`."""
    p_scale: float = 1.0
    at: str = "output"
    branch: str = ""
    """Of a `"skip"`: the block's layer that its residual branch begins with."""


class Recipe(Generic[P]):
    """A named placement: call it to inject, or `plan` to see what that would do."""

    def __init__(self, make: Callable[P, Plan]) -> None:
        self._make = make
        functools.update_wrapper(self, make)

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """What calling the recipe with the same arguments would do; nothing is touched."""
        with nothing_placed():
            compiling.not_while_tracing(f"recipes.{self._make.__name__}()")
            self._must_take(args, kwargs)
            return self._make(*args, **kwargs)

    def _must_take(self, args: Any, kwargs: Any) -> None:
        signature = inspect.signature(self)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            names = ", ".join(signature.parameters)
            raise TypeError(f"{self._make.__name__}: {error}.\n  it takes: {names}") from None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Injection:
        return self.plan(*args, **kwargs).apply()

    def __repr__(self) -> str:
        return f"<recipe {self._make.__name__}{inspect.signature(self._make)}>"


def plan_places(
    model: nn.Module,
    places: Sequence[Place],
    factory: Factory,
    p: float,
    *,
    schedule: Schedule | None,
    name: str,
    on_existing: str,
    example_input: Any,
    warnings: Sequence[str] = (),
) -> Plan:
    """The plan of a recipe's places, each with a regularizer of its own made by the factory."""
    regularizers: dict[Any, Any] = {
        place.name or model: made_by(factory, {"p": p, **place.settings}) for place in places
    }
    scales: dict[Any, float] = {place.name or model: place.p_scale for place in places if place.p_scale != 1.0}
    resolved = resolve(model, regularizers, None, (), schedule, scales or None)
    by_name = {place.name: place for place in places}
    for site in resolved.sites:
        site.at, site.branch = by_name[site.name].at, by_name[site.name].branch
    resolved.counts = {name: len(resolved.sites)}
    resolved.warnings += warnings
    return make_plan(
        model, resolved, schedule=schedule, name=name, on_existing=on_existing, example_input=example_input
    )


def made_by(factory: Factory, settings: Mapping[str, Any]) -> Any:
    """What a factory makes of a site's settings.

    Raises:
        TypeError: it is no factory, or does not take them.
    """
    asked = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    names = ", ".join(settings)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise TypeError(
            f"the recipe's regularizer must be a class or a function that is called as ({asked}), got {factory!r}.\n"
            f"  write: regularizer=lambda {names}: ..."
        )
    try:
        inspect.signature(factory).bind(**settings)
    except TypeError as error:
        called = getattr(factory, "__name__", repr(factory))
        raise TypeError(
            f"the recipe's regularizer is called as {called}({asked}), which it does not take: {error}.\n"
            f"  write: regularizer=lambda {names}: {called}(...)"
        ) from None
    return factory(**settings)


def nothing_to_do(recipe: str, model: nn.Module, wanted: str) -> LayerError:
    """The error of a recipe that finds no place."""
    return LayerError(
        f"{recipe} finds nothing to do in {type(model).__name__}: it looks for {wanted}.\n"
        "  choose the layers yourself: inject(model, ..., layers=...)\n"
        '  see all:                    print(hookdrop.plan(model, layers="**"))'
    )
