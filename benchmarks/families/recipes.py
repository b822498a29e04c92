"""The recipes to check: the settings to try, and the checks that only one recipe has to pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from families.check import Injected, RecipeCheck
from families.depth import check_sites
from families.layers import stacks
from hookdrop import recipes
from hookdrop.recipes.base import Recipe
from hookdrop.utils.errors import InjectionError, LayerError
from models.check import require

Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """The recipes to try in this order by status, and a further check.

    The check returns fields of the record; `layers` are those that the recipe does not cover.
    """

    recipes: dict[str, Recipe]
    check: Callable[[RecipeCheck, Injected], Record] = field(default=lambda check, found: {})


def run_case(case: Case, check: RecipeCheck) -> Record:
    """Return the record of the first settings with which the recipe covers the model, else of the first settings."""
    tried = []
    for status, recipe in case.recipes.items():
        try:
            found = check.run(recipe)
        except (LayerError, InjectionError) as error:
            classes = sorted({type(layer).__name__ for _, layers in stacks(check.model) for _, layer in layers})
            tried.append({"status": "refused", "error": f"{', '.join(classes)}: {str(error).splitlines()[0]}"})
            continue
        record = {"status": status, "sites": len(found.sites), **case.check(check, found)}
        if "error" not in record:
            return record
        tried.append(record | {"status": "partial"})
    return tried[0]


def check_depth(check: RecipeCheck, injected: Injected) -> Record:
    """Check that the sites are the ends of all branches, and that a warning names all other layers.

    Raises:
        CheckFailed: a site is not the end of a branch, or no warning names a layer without sites.
    """
    rows = [name for name, drop in injected.sites.items() if drop.mode == "row" and drop.samples is None]
    found = check_sites(check.model, check.runs, injected.blocks, rows, injected.inner)
    silent = {
        name: problem
        for name, problem in found.problems.items()
        if not _is_warned(name, injected.warnings, exact=name in injected.blocks)
    }
    require(not silent, "; ".join(f"{name}: {problem}" for name, problem in [*silent.items()][:2]))
    record: Record = {"layers": found.layers, "reduces": sorted(set(found.kinds.values()))}
    if found.problems:
        classes = sorted({problem.split()[0] for problem in found.problems.values()})
        record["error"] = f"not recognized, with a warning: {', '.join(classes)}"
    return record


def _is_warned(name: str, warnings: Sequence[tuple[str, str]], exact: bool) -> bool:
    """Whether a warning names the layer, or unless `exact` one like it: a warning names only the first of many."""
    named = [f"{prefix}{one}" for prefix, text in warnings for one in re.findall(r"'([\w.]+)'", text)]
    return name in named if exact else any(f"{_pattern(one)}.".startswith(f"{_pattern(name)}.") for one in named)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


CASES = {
    "stochastic_depth": Case(
        {"passed": recipes.stochastic_depth(p=0.2), "batch": recipes.stochastic_depth(p=0.2, mode="batch")},
        check_depth,
    ),
}
