"""What the modules themselves, and one forward, tell of the sites before they are hooked."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from hookdrop.diagnostics.dry_run import Seen, dry_run
from hookdrop.errors import LayerError, ShapeError
from hookdrop.injection.resolve import PlannedSite, Resolved
from hookdrop.regularizers import DropBlock, Dropout, DropPath, GaussianDropout, LockedDropout
from hookdrop.utils.tables import counted, some
from hookdrop.utils.tensor_tree import TensorKey

# From here on dropout's variance shift in a following batch norm costs more than it gives (arXiv:1801.05134).
_HIGH_RATE = 0.3


def inspect_sites(model: nn.Module, resolved: Resolved, tensor: TensorKey, example: Any) -> None:
    """Add to `resolved` what the modules themselves and an example forward tell.

    Raises:
        ShapeError: the regularizer can't work on what a site gives.
        LayerError: a layer that is named in full is never called.
    """
    hooked = [site for site in resolved.sites if site.regularizer is not None]  # none, if layers are only listed
    resolved.warnings += [*_nested(hooked), *_fused(model, hooked), *_sequences(hooked)]
    if example is None:
        return
    modules, at = [site.module for site in resolved.sites], [site.at for site in resolved.sites]
    seen = dry_run(model, modules, example, at, tensor)
    doubts: dict[str, list[str]] = {}
    for site, what in zip(resolved.sites, seen, strict=True):
        _fill_in(site, what, doubts)
    resolved.told |= set(doubts)
    for texts in doubts.values():
        more = f" (and {counted(len(texts) - 1, 'more site')} like it)" if len(texts) > 1 else ""
        resolved.warnings.append(texts[0] + more)
    resolved.warnings += [
        *_never_called(resolved),
        *_frozen(hooked),
        *_into_norms(resolved.sites, seen),
    ]


def _fill_in(site: PlannedSite, seen: Seen, doubts: dict[str, list[str]]) -> None:
    site.calls = seen.calls
    title = "a hook" if site.regularizer is None else site.regularizer.title
    if seen.misfit and site.regularizer is not None:
        raise ShapeError(f"{title} at {site.name!r} {seen.misfit}")
    site.shape = seen.shape
    if site.regularizer is None or seen.shape is None:
        return
    site.reading = _reading(site, seen) + (f" (1 of {seen.of_several} tensors)" if seen.of_several else "")
    if seen.keeps_input and isinstance(site.regularizer, DropPath):
        doubts.setdefault("block", []).append(
            f"DropPath at {site.name!r}: the output still holds the input, as that of a whole residual block does; "
            "samples would lose the signal with the branch: hook the last layer of the branch (attn, mlp, bn3)."
        )
    for shape in seen.shapes:
        for doubt in site.regularizer.doubts(shape):
            doubts.setdefault(re.sub(r"\d+", "#", doubt), []).append(f"{title} at {site.name!r}: {doubt}")


def _reading(site: PlannedSite, seen: Seen) -> str:
    assert site.regularizer is not None
    try:
        for shape in seen.shapes:
            site.regularizer.check(shape)
    except ShapeError as error:
        raise ShapeError(f"{site.regularizer.title} at {site.name!r} {error}") from None
    return site.regularizer.reading(seen.shapes[-1])


def _nested(sites: list[PlannedSite]) -> list[str]:
    """Sites inside sites, with what it comes to for a value that passes all of them."""
    if len(sites) < 2:
        return []
    # What lies inside a block does not lie on its skip.
    by_name = {site.name: site for site in sites if site.at != "skip"}
    chains = []
    for name in by_name:
        parents = [name[:i] for i, c in enumerate(name) if c == "."] + ([""] if name else [])
        chain = [by_name[parent] for parent in sorted(parents) if parent in by_name]
        if chain:
            chains.append([*chain, by_name[name]])
    if not chains:
        return []
    longest = max(chains, key=len)
    kept = 1.0
    for site in longest:
        drops = site.regularizer is not None and site.regularizer.drops and site.regularizer.probability
        kept *= 1.0 - min(site.p or 0.0, 1.0) if drops else 1.0
    comes_to = f", which comes to a rate of {1 - kept:.2g} there" if 1 - kept > 0 else ""
    path = " > ".join(repr(site.name) for site in longest)
    return [
        f"{len(chains)} of {len(sites)} sites lie inside other sites: a value passes up to {len(longest)} of them "
        f"({path}){comes_to}.\n  for one level only: a pattern that ends in '.*', not '.**'."
    ]


def _fused(model: nn.Module, sites: list[PlannedSite]) -> list[str]:
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    if not encoders:
        return []
    inside = {id(part) for encoder in encoders for part in encoder.modules()}
    if not any(id(site.module) in inside for site in sites):
        return []
    return [
        "TransformerEncoderLayer leaves its fused eval path while a module in it is hooked: eval output agrees with "
        "the unhooked model's within rounding, not bit for bit."
    ]


def _sequences(sites: list[PlannedSite]) -> list[str]:
    """Recurrent layers whose axis of time is another than the regularizer's."""
    found = []
    for site in sites:
        if isinstance(site.module, nn.RNNBase) and isinstance(site.regularizer, LockedDropout):
            batch_first = site.module.batch_first
            if site.regularizer.time_dim % 3 != int(batch_first):
                shape = "(N, T, C)" if batch_first else "(T, N, C)"
                found.append(
                    f"LockedDropout at {site.name!r}: an {site.type} with batch_first={batch_first} works on {shape}, "
                    f"and time_dim={site.regularizer.time_dim} is not T there.\n  write time_dim={int(batch_first)}"
                )
    return found


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
        parameters = list(site.module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            frozen.append(site.name)
    if not frozen:
        return []
    return [f"{counted(len(frozen), 'site')} on frozen layers, whose output is still regularized: {some(frozen)}."]


def _into_norms(sites: list[PlannedSite], seen: list[Seen]) -> list[str]:
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
