"""Inspect the sites with one example forward before they are hooked."""

from __future__ import annotations

import re
from typing import Any

from hookdrop.guards.plan import plan_warnings
from hookdrop.hooks.registry import hooks_removed
from hookdrop.injection.plan import Plan, PlannedSite
from hookdrop.regularizers import at_rate
from hookdrop.survey import survey
from hookdrop.survey.calls import LayerCalls
from hookdrop.utils.errors import LayerError, ShapeError
from hookdrop.utils.tables import counted


def inspect_forward(plan: Plan, example: Any) -> None:
    """Run one forward on `example`, and fill in the shapes and calls of the sites, and the warnings.

    Raises:
        ShapeError: the regularizer does not support the tensor at a site.
        LayerError: a layer given by its full name is never called.
    """
    with hooks_removed(plan.model):
        found = survey(plan.model, example)
    seen = [found.calls(site.name, site.at, plan.spec.tensor) for site in plan.sites]
    shape_warnings: dict[str, list[str]] = {}
    for site, observed in zip(plan.sites, seen, strict=True):
        _inspect_site(site, observed, shape_warnings)
        if site.calls == 0 and site.name in plan.exact:
            raise LayerError(
                f"{site.name!r} ({site.type}) is not called in the forward pass: a hook on it never fires.\n"
                "  it is unused, or only its submodules or weights are used: hook its submodules, or the next layer."
            )
    for texts in shape_warnings.values():
        more = f" (and {counted(len(texts) - 1, 'more site')} like it)" if len(texts) > 1 else ""
        fact, line_break, remedy = texts[0].partition("\n")
        plan.warnings.append(fact + more + line_break + remedy)
    plan.warned_kinds = set(shape_warnings)
    plan.warnings += plan_warnings(plan.model, plan.sites, seen)


def _inspect_site(site: PlannedSite, seen: LayerCalls, shape_warnings: dict[str, list[str]]) -> None:
    site.calls, site.shape, regularizer = seen.calls, seen.shape, site.regularizer
    if regularizer is None:
        return
    where = f"{regularizer.title} at {site.name!r}"
    try:
        if seen.mismatch:
            raise ShapeError(seen.mismatch)
        for shape in seen.shapes:
            regularizer.check(shape)
    except ShapeError as error:
        raise ShapeError(f"{where} {error}") from None
    if seen.shape is None:
        return
    several = f" (1 of {seen.tensor_count} tensors)" if seen.tensor_count else ""
    at_target = regularizer if site.p_scale == 1.0 else at_rate(regularizer, site.p)
    site.reading = at_target.reading(seen.shape) + several
    for shape in seen.shapes:
        for warning in at_target.shape_warnings(shape):
            shape_warnings.setdefault(re.sub(r"\d+", "#", warning), []).append(f"{where}: {warning}")
