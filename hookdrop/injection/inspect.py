"""Inspect the sites with one example forward before they are hooked."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from hookdrop.diagnostics.dry_run import LayerCalls, dry_run
from hookdrop.errors import LayerError, ShapeError
from hookdrop.injection.resolve import PlannedSite, Resolved
from hookdrop.regularizers import (
    DropBlock,
    Dropout,
    DropPath,
    GaussianDropout,
    Regularizer,
    ShakeDrop,
    at_rate,
    drops_elements,
)
from hookdrop.utils.tables import counted, some
from hookdrop.utils.tensor_tree import TensorKey

# From this rate on, dropout's variance shift in a following batch norm outweighs its benefit (arXiv:1801.05134).
_HIGH_RATE = 0.3


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
    seen = dry_run(model, [site.module for site in sites], example, [site.at for site in sites], tensor)
    shape_warnings: dict[str, list[str]] = {}
    for site, observed in zip(sites, seen, strict=True):
        _inspect_site(site, observed, shape_warnings)
    warnings = []
    for texts in shape_warnings.values():
        more = f" (and {counted(len(texts) - 1, 'more site')} like it)" if len(texts) > 1 else ""
        fact, line_break, remedy = texts[0].partition("\n")
        warnings.append(fact + more + line_break + remedy)
    warnings += [*_never_called_warnings(resolved), *_frozen_warnings(sites), *_batch_norm_warnings(sites, seen)]
    return set(shape_warnings), warnings


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
    if seen.resembles_input and isinstance(regularizer, DropPath | ShakeDrop):
        does = "drops" if drops_elements(regularizer) else "perturbs"
        shape_warnings.setdefault("block", []).append(
            f"{where}: the output includes the input (a whole residual block?), so {regularizer.title} also {does} the "
            "skip connection: hook the last layer of the branch, such as attn, mlp or bn3."
        )
    for shape in seen.shapes:
        for warning in _at_target(site, regularizer).shape_warnings(shape):
            shape_warnings.setdefault(re.sub(r"\d+", "#", warning), []).append(f"{where}: {warning}")


def _at_target(site: PlannedSite, regularizer: Regularizer) -> Regularizer:
    """Return the regularizer at the target rate of its site."""
    return regularizer if site.p_scale == 1.0 else at_rate(regularizer, site.p)


def _never_called_warnings(resolved: Resolved) -> list[str]:
    never = [site for site in resolved.sites if site.calls == 0]
    for site in never:
        if site.name in resolved.exact:
            raise LayerError(
                f"{site.name!r} ({site.type}) is not called in the forward pass: a hook on it never fires.\n"
                "  it is unused, or only its submodules or weights are used: hook its submodules, or the next layer."
            )
    if not never:
        return []
    names = some([site.name for site in never])
    return [
        f"{counted(len(never), 'site')} never called in an eval forward, so the hooks there do not fire: {names}.\n"
        "  their parents iterate over them, use their weights directly, or call them only in training."
    ]


def _frozen_warnings(sites: list[PlannedSite]) -> list[str]:
    frozen = []
    for site in sites:
        trained = [parameter.requires_grad for parameter in site.module.parameters()]
        if site.regularizer is not None and trained and not any(trained):
            frozen.append(site.name)
    if not frozen:
        return []
    return [f"{counted(len(frozen), 'site')} on frozen layers, whose output is still regularized: {some(frozen)}."]


def _batch_norm_warnings(sites: list[PlannedSite], seen: list[LayerCalls]) -> list[str]:
    high = [
        site.name
        for site, observed in zip(sites, seen, strict=True)
        if observed.feeds_norm
        and isinstance(site.regularizer, Dropout | DropBlock | GaussianDropout)
        and (site.p or 0.0) >= _HIGH_RATE
    ]
    if not high:
        return []
    return [
        f"{counted(len(high), 'site')} directly before a batch norm at p >= {_HIGH_RATE}: {some(high)}.\n"
        "  its running statistics would be those of dropped activations, which eval does not have (arXiv:1801.05134): "
        "hook the norm instead."
    ]
