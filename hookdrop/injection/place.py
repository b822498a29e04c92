"""Place the sites of a plan, all or none."""

from __future__ import annotations

import pickle
import weakref

from torch import nn

from hookdrop.guards.progress import watch
from hookdrop.hooks import compiling
from hookdrop.hooks.branch_hooks import SkipHook, SubsetHook
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.registry import hidden_modules
from hookdrop.hooks.state import InjectionState
from hookdrop.injection import rates
from hookdrop.injection.handle import Injection, find
from hookdrop.injection.plan import Plan, PlannedSite
from hookdrop.injection.sinks import AttributeSink, RateSink, sinks_of
from hookdrop.schedules import ConstantSchedule
from hookdrop.utils.errors import InjectionError, warn
from hookdrop.utils.tables import counted, some
from hookdrop.utils.tensor_tree import TensorKey

_CONSTANT = ConstantSchedule()


def place(plan: Plan) -> Injection:
    """Place all sites, or raise an error and place none.

    Raises:
        InjectionError: a site already has an injection (see `on_existing`), the name is taken, or the code is being
            traced.
    """
    for site in plan.sites:
        if site.module in hidden_modules:
            raise InjectionError(f"inside without_hooks: {site.name!r} may have temporarily removed hooks.")
    replaced = _injections_to_replace(plan)
    for text in plan.warnings:
        warn(text)
    compiling.reset_stale_compiler()
    state = InjectionState(plan.name, tuple([s.label for s in plan.sites]), plan.schedule or _CONSTANT)
    state.portable, state.recipe = plan.spec.portable, plan.recipe
    # The first forward must not repeat the warnings above.
    state.warned_kinds |= plan.warned_kinds
    state.live.root = weakref.ref(plan.root)
    sinks = _place(plan, state)
    going = [state for old in replaced for state in old._states]
    for sink in sinks:
        if isinstance(sink, AttributeSink):
            sink.take_over(going)
    for old in replaced:
        old._detach()
    if isinstance(sinks[0], SiteHook) or state.scheduled:
        state.live.trained = isinstance(sinks[0], AttributeSink)  # without hooks, nothing notes the calls
        watch(plan.root, state)
    return Injection(plan.model, [state], sinks)


def _place(plan: Plan, state: InjectionState) -> list[RateSink]:
    placed: list[RateSink] = []
    try:
        for site in plan.sites:
            placed.append(_sink(site, plan.spec.tensor, state))
        for sink, site in zip(placed, plan.sites, strict=True):
            if isinstance(sink, SiteHook):
                sink.place(site.module)
        if isinstance(placed[0], AttributeSink):
            rates.update_rates([state])
    except BaseException:
        for sink in placed:
            sink.remove()
        raise
    return placed


def _sink(site: PlannedSite, tensor: TensorKey, state: InjectionState) -> RateSink:
    if site.regularizer is None:
        assert site.target is not None
        return AttributeSink(site.label, site.module, site.attribute, site.target, site.p_scale, state)
    # `resolve` checked that it can be pickled, and a deep copy takes ten times as long.
    settings = site.name, pickle.loads(pickle.dumps(site.regularizer)), site.p_scale, tensor, state
    if site.at == "skip":
        return SkipHook(*settings, site.branch)
    if "rows" in site.regularizer.needs:
        return SubsetHook(*settings, "input")
    return SiteHook(*settings, site.at)


def _injections_to_replace(plan: Plan) -> list[Injection]:
    """Return the injections that this one replaces.

    Raises:
        InjectionError: the sites or the name are taken.
    """
    present = list(sinks_of(plan.model))
    if not present:
        return []
    wanted = {_place_of(site.module, site) for site in plan.sites}
    conflicts = [sink.state for module, sink in present if _place_of(module, sink) in wanted]
    if conflicts and plan.spec.on_existing == "error":
        carry = f"{counted(len(conflicts), 'site')} already carr{'ies' if len(conflicts) == 1 else 'y'}"
        names = ", ".join(sorted({repr(state.name) for state in conflicts}))
        raise InjectionError(
            f"{carry} {names} (a re-run cell?).\n"
            '  replace them: inject(..., on_existing="replace")   '
            f'keep both: on_existing="stack", name="{_free_name(plan)}"'
        )
    found = find(plan.model)
    replaced = []
    if plan.spec.on_existing == "replace":
        states = dict.fromkeys(sink.state for _, sink in present)
        replaced = [found._only([old]) for old in states if old in conflicts or old.name == plan.name]
    sites = {site.label for site in plan.sites}
    for old in replaced:
        lost = [site.name for site in old.sites if site.name not in sites]
        if lost:
            warn(
                f"replacing {old.name!r} removes it from {counted(len(lost), 'site')} that the new injection does "
                f"not have: {some(lost)}."
            )
    going = {state for old in replaced for state in old._states}
    if any(sink.state.name == plan.name and sink.state not in going for _, sink in present):
        raise InjectionError(
            f"this model already has an injection named {plan.name!r}.\n"
            f"  choose another name: inject(..., name={_free_name(plan)!r})"
        )
    return replaced


def _place_of(module: nn.Module, what: PlannedSite | RateSink) -> tuple[int, str, str]:
    return id(module), what.at, getattr(what, "attribute", "")


def _free_name(plan: Plan) -> str:
    taken = find(plan.model)
    return next(free for n in range(2, len(taken) + 3) if (free := f"{plan.name}{n}") not in taken)
