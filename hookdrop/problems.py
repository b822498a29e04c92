"""What is wrong with an injection now, in words."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hookdrop.hooks import SiteHook, State, hooks_of, undriven_text
from hookdrop.schedules import needs_driving

# After so many steps of the schedule every site of a training should have run.
MOVES_TO_JUDGE = 10


def problems(model: nn.Module, state: State, hooks: Sequence[SiteHook]) -> dict[str, str]:
    """Each problem by its kind; empty where all is well."""
    found: dict[str, str] = {}
    there = {hook.site for _, hook in hooks_of(model) if hook.state is state}
    lost = [site for site in state.sites if site not in there]
    if lost and not state.removed and not state.hidden:
        found["lost"] = (
            f"{state.name!r}: {len(lost)} of {len(state.sites)} sites carry no hook any more: {_some(lost)}.\n"
            "  something replaced these modules after inject (reset_classifier, convert_sync_batchnorm, ...): "
            'inject again with on_existing="replace".'
        )
    live = [hook for hook in hooks if hook.site not in lost]
    started = any(hook.trained for hook in live)
    silent = [hook.site for hook in live if not hook.fired]
    if silent and (any(hook.fired for hook in live) or state.moves >= MOVES_TO_JUDGE):
        found["never called"] = (
            f"{state.name!r}: {_some(silent)} never ran, so nothing is dropped there.\n"
            "  containers that are iterated and modules whose weights are used directly are never called: "
            "hook what is inside or after them."
        )
    idle = [hook.site for hook in live if hook.fired and not hook.trained]
    if idle and (started or state.moves >= MOVES_TO_JUDGE) and state.enabled:
        found["always in eval"] = (
            f"{state.name!r}: {_some(idle)} only ran in eval mode, where nothing is dropped.\n"
            "  call model.train() before training; a part that its owner keeps in eval is left alone."
        )
    follower = state.follower
    if follower is not None and not follower.alive:
        found["optimizer gone"] = (
            f"{state.name!r}: the optimizer that it followed is gone (rebuilt, or copied?).\n"
            "  follow the new one: drop.follow(optimizer)"
        )
    if started and needs_driving(state.schedule) and not state.driven and not state.step_count:
        found["undriven"] = undriven_text(state)
    return found


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names if not more else names[:4])) + more
