"""Resolve the arguments of `inject` to a plan: sites, each with a regularizer and a factor for its rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from hookdrop.guards.plan import plan_warnings
from hookdrop.hooks.registry import hooks_removed
from hookdrop.injection.plan import Plan, PlannedSite, inspect_forward
from hookdrop.injection.spec import InjectionSpec, PScale
from hookdrop.recipes.base import Recipe, RecipeSite
from hookdrop.regularizers import Regularizer, check_picklable, rate_of
from hookdrop.regularizers.base import P
from hookdrop.schedules import Schedule
from hookdrop.schedules.base import in_steps
from hookdrop.utils.errors import InjectionError, LayerError, StateError
from hookdrop.utils.select import (
    Entry,
    Layer,
    entry_text,
    excluded_names,
    hookable,
    layers_by_name,
    no_hooks,
    select,
    values_by_entry,
)
from hookdrop.utils.tables import counted, some
from hookdrop.utils.tensor_tree import TensorKey
from hookdrop.utils.validation import number

if TYPE_CHECKING:
    from hookdrop.survey.facts import Survey


class LazySurvey:
    """The survey of a model, which runs when a recipe first reads an attribute of it."""

    def __init__(self, model: nn.Module, example_input: Any) -> None:
        self._arguments = model, example_input
        self.is_given = example_input is not None
        self.found: Survey | None = None
        """None if the recipe did not need it."""

    def __getattr__(self, name: str) -> Any:
        if self.found is None:
            from hookdrop.survey.facts import survey

            self.found = survey(*self._arguments)
        return getattr(self.found, name)


def make_plan(model: nn.Module, spec: InjectionSpec, total_steps: int | None = None, example_input: Any = None) -> Plan:
    """Choose the sites, and check them; nothing is placed."""
    schedule = None
    if spec.timing is not None:
        schedule = in_steps(spec.timing, total_steps)
        check_picklable(schedule, "the schedule")
    plan, given = Plan(model, model, spec, schedule), example_input is not None
    if not given and not isinstance(spec.source, Recipe):
        unmatched = _select_layers(plan, None)
    else:
        lazy = LazySurvey(model, example_input)
        with hooks_removed(model):  # an injection is no part of the model that a survey runs
            is_recipe = isinstance(spec.source, Recipe)
            unmatched = _run_recipe(plan, spec.source, lazy, given) if is_recipe else _select_layers(plan, lazy)
    for entry in unmatched:
        # `exclude="layer4"` names one module, not its submodules.
        hint = f"; to exclude its submodules: '{entry}.**'" if isinstance(entry, str) and "*" not in entry else ""
        plan.warnings.append(f"exclude {entry_text(entry)} matches none of the selected layers{hint}.")
    changed = [site for site in plan.sites if site.constant is None]
    for site in changed or plan.sites:
        _check_rate(site, schedule)
    hooked = [site.regularizer.title.lower() for site in plan.sites if site.regularizer is not None]
    plan.add(plan_warnings(plan))
    if given and not any(site.attribute for site in plan.sites):
        inspect_forward(plan, example_input)
    plan.name = spec.name or plan.name or "_".join(dict.fromkeys(hooked))
    return plan


# --- layers that the user chooses


def _select_layers(plan: Plan, survey: LazySurvey | None) -> list[Entry]:
    """Fill in the sites, and return the entries of `exclude` that match none of the selected layers."""
    regularizers, layers = plan.spec.chosen
    source = "a key of the mapping" if isinstance(plan.spec.source, Mapping) else "`layers`"
    selection = select(plan.model, layers, plan.spec.exclude, source)
    plan.root, plan.counts, plan.exact = selection.root, selection.counts, selection.exact
    selected, skipped = hookable(selection)
    if skipped:
        modules, names = counted(len(skipped), "module"), some([layer.name for layer in skipped])
        plan.warnings.append(f"skipped {modules} that the model never calls (containers): {names}.")
    hidden = dict[str, nn.Module]()
    for layer in selected:
        indices = selection.matched_by[layer.name]
        if len(regularizers) > 1 and len(indices) > 1:
            keys = " and ".join([entry_text(selection.entries[i]) for i in indices])
            raise LayerError(
                f"{layer.name!r} matches more than one key of the mapping: {keys}.\n  give each layer one regularizer."
            )
        chosen = regularizers[indices[0] if len(regularizers) > 1 else 0]
        plan.sites.append(site := _site(plan.root, layer, chosen, plan.spec.at, plan.spec.tensor, survey))
        if site.at == "parameters":
            hidden[site.name] = site.module
    if hidden:
        from hookdrop.hooks.parameter_hooks import tied_elsewhere

        plan.warnings += tied_elsewhere(plan.root, hidden, plan.spec.tensor)
    if plan.spec.p_scale is not None:
        _scale(plan.sites, rate_factors(selected, plan.spec.p_scale))
    return selection.unmatched_excludes


def _site(
    root: nn.Module, layer: Layer, regularizer: Regularizer, at: str, tensor: TensorKey, survey: LazySurvey | None
) -> PlannedSite:
    """Return the site of one layer. Some regularizers have only one place, and read settings from the model."""
    place, reading = regularizer.only_at or at, ""
    if at == "input" != place:
        raise InjectionError(
            f"inject: {regularizer.title} acts on the {place} of a layer, got at='input'.\n"
            f"  remove at={', and hook the layer before' * (place == 'output')}"
        )
    if "parameters" in (at, place):
        from hookdrop.hooks.parameter_hooks import check_parameters  # only parameters need it

        reading = check_parameters(regularizer, layer.module, tensor, layer.name)
    regularizer = regularizer.for_layer(root, layer.name, place, survey)
    site = PlannedSite(layer.name, type(layer.module).__name__, layer.module, regularizer, place, reading=reading)
    if survey is not None and "rows" in regularizer.needs:
        site.runs = cast(Any, regularizer).runs_on(survey, layer.name, tensor)
    return site


# --- sites that a recipe chooses


def _run_recipe(plan: Plan, recipe: Recipe, lazy: LazySurvey, given: bool) -> list[Entry]:
    """Like `_select_layers`, with the sites of a recipe."""
    everything, name, spec = layers_by_name(plan.model), type(recipe).__name__, plan.spec
    plan.root = root = everything[""].module
    survey = cast("Survey", lazy)
    try:
        found = [(site, site.group or site.name) for site in recipe.sites(root, survey)]
    except LayerError:
        if lazy.found is not None and not lazy.found.trace.calls:
            raise LayerError(f"{name} sees no layers: {no_hooks(root)}") from None
        raise
    places = [(site.name, site.at, site.attribute, site.constant) for site, _ in found]
    if twice := [
        site.label or site.name for (site, _), one in zip(found, places, strict=True) if places.count(one) > 1
    ]:
        raise InjectionError(
            f"{name}: blocks of {type(root).__name__} share {twice[0]!r}, so that each would regularize it once more.\n"
            "  choose the layers yourself: inject(model, ..., layers=...)"
        )
    names = {name for site, group in found for name in (site.name, group)}
    excluded, _, unmatched = excluded_names(list(everything.values()), spec.exclude, names)
    chosen = [(site, group) for site, group in found if excluded.isdisjoint((site.name, group))]
    if not chosen:
        raise LayerError(f"`exclude` removes every site of {name} ({len(found)}): nothing is left.")
    groups = recipe.groups(root, survey, [site for site, _ in chosen])
    by_recipe = recipe.p_scale if len(groups) > 1 else None  # a model of one block has the requested rate
    wanted = by_recipe if spec.p_scale is None else spec.p_scale
    scales = [1.0] * len(groups) if wanted is None else rate_factors([everything[one] for one in groups], wanted)
    factors = dict(zip(groups, scales, strict=True))
    facts = lazy if given or lazy.found is not None else None
    plan.sites = [_recipe_site(root, everything[site.name], site, facts) for site, _ in chosen]
    if any(site.regularizer is not None for site in plan.sites):
        check_picklable(recipe, "the recipe")
    _scale(plan.sites, [site.factor * factors.get(group, 1.0) for site, group in chosen])
    plan.warnings += recipe.warnings(root, survey, [site for site, _ in found])
    if recipe.takes_all and lazy.found is not None and len(found) > 1:
        from hookdrop.survey.siblings import sibling_warnings  # only a recipe that ran the model needs it

        plan.warnings += sibling_warnings(lazy.found.trace, [site.name for site, _ in found], plan.warnings)
    plan.name, plan.counts, plan.survey = name, {name: len(plan.sites)}, lazy.found
    plan.recipe = {
        "regularizer": recipe,
        "exclude": tuple(sorted(excluded & names)),
        "p_scale": spec.p_scale if spec.p_scale is None or isinstance(spec.p_scale, str) else factors,
    }
    _check_chosen(spec, [site.name for site in plan.sites])
    return unmatched


def _recipe_site(root: nn.Module, layer: Layer, site: RecipeSite, survey: LazySurvey | None) -> PlannedSite:
    if site.regularizer is None:
        planned = PlannedSite(layer.name, type(layer.module).__name__, layer.module, None, "attribute", target=site.p)
    else:
        planned = _site(root, layer, site.regularizer, "input" if site.at == "skip" else "output", None, survey)
        planned.at = site.at or planned.at
    planned.name, planned.branch = site.label or planned.name, site.branch
    planned.attribute, planned.constant = site.attribute, site.constant
    return planned


def _check_chosen(spec: InjectionSpec, sites: Sequence[str]) -> None:
    """Raise `StateError` if a recipe chose other sites than the spec has."""
    named = [spec.layers] if isinstance(spec.layers, str) else spec.layers
    if named is None or sorted(sites) == sorted(named):
        return
    lines = [f"the recipe {spec.regularizer} chooses other sites here than in the spec."]
    lines += [f"  only in the spec: {site!r}" for site in named if site not in sites]
    lines += [f"  only here:        {site!r}" for site in sites if site not in named]
    raise StateError("\n".join([*lines, "  to place it anyway: remove `layers` from the spec"]))


# --- rates


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
    if p_scale == "depth_reversed":
        return [(count - index) / count for index in range(count)]
    if not isinstance(p_scale, Mapping):
        return [cast(Any, p_scale)(layer.name, index, count) for index, layer in enumerate(layers)]
    found = values_by_entry(layers, p_scale, "p_scale", "selected layers")
    return [found.get(layer.name, 1.0) for layer in layers]


def _scale(sites: list[PlannedSite], scales: list[float]) -> None:
    for site, factor in zip(sites, scales, strict=True):
        if site.constant is not None:
            continue
        if site.regularizer is not None and rate_of(site.regularizer) is None:
            raise InjectionError(f"p_scale: {site.regularizer!r} has no rate to scale.")
        site.p_scale = number(factor, f"p_scale of {site.name!r}", "inject")
        if site.p_scale < 0:
            raise ValueError(f"inject: p_scale of {site.name!r} must be at least 0, got {site.p_scale:g}.")


def _check_rate(site: PlannedSite, schedule: Schedule | None) -> None:
    """Raise if the rate at the schedule's peak is out of range, or if the schedule has no rate to drive."""
    target, declared = site.target, P if site.regularizer is None else type(site.regularizer).rate
    if target is None or declared is None:
        if schedule is None:
            return
        raise InjectionError(
            f"the schedule has no rate to drive: {site.text or 'the model'} has none of p, drop_prob, drop_rate.\n"
            "  omit schedule=, or use a regularizer with a rate."
        )
    peak = 1.0 if schedule is None else schedule(0) if schedule.peak is None else schedule.peak
    rate = target * site.p_scale * peak
    site.highest = rate if declared.kind == "drop" else 0.0
    try:
        declared.valid(rate, site.type if site.regularizer is None else site.regularizer.title)
    except ValueError as error:
        times = f" x schedule {rate / (target * site.p_scale):g}" if math.isfinite(rate) and rate else ""
        raise ValueError(f"{error}\n  at {site.name!r}: p {target:g} x p_scale {site.p_scale:g}{times}.") from None
