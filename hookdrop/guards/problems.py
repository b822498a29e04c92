"""Find problems of an injection and describe them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hookdrop.guards.first_call import is_unchecked, shape_warnings
from hookdrop.guards.ranks import find_rank_with_same_seed
from hookdrop.guards.updates import UPDATES_BEFORE_WARNING, UpdateCounter, schedule_can_advance, was_updated
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.registry import hooks_of
from hookdrop.hooks.state import InjectionState
from hookdrop.utils.tables import some

STEPS_BEFORE_WARNING = 10
"""Schedule steps after which every site should have run."""


def find_problems(
    model: nn.Module, state: InjectionState, hooks: Sequence[SiteHook], requested: bool = False
) -> dict[str, str]:
    """Return the text of each problem by its kind.

    If the user `requested` the check, sites that have not run yet are reported earlier.
    """
    if state.removed:
        return {"removed": f"{state.name!r} was removed from its model."} if requested else {}
    found: dict[str, str] = {}
    # A copy of a submodule has only some of the sites.
    known = [site for site in state.sites if site in state.live.known_sites]
    lost, copies = _lost_and_copied(model, state, hooks, known)
    if lost and not state.live.hidden_count:
        found["lost"] = _lost_text(state, lost, len(known))
    if copies and not state.live.hidden_count:
        found["copied"] = _copied_text(state, copies)
    live = [hook for hook in hooks if hook.site not in (*lost, *copies)]
    trained = any(hook.trained for hook in live)
    started = trained or was_updated(state) or state.live.moves >= STEPS_BEFORE_WARNING
    silent = [hook.site for hook in live if not hook.called]
    if silent and (started or len(silent) < len(live) or (requested and _has_begun(state))):
        found["never called"] = _never_called_text(state, silent)
    idle = [hook.site for hook in live if hook.called and not hook.trained]
    if idle and started and state.enabled:
        found["always in eval"] = always_in_eval_text(state, idle)
    for hook in live:
        if is_unchecked(hook):
            found |= shape_warnings(hook)
    if state.enabled and (requested or started) and (ranks := find_rank_with_same_seed(model)):
        found["equal masks"] = _equal_masks_text(state, *ranks)
    return found | stalled_schedule(state, trained)


def _has_begun(state: InjectionState) -> bool:
    counter: UpdateCounter | None = state.live.update_counter
    return state.live.moves > 0 or (counter is not None and counter.updates > 0)


def schedule_problems(state: InjectionState) -> dict[str, str]:
    """Return the problems of a schedule that does not advance while the model is updated, by kind."""
    counter: UpdateCounter | None = state.live.update_counter
    if counter is None or not counter.updates_since_step or not schedule_can_advance(state):
        return {}
    if state.live.follower is not None and not state.followed:
        return {"optimizer gone": _optimizer_gone_text(state)}
    return {"not advancing": _not_advancing_text(state)} if counter.updates_since_step > UPDATES_BEFORE_WARNING else {}


def stalled_schedule(state: InjectionState, trained: bool | None = None) -> dict[str, str]:
    """Like `schedule_problems`, but without waiting for many updates.

    Without `trained`, a model counts as trained once its weights were updated.
    """
    if trained is None:
        trained = state.live.update_counter is not None and state.live.update_counter.updates > 0
    if state.live.follower is not None and not state.followed and schedule_can_advance(state):
        return {"optimizer gone": _optimizer_gone_text(state)}
    never_stepped = state.scheduled and not state.live.was_stepped and not state.followed
    counter: UpdateCounter | None = state.live.update_counter
    stale = state.step_count == 0 or (counter is not None and counter.updates_since_step > 0)
    if trained and never_stepped and schedule_can_advance(state) and stale:
        return {"not advancing": _not_advancing_text(state)}
    return schedule_problems(state)


def _lost_and_copied(
    model: nn.Module, state: InjectionState, hooks: Sequence[SiteHook], known: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the sites whose hook is gone, and those that have a copy of a hook."""
    all_hooks = [hook for _, hook in hooks_of(model)]
    there = {hook.site for hook in all_hooks if hook.state is state}
    copies = [hook.site for hook in all_hooks if hook.state is not state and hook.state.key == state.key]
    # A handle on a submodule does not report sites elsewhere in the model as lost.
    if not state.contains_root(model):
        own = {hook.site for hook in hooks}
        there |= {hook.site for hook in state.live.members if hook.is_attached and hook.site not in own}
    there |= set(copies)
    return [site for site in known if site not in there], copies


def discarded_text(name: str) -> str:
    """The warning for a model that was deleted before it was trained."""
    return (
        f"the model that {name!r} was injected into was deleted before it ran in training mode: nothing is dropped.\n"
        "  if your trainer builds a new model (as ultralytics and FX quantization do), inject into that one, in a "
        "callback that runs before training."
    )


def always_in_eval_text(state: InjectionState, sites: Sequence[str]) -> str:
    """The warning for layers that never ran in training mode."""
    return (
        f"{state.name!r}: {some(sites)} only ran in eval mode, where nothing is dropped.\n"
        "  call model.train() before training. If the model keeps a layer in eval mode (frozen batch norm), hook "
        "another one, such as the preceding convolution."
    )


def _not_advancing_text(state: InjectionState) -> str:
    return (
        f"{state.name!r} is still at step {state.step_count} of {state.schedule}: its schedule is not advancing, "
        "because nothing calls step(), seek() or follow().\n"
        "  after inject: drop.follow(optimizer)   or after each optimizer.step(): drop.step()   "
        "or: drop.seek(global_step)"
    )


def _optimizer_gone_text(state: InjectionState) -> str:
    return (
        f"{state.name!r}: the optimizer that it followed no longer exists (rebuilt or copied?), so its schedule is not "
        "advancing.\n  follow the new one: drop.follow(optimizer)"
    )


def _lost_text(state: InjectionState, lost: Sequence[str], of: int) -> str:
    return (
        f"{state.name!r}: {len(lost)} of {of} sites lost their hook: {some(lost)}.\n"
        "  something replaced these modules after inject (reset_classifier, convert_sync_batchnorm, ...): "
        f'inject again with on_existing="replace"{_and_resume(state)}.'
    )


def _copied_text(state: InjectionState, copies: Sequence[str]) -> str:
    return (
        f"{state.name!r}: this model also has copies of the hooks of {some(copies)}.\n"
        "  fuse_modules, PEFT's modules_to_save or a copied layer created them. This handle neither steps nor removes "
        f'them: use find(model) for all hooks, or inject again with on_existing="replace"{_and_resume(state)}.'
    )


def _never_called_text(state: InjectionState, silent: Sequence[str]) -> str:
    root = None if state.live.root is None else state.live.root()
    modules = {} if root is None else dict(root.named_modules())
    if all(isinstance(modules.get(name), nn.Embedding) for name in silent):
        return (
            f"{state.name!r}: {some(silent)} never ran, so it is not regularized.\n"
            "  inputs_embeds bypass the embedding: pass input_ids to the model, or regularize the embeddings yourself."
        )
    return (
        f"{state.name!r}: {some(silent)} never ran, so nothing is dropped there.\n"
        "  PyTorch calls neither a ModuleList that is only iterated over nor a module whose weights are used directly: "
        "hook the layers inside or after it."
    )


def _and_resume(state: InjectionState) -> str:
    """The call that resumes the schedule of this injection in a new one."""
    return f", then drop.seek({state.step_count})" if state.step_count else ""


def _equal_masks_text(state: InjectionState, rank: int, other: int, seed: int) -> str:
    first, second = sorted((rank, other))
    return (
        f"{state.name!r}: ranks {first} and {second} draw identical masks, because both are seeded with {seed}.\n"
        "  on every rank, after building the model: hookdrop.seed_per_rank()\n"
        "  if they process the same samples (tensor parallelism), identical masks are correct: "
        "then call seed_per_rank(group=data_parallel_group)."
    )
