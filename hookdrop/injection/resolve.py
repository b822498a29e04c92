"""Resolve the arguments of `inject` to sites, each with a regularizer and a factor for its rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from hookdrop.hooks.registry import hooks_removed
from hookdrop.injection.text import as_schedule, parse
from hookdrop.recipes.base import Recipe, RecipeSite
from hookdrop.regularizers import Regularizer, as_regularizer, check_picklable, rate_of
from hookdrop.regularizers.base import P
from hookdrop.schedules import Schedule
from hookdrop.schedules.base import in_steps
from hookdrop.utils.errors import InjectionError, LayerError
from hookdrop.utils.select import (
    Entries,
    Entry,
    Layer,
    Selection,
    as_entries,
    entry_text,
    excluded_names,
    has_forward,
    layers_by_name,
    matches,
    select,
)
from hookdrop.utils.tables import counted, some
from hookdrop.utils.tensor_tree import TensorKey
from hookdrop.utils.validation import number, one_of

if TYPE_CHECKING:
    from hookdrop.survey.facts import Survey

Source: TypeAlias = Regularizer | nn.Module | Callable[[Tensor], Tensor] | str
Regularizers: TypeAlias = Source | Mapping[Any, Source] | Recipe
PScale: TypeAlias = str | Mapping[Any, float] | Callable[[str, int, int], float]


@dataclass
class PlannedSite:
    """One layer to hook."""

    name: str
    type: str
    module: nn.Module = field(repr=False)
    regularizer: Regularizer | None
    """Shared by all sites of an entry; each hook gets a copy."""
    p_scale: float = 1.0
    at: str = "output"
    """`"output"` or `"input"` of the layer, or the identity `"skip"` around its residual branch."""
    branch: str = ""
    """For a skip: the name of the branch's first layer, relative to this layer."""
    shape: tuple[int, ...] | None = None
    """Shape of the tensor to regularize; None without `example_input`."""
    calls: int | None = None
    """Calls per forward; None without `example_input`."""
    reading: str = ""
    """How the regularizer interprets the axes."""
    attribute: str = ""
    """For a dropout that the model already has: the attribute with its rate."""
    target: float | None = None
    """The rate before `p_scale`; None if there is none."""
    label: str = ""
    """The name that the handle shows."""

    def __post_init__(self) -> None:
        self.label = self.label or self.name
        if self.regularizer is not None:
            self.target = rate_of(self.regularizer)

    @property
    def p(self) -> float | None:
        """The target rate, including `p_scale`."""
        return None if self.target is None else self.target * self.p_scale

    @property
    def text(self) -> str:
        """The regularizer, or the current rate of a dropout that the model already has."""
        if self.attribute:
            return f"{self.type}.{self.attribute} (now {float(attrgetter(self.attribute)(self.module)):g})"
        return "" if self.regularizer is None else repr(self.regularizer)


@dataclass
class Resolved:
    """The resolved arguments of `inject`."""

    root: nn.Module
    """The model without its wrappers."""
    sites: list[PlannedSite]
    counts: dict[str, int]
    exact: set[str]
    warnings: list[str]
    schedule: Schedule | None
    """In optimizer steps."""
    requested_schedule: Schedule | None
    """As passed by the user, possibly in fractions of the training."""
    name: str = ""
    """The name of the recipe."""
    recipe: Mapping[str, Any] | None = None
    """The arguments with which the recipe chooses the same sites again."""
    survey: LazySurvey | None = None


def as_source(given: Any) -> Any:
    """Return a regularizer, a recipe or a mapping as it is, and create them from strings."""
    if isinstance(given, Mapping):
        return {key: as_source(value) for key, value in given.items()}
    found = parse(given) if isinstance(given, str) else given
    if isinstance(found, Schedule):
        raise TypeError(f"{found!r} is a schedule, not a regularizer.\n  write: inject(model, ..., schedule={found!r})")
    return found


def check_options(at: str, tensor: TensorKey, name: str | None, on_existing: str, portable: bool) -> None:
    """Raise if an argument of `inject` that does not depend on the model is invalid."""
    if at not in ("output", "input"):
        one_of(at, "at", "inject", ("output", "input"))
    if isinstance(tensor, bool) or not isinstance(tensor, TensorKey):
        raise TypeError(f"inject: tensor must be an index, a key, 'all' or None, got {tensor!r}.")
    if on_existing not in ("error", "replace", "stack"):
        one_of(on_existing, "on_existing", "inject", ("error", "replace", "stack"))
    if not isinstance(portable, bool):
        one_of(portable, "portable", "inject", (True, False))
    if name is not None and (not isinstance(name, str) or not name or "/" in name):
        raise InjectionError(f"inject: name must be a non-empty string without '/', got {name!r}.")


def check_recipe_arguments(recipe: Recipe, layers: Entries | None, at: str, tensor: TensorKey) -> None:
    """Raise for arguments of `inject` that a recipe replaces."""
    given = {"layers": layers is not None, "at": at != "output", "tensor": tensor is not None}
    if used := [name for name, is_given in given.items() if is_given]:
        raise TypeError(
            f"the recipe {type(recipe).__name__} chooses its layers: remove {' and '.join(f'{n}=' for n in used)}.\n"
            "  to leave some out: exclude=   to choose them yourself: pass a regularizer instead of a recipe"
        )


def resolve(
    model: nn.Module,
    regularizer: Regularizers | None,
    layers: Entries | None,
    exclude: Entries | None,
    schedule: Schedule | str | None,
    p_scale: PScale | None,
    at: str = "output",
    total_steps: int | None = None,
    example_input: Any = None,
) -> Resolved:
    """Select the layers and assign their regularizers, without placing anything."""
    requested = None if schedule is None else as_schedule(schedule, "inject")
    schedule = None if requested is None else in_steps(requested, total_steps)
    regularizers, layers = _regularizers_and_layers(regularizer, layers)
    source = "a key of the mapping" if isinstance(regularizer, Mapping) else "`layers`"
    selection = select(model, layers, exclude, source)
    selected, warnings = _callable_layers(selection)
    if regularizer is None:  # the plan only lists layers
        warnings = []
    elif any(map(is_keras, map(type, model.modules()))):
        _reject_keras_layers(model, selected)
    if selection.unmatched_excludes:
        warnings += _unmatched_warnings(selection.unmatched_excludes)
    sites = []
    survey = None if example_input is None else LazySurvey(model, example_input)
    for layer in selected:
        indices = selection.matched_by[layer.name]
        if len(regularizers) > 1 and len(indices) > 1:
            keys = " and ".join([entry_text(selection.entries[i]) for i in indices])
            raise LayerError(
                f"{layer.name!r} matches more than one key of the mapping: {keys}.\n  give each layer one regularizer."
            )
        chosen = regularizers[indices[0] if len(regularizers) > 1 else 0]
        sites.append(_plan_site(selection.root, layer, chosen, at, survey))
    if schedule is not None:
        check_picklable(schedule, "the schedule")
    if p_scale is not None:
        _scale(sites, rate_factors(selected, p_scale))
    for site in sites:
        _check_rate(site, schedule)
    return Resolved(selection.root, sites, selection.counts, selection.exact, warnings, schedule, requested)


class LazySurvey:
    """The survey of a model, which runs when a recipe first reads an attribute of it."""

    def __init__(self, model: nn.Module, example_input: Any) -> None:
        self._arguments = model, example_input
        self.found: Survey | None = None
        """None if the recipe did not need it."""

    def __getattr__(self, name: str) -> Any:
        with hooks_removed(self._arguments[0]):  # an injection is no part of the model
            if self.found is None:
                from hookdrop.survey.facts import survey

                self.found = survey(*self._arguments)
            return getattr(self.found, name)


def resolve_recipe(
    model: nn.Module,
    recipe: Recipe,
    exclude: Entries | None,
    schedule: Schedule | str | None,
    p_scale: PScale | None,
    total_steps: int | None,
    example_input: Any,
) -> Resolved:
    """Let a recipe choose the sites."""
    requested = None if schedule is None else as_schedule(schedule, "inject")
    schedule = None if requested is None else in_steps(requested, total_steps)
    if schedule is not None:
        check_picklable(schedule, "the schedule")
    everything, name = layers_by_name(model), type(recipe).__name__
    root = everything[""].module
    lazy = LazySurvey(model, example_input)
    survey = cast("Survey", lazy)
    found = [(site, site.group or site.name) for site in recipe.sites(root, survey)]
    excluded, _, unmatched = excluded_names(
        list(everything.values()), exclude, {name for site, group in found for name in (site.name, group)}
    )
    chosen = [(site, group) for site, group in found if excluded.isdisjoint((site.name, group))]
    if not chosen:
        raise LayerError(f"`exclude` removes every site of {name} ({len(found)}): nothing is left.")
    groups = recipe.groups(root, survey, [site for site, _ in chosen])
    wanted = recipe.p_scale if p_scale is None else p_scale
    scales = [1.0] * len(groups) if wanted is None else rate_factors([everything[one] for one in groups], wanted)
    facts = lazy if lazy.found is not None or example_input is not None else None
    factors = dict(zip(groups, scales, strict=True))
    sites = [_plan_recipe_site(root, everything[site.name], site, facts) for site, _ in chosen]
    if any(site.regularizer is not None for site in sites):
        check_picklable(recipe, "the recipe")
    _scale(sites, [site.factor * factors[group] for site, group in chosen])
    for site in sites:
        _check_rate(site, schedule)
    warnings = [*recipe.warnings(root, survey, [site for site, _ in found]), *_unmatched_warnings(unmatched)]
    again = {
        "regularizer": recipe,
        "exclude": tuple(sorted(excluded & {name for site, group in found for name in (site.name, group)})),
        "p_scale": p_scale if p_scale is None or isinstance(p_scale, str) else factors,
    }
    counts = {name: len(sites)}
    return Resolved(root, sites, counts, set(), warnings, schedule, requested, name, again, lazy)


def _plan_recipe_site(root: nn.Module, layer: Layer, site: RecipeSite, survey: LazySurvey | None) -> PlannedSite:
    if site.regularizer is None:
        return PlannedSite(
            layer.name,
            type(layer.module).__name__,
            layer.module,
            None,
            at="attribute",
            attribute=site.attribute,
            target=P.valid(site.p, site.label or site.name),
            label=site.label,
        )
    planned = _plan_site(root, layer, site.regularizer, "input" if site.at == "skip" else "output", survey)
    planned.at, planned.branch, planned.label = site.at or planned.at, site.branch, site.label or planned.label
    return planned


def _plan_site(
    root: nn.Module, layer: Layer, regularizer: Regularizer | None, at: str, survey: LazySurvey | None
) -> PlannedSite:
    """Return the site of one layer. Some regularizers have only one place, and read settings from the model."""
    if regularizer is not None:
        if at == "input" and regularizer.only_at == "output":
            raise InjectionError(
                f"inject: {regularizer.title} acts on the output of a layer, got at={at!r}.\n"
                "  remove at=, and hook the layer before"
            )
        at = regularizer.only_at or at
        regularizer = regularizer.for_layer(root, layer.name, at, survey)
    return PlannedSite(layer.name, type(layer.module).__name__, layer.module, regularizer, at=at)


def _unmatched_warnings(entries: list[Entry]) -> list[str]:
    warnings = []
    for entry in entries:
        # `exclude="layer4"` names one module, not its submodules.
        hint = f"; to exclude its submodules: '{entry}.**'" if isinstance(entry, str) and "*" not in entry else ""
        warnings.append(f"exclude {entry_text(entry)} matches none of the selected layers{hint}.")
    return warnings


def _regularizers_and_layers(
    given: Regularizers | None, layers: Entries | None
) -> tuple[list[Regularizer | None], Entries]:
    """Return a regularizer for each entry, or one for all, and the entries."""
    if isinstance(given, Mapping):
        if recipe := next((value for value in given.values() if isinstance(value, Recipe)), None):
            raise TypeError(f"the recipe {recipe!r} chooses its layers: pass it alone, not in a mapping.")
        if layers is not None:
            raise LayerError("pass either `layers` or a mapping of layers to regularizers, not both.")
        keys = [as_entries(key, "a key of the mapping") for key in given]
        if any(len(key) != 1 for key in keys):
            raise LayerError("each key of the mapping must be a single entry: a name, a glob, a class, ...")
        return [_regularizer(value) for value in given.values()], [key[0] for key in keys]
    found = None if given is None else _regularizer(given)
    if layers is None:
        raise LayerError(
            "`layers` is missing: pass a name, a glob such as 'layer3.*', a class, or a list of these.\n"
            '  see all:      print(hookdrop.plan(model, layers="**"))'
        )
    return [found], layers


def _regularizer(given: object) -> Regularizer:
    # Copied so that changes to the original do not affect a plan. Each hook gets its own copy later.
    return copy.deepcopy(as_regularizer(given))


def _callable_layers(selection: Selection) -> tuple[list[Layer], list[str]]:
    """Drop the layers that the model never calls, such as containers without a forward, and warn about them."""
    called: list[Layer] = []
    skipped: list[Layer] = []
    for layer in selection.layers:
        module = layer.module
        if isinstance(module, torch.jit.ScriptModule):
            raise InjectionError(
                f"{layer.name!r} is a ScriptModule, which does not support Python hooks.\n"
                "  train it unscripted, and script it inside `with hookdrop.without_hooks(model):`."
            )
        (called if has_forward(module) else skipped).append(layer)
    if not skipped:
        return called, []
    for layer in skipped:
        if layer.name in selection.exact:
            raise LayerError(
                f"{layer.name!r} is a {type(layer.module).__name__}, which is never called: a hook on it never fires.\n"
                "  its parent only iterates over it or uses its weights: hook the layers inside, or the parent."
            )
    names = some([layer.name for layer in skipped])
    if not called:
        raise LayerError(
            f"`layers` matches only modules that are never called: {names}.\n"
            "  their parents iterate over them or use their weights: hook their submodules or their parents."
        )
    return called, [f"skipped {counted(len(skipped), 'module')} that the model never calls (containers): {names}."]


def _reject_keras_layers(model: nn.Module, layers: list[Layer]) -> None:
    """Raise for Keras layers: Keras never puts them in eval mode, so a hook would drop in `predict()` too."""
    keras = [module for module in model.modules() if is_keras(type(module))]
    # Only these switch the mode of the modules inside them.
    wrappers = [module for module in keras if type(module).__name__ == "TorchModuleWrapper"]
    inside = {id(part) for module in keras for part in module.modules()}
    switched = {id(part) for wrapper in wrappers for child in wrapper.children() for part in child.modules()}
    for layer in layers:
        if id(layer.module) in inside - switched:
            raise InjectionError(
                f"{layer.name!r} ({type(layer.module).__name__}) belongs to a Keras layer.\n"
                "  Keras never puts its layers in eval mode: a hook would drop in predict() and evaluate() too.\n"
                "  use a Keras layer such as keras.layers.Dropout, or hook PyTorch modules inside a "
                "keras.layers.TorchModuleWrapper, which switches their mode."
            )


def _is_keras(cls: type) -> bool:
    return any(base.__module__.startswith("keras.") for base in cls.__mro__)


is_keras: Callable[[type], bool] = lru_cache(maxsize=1024)(_is_keras)


def rate_factors(layers: list[Layer], p_scale: PScale) -> list[float]:
    """Return the rate factor of each layer: by depth, by pattern, or from a function."""
    count = len(layers)
    if p_scale == "equal":
        return [1.0] * count
    if p_scale == "depth":
        return [(index + 1) / count for index in range(count)]
    if p_scale == "depth_from_zero":
        if count == 1:
            raise ValueError("p_scale='depth_from_zero' gives the only site the factor 0; use 'depth' or omit p_scale.")
        return [index / (count - 1) for index in range(count)]
    if isinstance(p_scale, Mapping):
        return _factors_by_pattern(layers, p_scale)
    if callable(p_scale):
        return [p_scale(layer.name, index, count) for index, layer in enumerate(layers)]
    hint = "\n  one factor for all sites? multiply p by it." if isinstance(p_scale, int | float) else ""
    raise ValueError(
        f"p_scale must be 'depth', 'depth_from_zero', 'equal', a mapping of patterns to factors, or a function of "
        f"(name, index, count), got {p_scale!r}.{hint}"
    )


def _factors_by_pattern(layers: list[Layer], p_scale: Mapping[Any, float]) -> list[float]:
    found: dict[str, tuple[str, float]] = {}
    for pattern, factor in p_scale.items():
        names = [layer.name for entry in as_entries(pattern, "`p_scale`") for layer in matches(layers, entry)[0]]
        if not names:
            selected = ", ".join([repr(layer.name) for layer in layers[:6]]) + (", ..." if len(layers) > 6 else "")
            raise LayerError(
                f"p_scale contains {entry_text(pattern)}, which matches none of the {len(layers)} selected layers.\n"
                f"  selected: {selected}"
            )
        for name in names:
            if name in found:
                raise LayerError(
                    f"p_scale matches {name!r} twice: {found[name][0]} and {entry_text(pattern)}. Give it one factor."
                )
            found[name] = (entry_text(pattern), factor)
    return [found[layer.name][1] if layer.name in found else 1.0 for layer in layers]


def _scale(sites: list[PlannedSite], scales: list[float]) -> None:
    for site, factor in zip(sites, scales, strict=True):
        if site.regularizer is not None and rate_of(site.regularizer) is None:
            raise InjectionError(f"p_scale: {site.regularizer!r} has no rate to scale.")
        site.p_scale = number(factor, f"p_scale of {site.name!r}", "inject")
        if site.p_scale < 0:
            raise ValueError(f"inject: p_scale of {site.name!r} must be at least 0, got {site.p_scale:g}.")


def _check_rate(site: PlannedSite, schedule: Schedule | None) -> None:
    """Raise if the rate at the schedule's peak is out of range, or if the schedule has no rate to drive."""
    if site.regularizer is None and not site.attribute:
        return
    target, declared = site.target, P if site.regularizer is None else type(site.regularizer).rate
    if target is None or declared is None:
        if schedule is not None:
            raise InjectionError(
                f"the schedule has no rate to drive: {site.regularizer!r} has none of p, drop_prob, drop_rate.\n"
                "  omit schedule=, or use a regularizer with a rate."
            )
        return
    peak = 1.0 if schedule is None else schedule.peak
    rate = target * site.p_scale * (schedule(0) if peak is None and schedule is not None else peak or 0.0)
    try:
        declared.valid(rate, site.type if site.regularizer is None else site.regularizer.title)
    except ValueError as error:
        times = f" x schedule {rate / (target * site.p_scale):g}" if math.isfinite(rate) and rate else ""
        raise ValueError(f"{error}\n  at {site.label!r}: p {target:g} x p_scale {site.p_scale:g}{times}.") from None
