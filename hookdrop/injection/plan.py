"""Plans show what an injection will do before any hook is placed."""

from __future__ import annotations

import pickle
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hookdrop.errors import InjectionError, nothing_placed, warn
from hookdrop.guards.plan import plan_warnings
from hookdrop.guards.progress import watch
from hookdrop.hooks import compiling
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.registry import hidden_modules, hooks_of
from hookdrop.hooks.skip_hook import SkipHook
from hookdrop.hooks.state import InjectionState
from hookdrop.hooks.subset_hook import SubsetHook
from hookdrop.injection.group import Injections, find
from hookdrop.injection.handle import Injection
from hookdrop.injection.inspect import inspect_forward
from hookdrop.injection.resolve import PlannedSite, Resolved
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
    tensor: TensorKey = None,
    name: str | None = None,
    on_existing: str = "error",
    portable: bool = False,
    example_input: Any = None,
) -> Plan:
    """Check the resolved sites and make their plan; the arguments are those of `inject`."""
    one_of(on_existing, "on_existing", "inject", ("error", "replace", "stack"))
    one_of(portable, "portable", "inject", (True, False))
    sites = resolved.sites
    regularizers = [site.regularizer for site in sites if site.regularizer is not None]
    warnings = resolved.warnings + (plan_warnings(resolved.root, sites) if regularizers else [])
    warned_kinds: set[str] = set()
    if example_input is not None:
        warned_kinds, more = inspect_forward(model, resolved, tensor, example_input)
        warnings += more
    if name is None:
        name = "_".join(dict.fromkeys([regularizer.title.lower() for regularizer in regularizers]))
    elif not isinstance(name, str) or not name or "/" in name:
        raise InjectionError(f"inject: name must be a non-empty string without '/', got {name!r}.")
    schedules = {"schedule": resolved.schedule, "requested_schedule": resolved.requested_schedule}
    return Plan(
        model,
        resolved.root,
        name,
        sites,
        resolved.counts,
        warnings,
        tensor=tensor,
        on_existing=on_existing,
        portable=portable,
        warned_kinds=warned_kinds,
        **schedules,
    )


@dataclass
class Plan:
    """The sites that `apply` will hook; `print` shows a table. The model does not change before `apply`."""

    model: nn.Module = field(repr=False)
    root: nn.Module = field(repr=False)
    """The model without its wrappers."""
    name: str
    sites: list[PlannedSite]
    counts: dict[str, int]
    """Number of layers that each entry matched."""
    warnings: list[str]
    schedule: Schedule | None = None
    """In optimizer steps."""
    requested_schedule: Schedule | None = None
    """As requested, possibly in fractions of the training."""
    tensor: TensorKey = None
    on_existing: str = "error"
    portable: bool = False
    warned_kinds: set[str] = field(default_factory=set, repr=False)
    """The kinds of shape warnings that `warnings` contains."""

    def apply(self) -> Injection:
        """Place all hooks, or raise an error and place none.

        Raises:
            InjectionError: a site already has an injection (see `on_existing`), the name is taken, or the code is
                being traced.
        """
        with nothing_placed():
            compiling.raise_if_tracing("inject()")
            self._check_placeable()
            replaced = self._injections_to_replace()
            for text in self.warnings:
                warn(text)
            compiling.reset_stale_compiler()
            state = InjectionState(self.name, tuple([s.name for s in self.sites]), self.schedule or _CONSTANT)
            state.portable = self.portable
            # The first forward must not repeat the warnings above.
            state.warned_kinds |= self.warned_kinds
            state.live.root = weakref.ref(self.root)
            hooks = self._place(state)
        for old in replaced:
            old._detach()
        watch(self.root, state)
        return Injection(self.model, state, hooks)

    def _check_placeable(self) -> None:
        modules = set(map(id, self.model.modules()))
        for site in self.sites:
            if site.regularizer is None:
                raise InjectionError(
                    "this plan has no regularizer: it only lists layers.\n  write: plan(model, regularizer, ...)"
                )
            if site.module in hidden_modules:
                raise InjectionError(f"inside without_hooks: {site.name!r} may have temporarily removed hooks.")
            if id(site.module) not in modules:
                raise InjectionError(f"{site.name!r} was replaced after the plan was made: call plan() again.")

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

    def _injections_to_replace(self) -> list[Injection]:
        """Return the injections that this one replaces."""
        hooks = list(hooks_of(self.model))
        if not hooks:
            return []
        places = {(id(site.module), site.at) for site in self.sites}
        present = find(self.model)
        conflicts = [hook.state for module, hook in hooks if (id(module), hook.at) in places]
        if conflicts and self.on_existing == "error":
            carry = f"{counted(len(conflicts), 'site')} already carr{'ies' if len(conflicts) == 1 else 'y'}"
            names = ", ".join(sorted({repr(state.name) for state in conflicts}))
            raise InjectionError(
                f"{carry} {names} (a re-run cell?).\n"
                '  replace them: inject(..., on_existing="replace")   '
                f'keep both: on_existing="stack", name="{_free_name(self.name, present)}"'
            )
        replaced = []
        if self.on_existing == "replace":
            replaced = [old for old in present if old._state in conflicts or old.name == self.name]
        sites = {site.name for site in self.sites}
        for old in replaced:
            lost = [site.name for site in old.sites if site.name not in sites]
            if lost:
                warn(
                    f"replacing {old.name!r} removes it from {counted(len(lost), 'site')} that the new injection does "
                    f"not have: {some(lost)}."
                )
        if self.name in {old.name for old in present if old not in replaced}:
            raise InjectionError(
                f"this model already has an injection named {self.name!r}.\n"
                f"  choose another name: inject(..., name={_free_name(self.name, present)!r})"
            )
        return replaced

    @property
    def at(self) -> str:
        """`"output"`, `"input"` or `"skip"`, or `"mixed"` if the sites differ."""
        all_at = {site.at for site in self.sites}
        return all_at.pop() if len(all_at) == 1 else "mixed"

    def _rows(self) -> list[tuple[Any, ...]]:
        rows = []
        for s in self.sites:
            name = (s.name or "(the model)") + (" (skip)" if s.at == "skip" else "")
            rows.append((name, s.type, shape_text(s.shape), s.reading, s.calls, s.p, s.regularizer or ""))
        return rows

    def _title(self) -> str:
        where = ", at the input" if self.at == "input" else ""
        schedule = "" if self.schedule is None else f", {self.schedule}"
        if self.requested_schedule is not None and self.requested_schedule.is_relative:
            schedule = f", {self.requested_schedule} = {self.schedule}"
        return f"{counted(len(self.sites), 'site')} of {type(self.root).__name__}{where}{schedule}"

    def __str__(self) -> str:
        rows = self._rows()
        # Omit empty columns: some are filled only with an example_input or a regularizer.
        used = [i for i in range(len(_HEADER)) if any(row[i] not in ("", None, "?") for row in rows)]
        table = text_table([_HEADER[i] for i in used], [[row[i] for i in used] for row in rows])
        counts = [f"{entry}: {counted(count, 'layer')}" for entry, count in self.counts.items()]
        return "\n".join([self._title(), table, *counts, *(f"warning: {text}" for text in self.warnings)])

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows(), "\n".join([self._title(), *self.warnings]))


def _make_hook(site: PlannedSite, tensor: TensorKey, state: InjectionState) -> SiteHook:
    assert site.regularizer is not None
    # `resolve` checked that it can be pickled, and a deep copy takes ten times as long.
    settings = site.name, pickle.loads(pickle.dumps(site.regularizer)), site.p_scale, tensor, state
    if site.at == "skip":
        return SkipHook(*settings, site.branch)
    if "rows" in site.regularizer.needs:
        return SubsetHook(*settings)
    return SiteHook(*settings, site.at)


def _free_name(name: str, present: Injections) -> str:
    taken = {injection.name for injection in present}
    return next(free for n in range(2, len(taken) + 3) if (free := f"{name}{n}") not in taken)
