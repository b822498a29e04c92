"""What is wrong with an injection now, in words."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hookdrop.diagnostics.first_call import is_unchecked, shape_warnings
from hookdrop.diagnostics.rank_seeds import find_rank_with_same_seed
from hookdrop.diagnostics.training import UPDATES_TO_JUDGE, Watch, may_move, was_updated
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.registry import hooks_of
from hookdrop.hooks.state import InjectionState
from hookdrop.utils.tables import some

MOVES_TO_JUDGE = 10
"""Steps of a schedule after which every site of a training should have run."""


def problems(model: nn.Module, state: InjectionState, hooks: Sequence[SiteHook], asked: bool = False) -> dict[str, str]:
    """Each problem by its kind; empty where there is none.

    `asked` is a person's own question: then sites that have not run yet are reported earlier.
    """
    if state.removed:
        return {"removed": f"{state.name!r} was removed from its model."} if asked else {}
    found: dict[str, str] = {}
    # The copy of a part has a part of the sites.
    known = [site for site in state.sites if site in state.live.known_sites]
    lost, copies = _lost_and_copied(model, state, hooks, known)
    if lost and not state.live.hidden:
        found["lost"] = _lost_text(state, lost, len(known))
    if copies and not state.live.hidden:
        found["copied"] = _copied_text(state, copies)
    live = [hook for hook in hooks if hook.site not in (*lost, *copies)]
    trained = any(hook.trained for hook in live)
    started = trained or was_updated(state) or state.live.moves >= MOVES_TO_JUDGE
    silent = [hook.site for hook in live if not hook.called]
    if silent and (started or len(silent) < len(live) or (asked and _has_begun(state))):
        found["never called"] = _never_called_text(state, silent)
    idle = [hook.site for hook in live if hook.called and not hook.trained]
    if idle and started and state.enabled:
        found["always in eval"] = always_in_eval_text(state, idle)
    for hook in live:
        if is_unchecked(hook):
            found |= shape_warnings(hook)
    if state.enabled and (asked or started) and (ranks := find_rank_with_same_seed(model)):
        found["equal masks"] = _equal_masks_text(state, *ranks)
    return found | _not_advancing(state, trained)


def _has_begun(state: InjectionState) -> bool:
    seen: Watch | None = state.live.watch
    return state.live.moves > 0 or (seen is not None and seen.updates > 0)


def stalled(state: InjectionState) -> dict[str, str]:
    """What to say, by its kind, of a schedule that the updates of the model have left behind."""
    seen: Watch | None = state.live.watch
    if seen is None or not seen.stalled or not may_move(state):
        return {}
    if state.live.follower is not None and not state.followed:
        return {"optimizer gone": _optimizer_gone_text(state)}
    return {"undriven": _undriven_text(state)} if seen.stalled > UPDATES_TO_JUDGE else {}


def _not_advancing(state: InjectionState, trained: bool) -> dict[str, str]:
    """The same when a person asks, who need not wait for many updates."""
    if state.live.follower is not None and not state.followed and may_move(state):
        return {"optimizer gone": _optimizer_gone_text(state)}
    never_driven = state.scheduled and not state.live.driven and not state.followed
    seen: Watch | None = state.live.watch
    if trained and never_driven and may_move(state) and (state.step_count == 0 or (seen and seen.stalled)):
        return {"undriven": _undriven_text(state)}
    return stalled(state)


def _lost_and_copied(
    model: nn.Module, state: InjectionState, hooks: Sequence[SiteHook], known: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The sites that carry no hook any more, and those that carry a copy of one."""
    all_hooks = [hook for _, hook in hooks_of(model)]
    there = {hook.site for hook in all_hooks if hook.state is state}
    copies = [hook.site for hook in all_hooks if hook.state is not state and hook.state.key == state.key]
    # A handle on a part of a model does not miss what sits elsewhere.
    if not state.is_whole(model):
        own = {hook.site for hook in hooks}
        there |= {hook.site for hook in state.live.members if hook.is_attached and hook.site not in own}
    return [site for site in known if site not in there | set(copies)], copies


def discarded_text(name: str) -> str:
    """The warning for a model that went away before it was trained."""
    return (
        f"the model that {name!r} was injected into is gone, and never ran in training mode: nothing is dropped.\n"
        "  your trainer built a new model (ultralytics and FX quantization do): inject into that one, in the trainer's "
        "callback that runs before training."
    )


def always_in_eval_text(state: InjectionState, sites: Sequence[str]) -> str:
    """The warning for layers that never ran in training mode."""
    return (
        f"{state.name!r}: {some(sites)} only ran in eval mode, where nothing is dropped.\n"
        "  call model.train() before training; a layer that its owner keeps in eval (frozen batch norm) is left alone: "
        "hook another, such as the convolution before it."
    )


def _undriven_text(state: InjectionState) -> str:
    return (
        f"{state.name!r} is still at step {state.step_count} of {state.schedule}: its schedule is not advancing, "
        "because nothing calls step(), seek() or follow().\n"
        "  after inject: drop.follow(optimizer)   or after each optimizer.step(): drop.step()   "
        "or: drop.seek(global_step)"
    )


def _optimizer_gone_text(state: InjectionState) -> str:
    return (
        f"{state.name!r}: the optimizer that it followed is gone (rebuilt, or copied?), so its schedule is not "
        "advancing.\n  follow the new one: drop.follow(optimizer)"
    )


def _lost_text(state: InjectionState, lost: Sequence[str], of: int) -> str:
    return (
        f"{state.name!r}: {len(lost)} of {of} sites carry no hook any more: {some(lost)}.\n"
        "  something replaced these modules after inject (reset_classifier, convert_sync_batchnorm, ...): "
        f'inject again with on_existing="replace"{_and_go_on(state)}.'
    )


def _copied_text(state: InjectionState, copies: Sequence[str]) -> str:
    return (
        f"{state.name!r}: copies of its hooks sit on this model too, at {some(copies)}.\n"
        "  fuse_modules, peft's modules_to_save or a copied layer made them. This handle neither steps nor removes "
        f'them: use find(model) for all, or inject again with on_existing="replace"{_and_go_on(state)}.'
    )


def _never_called_text(state: InjectionState, silent: Sequence[str]) -> str:
    return (
        f"{state.name!r}: {some(silent)} never ran, so nothing is dropped there.\n"
        "  containers that are iterated and modules whose weights are used directly are never called: "
        "hook what is inside or after them."
    )


def _and_go_on(state: InjectionState) -> str:
    """What a new injection needs to continue where this one is."""
    return f", then drop.seek({state.step_count})" if state.step_count else ""


def _equal_masks_text(state: InjectionState, rank: int, other: int, seed: int) -> str:
    first, second = sorted((rank, other))
    return (
        f"{state.name!r}: ranks {first} and {second} draw equal masks, because both are seeded with {seed}.\n"
        "  on every rank, after the model is built: hookdrop.seed_per_rank()\n"
        "  if they work on the same samples (tensor parallel), equal masks are right: "
        "seed_per_rank(group=...), with the data parallel group, declares that."
    )
