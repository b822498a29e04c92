"""Common code of the recipes: turn a list of sites into one plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec

from torch import nn
from torch.fx import GraphModule

from hookdrop.errors import InjectionError, LayerError, nothing_placed
from hookdrop.hooks import compiling
from hookdrop.injection.handle import Injection
from hookdrop.injection.place import place
from hookdrop.injection.plan import Plan, make_plan
from hookdrop.injection.resolve import PScale, rate_factors, resolve
from hookdrop.schedules import Schedule
from hookdrop.utils.select import Layer, named_layers

P = ParamSpec("P")
Factory = Callable[..., Any]


@dataclass(frozen=True)
class RecipeSite:
    """One site of a recipe: the full name of a layer (empty for the model) and the keywords of its regularizer."""

    name: str
    settings: Mapping[str, Any]
    p_scale: float = 1.0
    at: str = ""
    """`"skip"` for an identity skip; empty for the regularizer's usual place."""
    branch: str = ""
    """For `at="skip"`: the first layer of the block's residual branch."""


class Recipe(Generic[P]):
    """A named placement. Call it to inject, or call `plan` to preview the result."""

    def __init__(self, make: Callable[P, Plan]) -> None:
        self._make = make
        functools.update_wrapper(self, make)

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Preview a call with the same arguments, without changing the model."""
        name, signature = self._make.__name__, inspect.signature(self)
        with nothing_placed():
            compiling.raise_if_tracing(f"recipes.{name}()")
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}: {error}.\n  it takes: {', '.join(signature.parameters)}") from None
            return self._make(*args, **kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Injection:
        return place(self.plan(*args, **kwargs))

    def __repr__(self) -> str:
        return f"<recipe {self._make.__name__}{inspect.signature(self._make)}>"


def plan_sites(
    model: nn.Module,
    sites: Sequence[RecipeSite],
    factory: Factory,
    warnings: Sequence[str] = (),
    *,
    schedule: Schedule | str | None,
    total_steps: int | None,
    name: str,
    on_existing: str,
    portable: bool,
    example_input: Any,
) -> Plan:
    """Plan the sites of a recipe, with one regularizer from `factory` for each."""
    by_name = {site.name: site for site in sites}
    regularizers: dict[Any, Any] = {site.name or model: _make_regularizer(factory, site.settings) for site in sites}
    scales: dict[Any, float] = {site.name or model: site.p_scale for site in sites if site.p_scale != 1.0}
    resolved = resolve(model, regularizers, None, (), schedule, scales or None, total_steps=total_steps)
    for planned in resolved.sites:
        planned.at, planned.branch = by_name[planned.name].at or planned.at, by_name[planned.name].branch
    resolved.counts = {name: len(resolved.sites)}
    resolved.warnings += warnings
    return make_plan(
        model, resolved, tensor=None, name=name, on_existing=on_existing, portable=portable, example_input=example_input
    )


def _make_regularizer(factory: Factory, settings: Mapping[str, Any]) -> Any:
    """Call the factory with the settings of a site."""
    requested = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    names = ", ".join(settings)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise TypeError(
            f"`regularizer` must be a class or function that accepts ({requested}), got {factory!r}.\n"
            f"  write: regularizer=lambda {names}: ..."
        )
    try:
        inspect.signature(factory).bind(**settings)
    except TypeError as error:
        called = getattr(factory, "__name__", repr(factory))
        raise TypeError(
            f"the recipe calls {called}({requested}), but it does not accept them: {error}.\n"
            f"  write: regularizer=lambda {names}: {called}(...)"
        ) from None
    return factory(**settings)


def layer_factors(layers: list[Layer], p_scale: PScale | None) -> list[float]:
    """Return the factor of each layer or block, which all its sites share."""
    return [1.0] * len(layers) if p_scale is None else rate_factors(layers, p_scale)


def require_sites(
    recipe: str, model: nn.Module, names: Sequence[str], wanted: str, example: str = "inject(model, ..., layers=...)"
) -> None:
    """Raise if the recipe found no site, or if torch.fx traced the part of the model that contains the sites.

    Args:
        wanted: what the recipe looks for.
        example: a call that chooses the layers of this model instead.
    """
    for layer in named_layers(model):
        if isinstance(layer.module, GraphModule):
            prefix = f"{layer.name}." if layer.name else ""
            if not names or any(name.startswith(prefix) for name in names):
                where = repr(layer.name) if layer.name else "the model"
                raise InjectionError(
                    f"{recipe}: {where} is an fx GraphModule. Tracing replaced its blocks with a graph, so the "
                    f"recipe cannot recognize them.\n  inject before tracing: {recipe}(model), then "
                    "torch.fx.symbolic_trace(model)"
                )
    if not names:
        raise LayerError(
            f"{recipe} found no matching layer in {type(model).__name__}: it looks for {wanted}.\n"
            f"  choose the layers yourself: {example}\n"
            '  see all:                    print(hookdrop.plan(model, layers="**"))'
        )
