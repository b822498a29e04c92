"""The plan of a recipe: its sites, with what `exclude` and `p_scale` mean for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hookdrop.core.errors import InjectionError, LayerError, StateError
from hookdrop.core.plan import Plan, PlannedSite, planned_site, rate_factors, scale
from hookdrop.core.recipe import RecipeSite
from hookdrop.core.selection import Entry, Layer, excluded_names, layers_by_name, no_hooks
from hookdrop.core.spec import InjectionSpec, check_picklable
from hookdrop.survey.siblings import sibling_warnings


def run_recipe(plan: Plan, lazy: Any, given: bool) -> list[Entry]:
    """Fill in the sites, and return the entries of `exclude` that match none of them."""
    recipe: Any = plan.spec.source
    everything, name, spec = layers_by_name(plan.model), type(recipe).__name__, plan.spec
    plan.root = root = everything[""].module
    try:
        found = [(site, site.group or site.name) for site in recipe.sites(root, lazy)]
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
    groups = recipe.groups(root, lazy, [site for site, _ in chosen])
    by_recipe = recipe.p_scale if len(groups) > 1 else None  # a model of one block has the requested rate
    wanted = by_recipe if spec.p_scale is None else spec.p_scale
    scales = [1.0] * len(groups) if wanted is None else rate_factors([everything[one] for one in groups], wanted)
    factors = dict(zip(groups, scales, strict=True))
    facts = lazy if given or lazy.found is not None else None
    plan.sites = [_recipe_site(root, everything[site.name], site, facts) for site, _ in chosen]
    if any(site.regularizer is not None for site in plan.sites):
        check_picklable(recipe, "the recipe")
    scale(plan.sites, [site.factor * factors.get(group, 1.0) for site, group in chosen])
    plan.warnings += recipe.warnings(root, lazy, [site for site, _ in found])
    if recipe.takes_all and lazy.found is not None and len(found) > 1:
        odd = sibling_warnings(lazy.found.trace, [site.name for site, _ in found], plan.warnings)
        plan.warnings += [f"{name}: {text}" for text in odd]
    plan.name, plan.counts, plan.survey = name, {name: len(plan.sites)}, lazy.found
    plan.recipe = {
        "regularizer": recipe,
        "exclude": tuple(sorted(excluded & names)),
        "p_scale": spec.p_scale if spec.p_scale is None or isinstance(spec.p_scale, str) else factors,
    }
    _check_chosen(spec, [site.name for site in plan.sites])
    return unmatched


def _recipe_site(root: nn.Module, layer: Layer, site: RecipeSite, survey: Any) -> PlannedSite:
    if site.regularizer is None:
        planned = PlannedSite(layer.name, type(layer.module).__name__, layer.module, None, "attribute", target=site.p)
        planned.kind = "attribute" if site.constant is None else "constant"
    else:
        usual = "input" if site.at == "skip" else "output"
        planned = planned_site(root, layer, site.regularizer, usual, None, survey, site.at)
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
