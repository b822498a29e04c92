"""The recipes to check: the settings to try, and the checks that only one recipe has to pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hookdrop
from families.check import RecipeCheck
from families.depth import check_sites
from families.layers import stacks
from hookdrop import recipes
from hookdrop.errors import InjectionError, LayerError
from hookdrop.recipes.branches import blocks
from hookdrop.recipes.recipe import Recipe
from models.check import require

Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A recipe, the settings to try in this order by status, and a further check.

    The check returns fields of the record; `layers` are those that the recipe does not cover.
    """

    recipe: Recipe[...]
    settings: dict[str, dict[str, Any]]
    check: Callable[[RecipeCheck, hookdrop.Plan], Record] = field(default=lambda check, plan: {})


def run_case(case: Case, check: RecipeCheck) -> Record:
    """Return the record of the first settings with which the recipe covers the model, else of the first settings."""
    tried = []
    for status, settings in case.settings.items():
        try:
            plan = check.run(case.recipe, settings)
        except (LayerError, InjectionError) as error:
            classes = sorted({type(layer).__name__ for _, layers in stacks(check.model) for _, layer in layers})
            tried.append({"status": "refused", "error": f"{', '.join(classes)}: {str(error).splitlines()[0]}"})
            continue
        record = {"status": status, "sites": len(plan.sites), **case.check(check, plan)}
        if "error" not in record:
            return record
        tried.append(record | {"status": "partial"})
    return tried[0]


def check_depth(check: RecipeCheck, plan: hookdrop.Plan) -> Record:
    """Check that the sites are the ends of all branches, and that a warning names all other layers.

    Raises:
        CheckFailed: a site is not the end of a branch, or no warning names a layer without sites.
    """
    names = [site.name for site in plan.sites]
    found = check_sites(check.model, check.runs, names, rows="mode='batch'" not in repr(plan.sites[0].regularizer))
    recognized = {
        block.name for block, ends in blocks(check.model) if {f"{block.name}.{end}" for end in ends} & {*names}
    }
    silent = {
        name: problem
        for name, problem in found.problems.items()
        if name in recognized or not _is_warned(name, plan.warnings)
    }
    require(not silent, "; ".join(f"{name}: {problem}" for name, problem in [*silent.items()][:2]))
    record: Record = {"layers": found.layers, "reduces": sorted(set(found.kinds.values()))}
    if found.problems:
        classes = sorted({problem.split()[0] for problem in found.problems.values()})
        record["error"] = f"not recognized, with a warning: {', '.join(classes)}"
    return record


def _is_warned(name: str, warnings: Sequence[str]) -> bool:
    """Whether a warning names a list that contains the layer."""
    parts = name.split(".")
    lists = [".".join(parts[:count]) for count in range(1, len(parts))]
    return any(f"{one!r}" in warning for one in lists for warning in warnings)


CASES = {
    "stochastic_depth": Case(
        recipes.stochastic_depth,
        {"passed": {"p": 0.2, "p_scale": None}, "batch": {"p": 0.2, "p_scale": None, "mode": "batch"}},
        check_depth,
    ),
}
