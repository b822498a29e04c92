"""What an injection would do, before it is done."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hookdrop import compiling
from hookdrop.dryrun import Seen, dry_run
from hookdrop.errors import InjectionError, LayerError, ShapeError, nothing_placed, warn
from hookdrop.hooks import InputHook, SiteHook
from hookdrop.injection import Injection
from hookdrop.injections import Injections, find
from hookdrop.judge import version_of
from hookdrop.placement import hidden_modules, hooks_of
from hookdrop.regularizers import DropBlock, Dropout, DropPath, GaussianDropout
from hookdrop.resolve import PlannedSite, Resolved
from hookdrop.schedules import ConstantSchedule, Schedule
from hookdrop.state import State
from hookdrop.tables import counted, html_table, shape_text, some, text_table
from hookdrop.values import TensorKey
from hookdrop.wrappers import unwrapped

_HEADER = ("site", "type", "shape", "read as", "calls", "p", "regularizer")

# From here on dropout's variance shift in a following batch norm costs more than it gives (arXiv:1801.05134).
_HIGH_RATE = 0.3


@dataclass
class Plan:
    """The sites that `apply` would hook; `print` it. Nothing is touched before `apply`."""

    model: nn.Module = field(repr=False)
    name: str
    sites: list[PlannedSite]
    counts: dict[str, int]
    """How many layers each entry matched."""
    warnings: list[str]
    schedule: Schedule | None = None
    at: str = "output"
    tensor: TensorKey = None
    on_existing: str = "error"
    told: set[str] = field(default_factory=set, repr=False)

    def apply(self) -> Injection:
        """Place the hooks: all of them, or none and an error.

        Raises:
            InjectionError: a site carries an injection already (`on_existing`), the name is taken, or this runs
                inside a trace.
        """
        with nothing_placed():
            compiling.not_while_tracing("inject()")
            if any(site.regularizer is None for site in self.sites):
                raise InjectionError(
                    "this plan has no regularizer: it only lists layers. plan(model, regularizer, ...)"
                )
            self._must_be_placeable()
            replaced = self._to_replace()
            for text in self.warnings:
                warn(text)
            compiling.warn_of_recompile()
            state = State(self.name, tuple(site.name for site in self.sites), self.schedule or ConstantSchedule())
            # What was warned of above is not to be told by the first forward again.
            state.told |= self.told
            state.version = version_of(self.model)
            hooks = self._place(state)
        for old in replaced:
            old._detach()
        compiling.reset()
        return Injection(self.model, state, hooks)

    def _must_be_placeable(self) -> None:
        modules = {id(module) for module in self.model.modules()}
        for site in self.sites:
            if site.module in hidden_modules:
                raise InjectionError(f"inside without_hooks: {site.name!r} may carry hooks that are off just now.")
            if id(site.module) not in modules:
                raise InjectionError(f"{site.name!r} was replaced since the plan was made: plan again.")

    def _place(self, state: State) -> list[SiteHook]:
        kind = InputHook if self.at == "input" else SiteHook
        hooks: list[SiteHook] = []
        for site in self.sites:
            assert site.regularizer is not None
            hooks.append(kind(site.name, copy.deepcopy(site.regularizer), site.p_scale, self.tensor, state))
        try:
            for site, hook in zip(self.sites, hooks, strict=True):
                hook.place(site.module)
        except BaseException:
            for hook in hooks:
                hook.remove()
            raise
        return hooks

    def _to_replace(self) -> list[Injection]:
        """The injections that give way to this one."""
        wanted = {id(site.module) for site in self.sites}
        present = find(self.model)
        in_the_way = [hook.state for m, hook in hooks_of(self.model) if id(m) in wanted and hook.at == self.at]
        if in_the_way and self.on_existing == "error":
            carry = f"{counted(len(in_the_way), 'site')} already carr{'ies' if len(in_the_way) == 1 else 'y'}"
            names = ", ".join(sorted({repr(state.name) for state in in_the_way}))
            raise InjectionError(
                f"{carry} {names} (a re-run cell?).\n"
                '  replace them: inject(..., on_existing="replace")   '
                f'keep both: on_existing="stack", name="{_free_name(self.name, present)}"'
            )
        replaced = []
        if self.on_existing == "replace":
            replaced = [old for old in present if old._state in in_the_way or old.name == self.name]
            self._warn_of_lost(replaced)
        if self.name in {old.name for old in present if old not in replaced}:
            raise InjectionError(
                f"this model has an injection named {self.name!r} already.\n"
                f"  give this one a name: inject(..., name={_free_name(self.name, present)!r})"
            )
        return replaced

    def _warn_of_lost(self, replaced: list[Injection]) -> None:
        sites = {site.name for site in self.sites}
        for old in replaced:
            lost = [site.name for site in old.sites if site.name not in sites]
            if lost:
                warn(
                    f"replacing {old.name!r} takes it off {counted(len(lost), 'site')} that the new one does not have: "
                    f"{some(lost)}."
                )

    def _rows(self) -> list[tuple[Any, ...]]:
        return [
            (
                s.name or "(the model)",
                s.type,
                shape_text(s.shape),
                s.reading,
                s.calls,
                s.p,
                s.regularizer or "",
            )
            for s in self.sites
        ]

    def _title(self) -> str:
        where = "" if self.at == "output" else ", at the input"
        schedule = f", {self.schedule}" if self.schedule is not None else ""
        return f"{counted(len(self.sites), 'site')} of {type(unwrapped(self.model)).__name__}{where}{schedule}"

    def __str__(self) -> str:
        rows = self._rows()
        # Columns that only an example_input or a regularizer fills are left out where they are empty.
        used = [i for i in range(len(_HEADER)) if any(row[i] not in ("", None, "?") for row in rows)]
        table = text_table([_HEADER[i] for i in used], [[row[i] for i in used] for row in rows])
        counts = [f"{entry}: {counted(count, 'layer')}" for entry, count in self.counts.items()]
        return "\n".join([self._title(), table, *counts, *(f"warning: {text}" for text in self.warnings)])

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows(), "\n".join([self._title(), *self.warnings]))


def inspect_sites(model: nn.Module, resolved: Resolved, at: str, tensor: TensorKey, example: Any) -> None:
    """Add to `resolved` what the modules themselves and an example forward tell.

    Raises:
        ShapeError: the regularizer can't work on what a site gives.
        LayerError: a layer that is named in full is never called.
    """
    resolved.warnings += [*_nested(resolved.sites), *_fused(model, resolved.sites)]
    if example is None:
        return
    seen = dry_run(model, [site.module for site in resolved.sites], example, at, tensor)
    doubts: dict[str, list[str]] = {}
    for site, what in zip(resolved.sites, seen, strict=True):
        _fill_in(site, what, doubts)
    resolved.told |= set(doubts)
    for texts in doubts.values():
        more = f" (and {counted(len(texts) - 1, 'more site')} like it)" if len(texts) > 1 else ""
        resolved.warnings.append(texts[0] + more)
    resolved.warnings += [
        *_never_called(resolved),
        *_frozen(resolved.sites),
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
    by_name = {site.name: site for site in sites}
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
        kept *= 1.0 - min(site.p or 0.0, 1.0)
    comes_to = f", which comes to a rate of {1 - kept:.2g} there" if 1 - kept > 0 else ""
    path = " > ".join(repr(site.name) for site in longest)
    return [
        f"{len(chains)} of {len(sites)} sites lie inside other sites: a value passes up to {len(longest)} of them "
        f"({path}){comes_to}.\n  for one level only: a pattern that ends in '.*', not '.**'."
    ]


def _fused(model: nn.Module, sites: list[PlannedSite]) -> list[str]:
    inside = {
        id(m) for layer in model.modules() if isinstance(layer, nn.TransformerEncoderLayer) for m in layer.modules()
    }
    if not any(id(site.module) in inside for site in sites):
        return []
    return [
        "TransformerEncoderLayer leaves its fused eval path while a module in it is hooked: eval output agrees with "
        "the unhooked model's within rounding, not bit for bit."
    ]


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


def _free_name(name: str, present: Injections) -> str:
    taken = {injection.name for injection in present}
    return next(free for n in range(2, len(taken) + 3) if (free := f"{name}{n}") not in taken)
