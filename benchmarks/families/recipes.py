"""The recipes to check: the settings to try, and what each of their sites has to mean."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

import hookdrop
from families.counts import called_in, differences
from families.depth import check_sites
from families.layers import Run, float_tensors, stacks
from families.own_dropout import check_own_dropout
from families.units import KEYS, check_heads, check_keys, check_layers, check_patches, check_tokens
from hookdrop import InjectionError, LayerError, recipes
from hookdrop.recipes import Recipe
from models import equal
from models.check import Behavior, require

Record = dict[str, Any]
Check = Callable[[nn.Module, Sequence[Run]], Record]
"""The check of a recipe that places no hooks."""
Planned = list[tuple[Run, hookdrop.Plan]]
"""The plans of a recipe, each with the forward that its sites were found in."""


@dataclass(frozen=True)
class Case:
    """The recipes to try in this order by status, and the check of their sites, which returns fields of the record."""

    recipes: dict[str, Recipe]
    check: Callable[[nn.Module, Planned], Record]
    whole: bool = False
    """Whether the recipe has to accept each part of a model."""


def run_case(case: Case | Check, model: nn.Module, runs: Sequence[Run]) -> Record:
    """Return the record of the first settings with which the recipe covers the model, else of the first settings."""
    if not isinstance(case, Case):
        return case(model, runs)
    behavior = Behavior(model, lambda: [float_tensors(run()) for run in runs], strict=True)
    tried = []
    for status, recipe in case.recipes.items():
        planned, refused = _inject(behavior, recipe, runs)
        if not planned or (refused and case.whole):
            tried.append({"status": "refused", "error": refused[0][:250]})
            continue
        record = {"status": status, "sites": sum(len(plan.sites) for _, plan in planned), **case.check(model, planned)}
        if refused:
            record["error"] = refused[0][:250]
        if others := differences(type(recipe).__name__, model, planned):
            record |= {"error": "; ".join(others[:3])[:400], "differs": len(others)}
        if "error" not in record:
            return record
        tried.append(record | {"status": "differs" if others else "partial"})
    return tried[0]


def _inject(behavior: Behavior, recipe: Recipe, runs: Sequence[Run]) -> tuple[Planned, list[str]]:
    """Inject in the module of each run, and return the plans, and the reasons of the modules that are refused."""
    planned, refused = Planned(), []
    for run in runs:
        settings: dict[str, Any] = {"p_scale": "equal", "example_input": run.inputs}
        try:
            plan = behavior.read(hookdrop.plan, run.module, recipe, **settings)
        except (LayerError, InjectionError) as error:
            refused.append(" ".join(str(error).partition("No hook was placed")[0].split()))
            continue
        if not any(site.calls for site in plan.sites):
            refused.append(f"{plan.sites[0].name} does not run with these inputs, as the plan warns")
            continue
        planned.append((run, behavior.inject(run.module, recipe, **settings)[0]))
    return planned, refused


def check_depth(model: nn.Module, planned: Planned) -> Record:
    """Check that the sites are the ends of all branches, and that a warning names all other layers."""
    blocks: dict[str, list[str]] = {}
    rows, inner, warnings = [], set(), []
    for run, plan in planned:
        prefix, facts = f"{run.name}." if run.name else "", plan.survey
        # These sites draw a mask for each row of the first axis.
        drops: list[tuple[str, Any]] = [(f"{prefix}{one.name}", one.regularizer) for one in plan.sites]
        rows += [name for name, drop in drops if getattr(drop, "mode", "") == "row" and drop.samples is None]
        inner |= {f"{prefix}{name}" for name, reason in facts.skippable.items() if reason}
        warnings += [f"{prefix}{one}" for one in equal.named(plan.warnings)]
        sites = {site.name for site in plan.sites}
        for branch in facts.branches:
            if branch.end in sites:
                blocks.setdefault(f"{prefix}{branch.layer}", []).append(f"{prefix}{branch.end}")
    every = check_sites(model, [run for run, _ in planned], blocks, rows, inner)
    called = called_in(planned)  # others are in refused parts
    problems = {name: problem for name, problem in every.items() if name in called}
    silent = {
        name: problem
        for name, problem in problems.items()
        if name not in warnings and (name in blocks or not equal.is_named(name, warnings))
    }
    require(not silent, "; ".join(f"{name}: {problem}" for name, problem in [*silent.items()][:2]))
    record: Record = {"layers": sum(len(layers) for _, layers in stacks(model))}
    if problems:
        classes = sorted({problem.split()[0] for problem in problems.values()})
        record["error"] = f"not recognized, with a warning: {', '.join(classes)}"
    return record


def _in_each(check: Callable[[Run, Any], None]) -> Callable[[nn.Module, Planned], Record]:
    """Check the sites of each run alone."""

    def check_all(model: nn.Module, planned: Planned) -> Record:
        for run, plan in planned:
            check(run, plan)
        return {}

    return check_all


CASES: dict[str, Case | Check] = {
    "stochastic_depth": Case(
        {"passed": recipes.stochastic_depth(p=0.2), "batch": recipes.stochastic_depth(p=0.2, mode="batch")},
        check_depth,
        whole=True,
    ),
    "head_dropout": Case({"passed": recipes.head_dropout(p=0.5)}, _in_each(check_heads)),
    "layer_drop": Case({"passed": recipes.layer_drop(p=0.5)}, _in_each(check_layers)),
    "drop_key": Case({"passed": recipes.drop_key(p=KEYS)}, _in_each(check_keys)),
    "residual_dropout": Case({"passed": recipes.residual_dropout(p=0.2)}, check_depth),
    "patch_dropout": Case({"passed": recipes.patch_dropout(p=0.5)}, _in_each(check_patches)),
    "set_dropout": check_own_dropout,
    "neftune": Case({"passed": recipes.neftune(alpha=5.0)}, _in_each(check_tokens)),
}
