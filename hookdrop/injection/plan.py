"""What an injection would do, before it is done."""

from __future__ import annotations

import pickle
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hookdrop.diagnostics.watchdog import watch
from hookdrop.errors import InjectionError, nothing_placed, warn
from hookdrop.hooks import compiling
from hookdrop.hooks.hook import InputHook, SiteHook
from hookdrop.hooks.registry import hidden_modules, hooks_of
from hookdrop.hooks.skip_hook import SkipHook
from hookdrop.hooks.state import InjectionState
from hookdrop.injection.group import Injections, find
from hookdrop.injection.handle import Injection
from hookdrop.injection.inspect import inspect_forward
from hookdrop.injection.resolve import PlannedSite, Resolved
from hookdrop.regularizers import LockedDropout
from hookdrop.schedules import ConstantSchedule, Schedule
from hookdrop.utils.tables import counted, html_table, shape_text, some, text_table
from hookdrop.utils.tensor_tree import TensorKey
from hookdrop.utils.validation import one_of

_CONSTANT = ConstantSchedule()
_HEADER = ("site", "type", "shape", "read as", "calls", "p", "regularizer")


def make_plan(
    model: nn.Module,
    resolved: Resolved,
    *,
    schedule: Schedule | None = None,
    tensor: TensorKey = None,
    name: str | None = None,
    on_existing: str = "error",
    example_input: Any = None,
) -> Plan:
    """The plan of sites that are chosen, once they have been looked at; arguments as of `inject`."""
    one_of(on_existing, "on_existing", "inject", ("error", "replace", "stack"))
    sites = resolved.sites
    regularizers = [site.regularizer for site in sites if site.regularizer is not None]
    warnings = resolved.warnings + (_place_warnings(resolved.root, sites) if regularizers else [])
    warned_kinds: set[str] = set()
    if example_input is not None:
        warned_kinds, more = inspect_forward(model, resolved, tensor, example_input)
        warnings += more
    if name is None:
        name = "+".join(dict.fromkeys([regularizer.title.lower() for regularizer in regularizers]))
    elif not isinstance(name, str) or not name or "/" in name:
        raise InjectionError(f"inject: name must be a text without '/', got {name!r}.")
    counts, root = resolved.counts, resolved.root
    return Plan(model, root, name, sites, counts, warnings, schedule, tensor, on_existing, warned_kinds)


def _place_warnings(model: nn.Module, sites: list[PlannedSite]) -> list[str]:
    """What the modules themselves tell of the sites."""
    warnings = _nested(sites) if len(sites) > 1 else []
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    if encoders:
        fused = {id(part) for encoder in encoders for part in encoder.modules()}
        if not fused.isdisjoint([id(site.module) for site in sites]):
            warnings.append(
                "TransformerEncoderLayer leaves its fused eval path while a module in it is hooked: eval output agrees "
                "with the unhooked model's within rounding, not bit for bit."
            )
    for site in sites:
        layer, drop = site.module, site.regularizer
        if isinstance(layer, nn.RNNBase) and isinstance(drop, LockedDropout) and drop.time_dim % 3 != layer.batch_first:
            warnings.append(
                f"LockedDropout at {site.name!r}: an {site.type} with batch_first={layer.batch_first} works on "
                f"{'(N, T, C)' if layer.batch_first else '(T, N, C)'}, and time_dim={drop.time_dim} is not T there.\n"
                f"  write time_dim={int(layer.batch_first)}"
            )
    return warnings


def _nested(sites: list[PlannedSite]) -> list[str]:
    """Sites inside sites, with what it comes to for a value that passes all of them."""
    # What lies inside a block does not lie on its skip.
    by_name = {site.name: site for site in sites if site.at != "skip"}
    chains = []
    for name, site in by_name.items():
        parents = ["", *(name[:i] for i, character in enumerate(name) if character == ".")] if name else []
        chain = [by_name[parent] for parent in parents if parent in by_name]
        if chain:
            chains.append([*chain, site])
    if not chains:
        return []
    longest = max(chains, key=len)
    kept = 1.0
    for site in longest:
        if site.regularizer is not None and site.regularizer.drops and site.regularizer.probability:
            kept *= 1.0 - min(site.p or 0.0, 1.0)
    comes_to = f", which comes to a rate of {1 - kept:.2g} there" if kept < 1 else ""
    path = " > ".join(repr(site.name) for site in longest)
    return [
        f"{len(chains)} of {len(sites)} sites lie inside other sites: a value passes up to {len(longest)} of them "
        f"({path}){comes_to}.\n  for one level only: a pattern that ends in '.*', not '.**'."
    ]


@dataclass
class Plan:
    """The sites that `apply` would hook; `print` it. Nothing is touched before `apply`."""

    model: nn.Module = field(repr=False)
    root: nn.Module = field(repr=False)
    """The model without its wrappers."""
    name: str
    sites: list[PlannedSite]
    counts: dict[str, int]
    """How many layers each entry matched."""
    warnings: list[str]
    schedule: Schedule | None = None
    tensor: TensorKey = None
    on_existing: str = "error"
    warned_kinds: set[str] = field(default_factory=set, repr=False)
    """The kinds of doubts about shapes that are among the warnings."""

    def apply(self) -> Injection:
        """Place the hooks: all of them, or none and an error.

        Raises:
            InjectionError: a site carries an injection already (`on_existing`), the name is taken, or this runs
                inside a trace.
        """
        with nothing_placed():
            compiling.raise_if_tracing("inject()")
            self._must_be_placeable()
            replaced = self._to_replace()
            for text in self.warnings:
                warn(text)
            compiling.reset_stale_compiler()
            state = InjectionState(self.name, tuple([s.name for s in self.sites]), self.schedule or _CONSTANT)
            # What was warned about above is not to be repeated by the first forward.
            state.warned_kinds |= self.warned_kinds
            state.live.root = weakref.ref(self.root)
            hooks = self._place(state)
        for old in replaced:
            old._detach()
        watch(self.root, state)
        return Injection(self.model, state, hooks)

    def _must_be_placeable(self) -> None:
        modules = set(map(id, self.model.modules()))
        for site in self.sites:
            if site.regularizer is None:
                raise InjectionError(
                    "this plan has no regularizer: it only lists layers. plan(model, regularizer, ...)"
                )
            if site.module in hidden_modules:
                raise InjectionError(f"inside without_hooks: {site.name!r} may carry hooks that are off just now.")
            if id(site.module) not in modules:
                raise InjectionError(f"{site.name!r} was replaced since the plan was made: plan again.")

    def _place(self, state: InjectionState) -> list[SiteHook]:
        hooks = [_make_hook(site, self.tensor, state) for site in self.sites]
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
        hooks = list(hooks_of(self.model))
        if not hooks:
            return []
        wanted = {(id(site.module), site.at) for site in self.sites}
        present = find(self.model)
        in_the_way = [hook.state for module, hook in hooks if (id(module), hook.at) in wanted]
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
        sites = {site.name for site in self.sites}
        for old in replaced:
            lost = [site.name for site in old.sites if site.name not in sites]
            if lost:
                warn(
                    f"replacing {old.name!r} takes it off {counted(len(lost), 'site')} that the new one does not have: "
                    f"{some(lost)}."
                )
        if self.name in {old.name for old in present if old not in replaced}:
            raise InjectionError(
                f"this model has an injection named {self.name!r} already.\n"
                f"  give this one a name: inject(..., name={_free_name(self.name, present)!r})"
            )
        return replaced

    @property
    def at(self) -> str:
        """`"output"` or `"input"`, or `"mixed"`: each site has its own."""
        all_at = {site.at for site in self.sites}
        return all_at.pop() if len(all_at) == 1 else "mixed"

    def _rows(self) -> list[tuple[Any, ...]]:
        rows = []
        for s in self.sites:
            name = (s.name or "(the model)") + (", its skip" if s.at == "skip" else "")
            rows.append((name, s.type, shape_text(s.shape), s.reading, s.calls, s.p, s.regularizer or ""))
        return rows

    def _title(self) -> str:
        where = ", at the input" if self.at == "input" else ""
        schedule = f", {self.schedule}" if self.schedule is not None else ""
        return f"{counted(len(self.sites), 'site')} of {type(self.root).__name__}{where}{schedule}"

    def __str__(self) -> str:
        rows = self._rows()
        # Columns that only an example_input or a regularizer fills are left out where they are empty.
        used = [i for i in range(len(_HEADER)) if any(row[i] not in ("", None, "?") for row in rows)]
        table = text_table([_HEADER[i] for i in used], [[row[i] for i in used] for row in rows])
        counts = [f"{entry}: {counted(count, 'layer')}" for entry, count in self.counts.items()]
        return "\n".join([self._title(), table, *counts, *(f"warning: {text}" for text in self.warnings)])

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows(), "\n".join([self._title(), *self.warnings]))


def _make_hook(site: PlannedSite, tensor: TensorKey, state: InjectionState) -> SiteHook:
    assert site.regularizer is not None
    # It has been seen to pickle, as it must; a deep copy takes ten times as long.
    settings = site.name, pickle.loads(pickle.dumps(site.regularizer)), site.p_scale, tensor, state
    if site.at == "skip":
        return SkipHook(*settings, site.branch)
    return InputHook(*settings) if site.at == "input" else SiteHook(*settings)


def _free_name(name: str, present: Injections) -> str:
    taken = {injection.name for injection in present}
    return next(free for n in range(2, len(taken) + 3) if (free := f"{name}{n}") not in taken)
