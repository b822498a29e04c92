"""Inspect the sites with one example forward before they are hooked."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from hookdrop.guards.plan import plan_warnings
from hookdrop.hooks.registry import hooks_removed
from hookdrop.injection.resolve import PlannedSite, Resolved
from hookdrop.regularizers import Regularizer, at_rate
from hookdrop.survey.facts import survey
from hookdrop.survey.layers import LayerCalls
from hookdrop.utils.errors import LayerError, ShapeError
from hookdrop.utils.tables import counted
from hookdrop.utils.tensor_tree import TensorKey


def inspect_forward(
    model: nn.Module, resolved: Resolved, tensor: TensorKey, example: Any
) -> tuple[set[str], list[str]]:
    """Run one forward on `example`, and fill in the shapes and calls of the sites.

    Returns:
        The kinds of shape warnings, and all warnings.

    Raises:
        ShapeError: the regularizer does not support the tensor at a site.
        LayerError: a layer given by its full name is never called.
    """
    sites = resolved.sites
    with hooks_removed(model):
        found = survey(model, example)
    seen = [found.calls(site.name, site.at, tensor) for site in sites]
    shape_warnings: dict[str, list[str]] = {}
    for site, observed in zip(sites, seen, strict=True):
        _inspect_site(site, observed, shape_warnings)
    warnings = []
    for texts in shape_warnings.values():
        more = f" (and {counted(len(texts) - 1, 'more site')} like it)" if len(texts) > 1 else ""
        fact, line_break, remedy = texts[0].partition("\n")
        warnings.append(fact + more + line_break + remedy)
    _raise_if_never_called(resolved)
    return set(shape_warnings), [*warnings, *plan_warnings(model, sites, seen)]


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
    site.reading = _at_target(site, regularizer).reading(seen.shape) + several
    for shape in seen.shapes:
        for warning in _at_target(site, regularizer).shape_warnings(shape):
            shape_warnings.setdefault(re.sub(r"\d+", "#", warning), []).append(f"{where}: {warning}")


def _at_target(site: PlannedSite, regularizer: Regularizer) -> Regularizer:
    """Return the regularizer at the target rate of its site."""
    return regularizer if site.p_scale == 1.0 else at_rate(regularizer, site.p)


def _raise_if_never_called(resolved: Resolved) -> None:
    for site in resolved.sites:
        if site.calls == 0 and site.name in resolved.exact:
            raise LayerError(
                f"{site.name!r} ({site.type}) is not called in the forward pass: a hook on it never fires.\n"
                "  it is unused, or only its submodules or weights are used: hook its submodules, or the next layer."
            )
