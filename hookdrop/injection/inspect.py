"""What one forward tells of the sites before they are hooked."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from hookdrop.diagnostics.dry_run import LayerCalls, dry_run
from hookdrop.errors import LayerError, ShapeError
from hookdrop.injection.resolve import PlannedSite, Resolved
from hookdrop.regularizers import DropBlock, Dropout, DropPath, GaussianDropout
from hookdrop.utils.tables import counted, some
from hookdrop.utils.tensor_tree import TensorKey

# From here on dropout's variance shift in a following batch norm costs more than it gives (arXiv:1801.05134).
_HIGH_RATE = 0.3


def inspect_forward(
    model: nn.Module, resolved: Resolved, tensor: TensorKey, example: Any
) -> tuple[set[str], list[str]]:
    """Fill in what one forward on `example` tells of the sites.

    Returns:
        The kinds of doubts about shapes, and all warnings.

    Raises:
        ShapeError: the regularizer can't work on what a site gives.
        LayerError: a layer that is named in full is never called.
    """
    sites = resolved.sites
    seen = dry_run(model, [site.module for site in sites], example, [site.at for site in sites], tensor)
    doubts: dict[str, list[str]] = {}
    for site, what in zip(sites, seen, strict=True):
        _fill_in(site, what, doubts)
    warnings = []
    for texts in doubts.values():
        more = f" (and {counted(len(texts) - 1, 'more site')} like it)" if len(texts) > 1 else ""
        warnings.append(texts[0] + more)
    return set(doubts), [*warnings, *_never_called(resolved), *_frozen(sites), *_into_norms(sites, seen)]


def _fill_in(site: PlannedSite, seen: LayerCalls, doubts: dict[str, list[str]]) -> None:
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
    site.reading = regularizer.reading(seen.shape) + several
    if seen.resembles_input and isinstance(regularizer, DropPath):
        doubts.setdefault("block", []).append(
            f"{where}: the output still holds the input, as that of a whole residual block does; "
            "samples would lose the signal with the branch: hook the last layer of the branch (attn, mlp, bn3)."
        )
    for shape in seen.shapes:
        for doubt in regularizer.doubts(shape):
            doubts.setdefault(re.sub(r"\d+", "#", doubt), []).append(f"{where}: {doubt}")


def _never_called(resolved: Resolved) -> list[str]:
    never = [site for site in resolved.sites if site.calls == 0]
    for site in never:
        if site.name in resolved.exact:
            raise LayerError(
                f"{site.name!r} ({site.type}) is not called in a forward: a hook on it never fires.\n"
                "  its owner iterates over it or uses its weights directly: hook what is inside, or after it."
            )
    if not never:
        return []
    names = some([site.name for site in never])
    return [
        f"{counted(len(never), 'site')} never called in an eval forward, where a hook does not fire: {names}.\n"
        "  their owners iterate over them or use their weights directly, or call them in training only."
    ]


def _frozen(sites: list[PlannedSite]) -> list[str]:
    frozen = []
    for site in sites:
        trained = [parameter.requires_grad for parameter in site.module.parameters()]
        if site.regularizer is not None and trained and not any(trained):
            frozen.append(site.name)
    if not frozen:
        return []
    return [f"{counted(len(frozen), 'site')} on frozen layers, whose output is still regularized: {some(frozen)}."]


def _into_norms(sites: list[PlannedSite], seen: list[LayerCalls]) -> list[str]:
    high = [
        site.name
        for site, what in zip(sites, seen, strict=True)
        if what.feeds_norm
        and isinstance(site.regularizer, Dropout | DropBlock | GaussianDropout)
        and (site.p or 0.0) >= _HIGH_RATE
    ]
    if not high:
        return []
    return [
        f"{counted(len(high), 'site')} straight before a batch norm at p >= {_HIGH_RATE}: {some(high)}.\n"
        "  Its statistics are those of dropped activations, which eval does not have (arXiv:1801.05134): "
        "hook the norm instead."
    ]
