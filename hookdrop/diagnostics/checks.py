"""What is wrong with an injection now, in words."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hookdrop.diagnostics.judge import (
    always_in_eval_text,
    optimizer_gone_text,
    should_move,
    stalled,
    undriven_text,
    was_updated,
)
from hookdrop.diagnostics.rank_seeds import find_rank_with_same_seed
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.registry import hooks_of
from hookdrop.hooks.state import State
from hookdrop.utils.tables import some

# After so many steps of the schedule every site of a training should have run.
MOVES_TO_JUDGE = 10


def problems(model: nn.Module, state: State, hooks: Sequence[SiteHook], asked: bool = False) -> dict[str, str]:
    """Each problem by its kind; empty where all is well.

    `asked` is a person's own question: then sites that have not run yet are told before any site has, too.
    """
    if state.removed:
        return {"removed": f"{state.name!r} was removed from its model."} if asked else {}
    found: dict[str, str] = {}
    there = {hook.site for _, hook in hooks_of(model) if hook.state is state}
    # A handle on a part of a model does not miss what sits elsewhere.
    own = {hook.site for hook in hooks}
    elsewhere = set() if state.is_whole(model) else {hook.site for hook in state.members if hook.sits_somewhere} - own
    copies = [hook.site for _, hook in hooks_of(model) if hook.state is not state and hook.state.key == state.key]
    # A copy of a part has a part of the sites.
    sites = [site for site in state.sites if site in state.known]
    lost = [site for site in sites if site not in there | elsewhere | set(copies)]
    if lost and not state.hidden:
        found["lost"] = (
            f"{state.name!r}: {len(lost)} of {len(sites)} sites carry no hook any more: {some(lost)}.\n"
            "  something replaced these modules after inject (reset_classifier, convert_sync_batchnorm, ...): "
            f'inject again with on_existing="replace"{_and_go_on(state)}.'
        )
    if copies and not state.hidden:
        found["copied"] = (
            f"{state.name!r}: copies of its hooks sit on this model too, at {some(copies)}.\n"
            "  fuse_modules, peft's modules_to_save or a copied layer made them. This handle neither steps nor removes "
            f'them: use find(model) for all, or inject again with on_existing="replace"{_and_go_on(state)}.'
        )
    live = [hook for hook in hooks if hook.site not in (*lost, *copies)]
    trained = state.moves >= MOVES_TO_JUDGE or was_updated(model, state.version)
    started = trained or any(hook.judge.trained for hook in live)
    silent = [hook.site for hook in live if not hook.fired]
    if silent and (asked or started or any(hook.fired for hook in live)):
        so_far = "" if started or len(silent) < len(live) else " so far"
        found["never called"] = (
            f"{state.name!r}: {some(silent)} never ran{so_far}, so nothing is dropped there.\n"
            "  containers that are iterated and modules whose weights are used directly are never called: "
            "hook what is inside or after them."
        )
    idle = [hook.site for hook in live if hook.fired and not hook.judge.trained]
    if idle and started and state.enabled:
        found["always in eval"] = always_in_eval_text(state, idle)
    if state.follower is not None and not state.follower.alive and should_move(state):
        found["optimizer gone"] = optimizer_gone_text(state)
    for hook in live:
        found.update({} if hook.doubted else hook.doubts())
    if state.enabled and (asked or started) and (ranks := find_rank_with_same_seed(model)):
        found["equal masks"] = _equal_masks_text(state, *ranks)
    waiting = state.step_count == 0 or any(hook.judge.updates for hook in live)
    # What the forwards have told of: an optimizer is followed, but another one trains.
    told = any(hook.judge.trained and hook.judge.updates >= 1.0 for hook in live)
    if told or (any(hook.judge.trained for hook in live) and state.undriven and waiting):
        found["undriven"] = undriven_text(state)
    return found | stalled(state)


def _and_go_on(state: State) -> str:
    """What a new injection needs to stand where this one stands."""
    return f", then drop.seek({state.step_count})" if state.step_count else ""


def _equal_masks_text(state: State, rank: int, other: int, seed: int) -> str:
    first, second = sorted((rank, other))
    return (
        f"{state.name!r}: ranks {first} and {second} draw equal masks, for both are seeded with {seed}.\n"
        "  on every rank, after the model is built: hookdrop.seed_per_rank()\n"
        "  if they work on the same samples (tensor parallel) it is right so: "
        "seed_per_rank(group=...), with the data parallel group, says that."
    )
