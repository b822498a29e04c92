"""Check a plan with a forward of an example, before any hook is placed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from hookdrop.core.errors import LayerError, ShapeError
from hookdrop.core.plan import Plan, PlannedSite
from hookdrop.core.registry import hooks_removed
from hookdrop.core.regularizer import at_rate
from hookdrop.core.selection import no_hooks, overrides_call
from hookdrop.core.tables import counted
from hookdrop.guards.plan import plan_warnings
from hookdrop.survey.facts import Survey, survey
from hookdrop.survey.layers import LayerCalls


def inspect_forward(plan: Plan, example: Any) -> None:
    """Run one forward on `example`, and fill in the shapes and calls of the sites, and the warnings.

    Raises:
        ShapeError: the regularizer does not support the tensor at a site.
        LayerError: a layer given by its full name is never called.
    """
    with hooks_removed(plan.model):
        found = survey(plan.model, example)
    convs = (op.inputs for op in found.trace.ops if op.name in ("conv1d", "conv2d", "conv3d"))
    is_batched = all(len(x.shape) == len(weight.shape) for x, weight, *_ in convs)
    seen = [_calls(plan, found, site) for site in plan.sites]
    shape_warnings: dict[str, list[str]] = {}
    for site, observed in zip(plan.sites, seen, strict=True):
        _inspect_site(site, observed, shape_warnings, is_batched)
        _check_samples(plan, site, found)
        if site.calls == 0 and site.name in plan.exact:
            if overrides_call(site.module):
                raise LayerError(f"{site.name or 'the model'}: {no_hooks(site.module)}")
            raise LayerError(
                f"{site.name!r} ({site.type}) is not called in the forward pass: a hook on it never fires.\n"
                "  it is unused, or only its submodules or weights are used: hook its submodules, or the next layer."
            )
    for kind, texts in shape_warnings.items():
        more = f" (and {counted(len(texts) - 1, 'more site')} like it)" if len(texts) > 1 else ""
        fact, line_break, remedy = texts[0].partition("\n")
        plan.add({kind: fact + more + line_break + remedy})
    plan.add(plan_warnings(plan, seen))


def _check_samples(plan: Plan, site: PlannedSite, found: Survey) -> None:
    """Raise if a regularizer takes each row of axis 0 for a sample, and the example has its samples elsewhere."""
    regularizer, at = site.regularizer, "output" if site.at == "output" else "input"
    assert regularizer is not None
    by_row = regularizer.axes.startswith("N ") and getattr(regularizer, "time_dim", 1) != 0
    if not by_row or regularizer.samples is not None or not site.calls:
        return
    with hooks_removed(plan.model):
        samples = None if found.batch_axis == 0 else found.samples(site.name, at)
    if isinstance(samples, str) or (samples is not None and samples.argument is not None):
        raise LayerError(
            f"{regularizer.title} at {site.name!r} takes each row of axis 0 for a sample, which is wrong: {samples}.\n"
            "  use a regularizer that needs no samples: Dropout(p=...)   if axis 0 is right: omit example_input"
        )


def _calls(plan: Plan, found: Survey, site: PlannedSite) -> LayerCalls:
    if site.at != "parameters":
        return found.calls(site.name, site.at, plan.spec.tensor)
    from hookdrop.methods.parameter_hooks import select_parameters

    chosen = select_parameters(site.module, plan.spec.tensor, site.name)
    own = {f"{site.name}.{name}".lstrip(".") for name in chosen if site.name in found.layers}
    plan.warnings += [
        f"{user} uses {name!r} outside of the calls of its layer, where it stays as it is.\n"
        "  call the layer there, or hook what comes out of that use: at='output'"
        for name, user in found.trace.elsewhere.items()
        if name in own
    ]
    shapes = [tuple(getattr(site.module, name).shape) for name in chosen]
    seen = replace(found.calls(site.name), shapes=shapes, mismatch="", tensor_count=0)
    return replace(seen, resembles_input=False, predicts="")


def _inspect_site(site: PlannedSite, seen: LayerCalls, shape_warnings: dict[str, list[str]], is_batched: bool) -> None:
    site.calls, site.shape, regularizer = seen.calls, seen.shape, site.regularizer
    assert regularizer is not None  # a rate of the model itself has no shape
    where = f"{regularizer.title} at {site.name!r}"
    try:
        if seen.mismatch:
            raise ShapeError(seen.mismatch)
        for shape in seen.shapes:
            regularizer.check(shape)
    except ShapeError as error:
        more = "" if is_batched else "\n  the example has no batch axis: pass x[None]"
        raise ShapeError(f"{where} {error}{more}") from None
    if seen.shape is None:
        return
    several = f" (1 of {seen.tensor_count} tensors)" if seen.tensor_count else ""
    at_target = regularizer if site.p_scale == 1.0 else at_rate(regularizer, site.p)
    site.reading = site.reading or at_target.reading(seen.shape) + several
    for shape in seen.shapes:
        for warning in at_target.shape_warnings(shape):
            shape_warnings.setdefault(re.sub(r"\d+", "#", warning), []).append(f"{where}: {warning}")
