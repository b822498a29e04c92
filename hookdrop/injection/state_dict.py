"""Saving and loading where an injection stands: the least that, with the code, rebuilds the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hookdrop.errors import StateError, warn
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.state import InjectionState
from hookdrop.utils.tables import counted
from hookdrop.utils.validation import count

VERSION = 1
_KEYS = ("version", "name", "sites", "step_count", "target_p", "declared_p", "enabled", "schedule")


def save(state: InjectionState, hooks: Sequence[SiteHook]) -> dict[str, Any]:
    """Plain numbers, texts and lists, that `torch.load(weights_only=True)` and JSON both take.

    `declared_p` and `schedule` are what the code said: they are compared at loading, not loaded.
    """
    return {
        "version": VERSION,
        "name": state.name,
        "sites": [hook.site for hook in hooks],
        "step_count": state.step_count,
        "target_p": [hook.target for hook in hooks],
        "declared_p": [hook.initial_target for hook in hooks],
        "enabled": state.enabled,
        "schedule": repr(state.schedule),
    }


def load(
    state: InjectionState,
    hooks: Sequence[SiteHook],
    saved: Mapping[str, Any],
    strict: bool,
    changing: Callable[[], AbstractContextManager[None]],
) -> None:
    """Check all of `saved`, then take it over; `changing` undoes what does not fit."""
    step, enabled = _checked(saved)
    if strict:
        _same_places(state, hooks, saved)
    targets = dict(zip(saved["sites"], saved["target_p"], strict=True))
    known = [hook for hook in hooks if hook.site in targets]
    if not known:
        raise StateError(f"the state has none of the sites of {state.name!r}: nothing was loaded.")
    new = [(hook, _valid_target(hook, targets[hook.site])) for hook in known]
    _warn_about_differences(state, hooks, saved, known)
    try:
        with changing():
            for hook, target in new:
                hook.target = target
            state.step_count, state.enabled = step, enabled
    except ValueError as error:
        raise StateError(f"{error} Nothing was loaded.") from None


def _checked(saved: Mapping[str, Any]) -> tuple[int, bool]:
    missing = [key for key in _KEYS if not isinstance(saved, Mapping) or key not in saved]
    if missing:
        raise StateError(
            f"this is not the state of an injection: it lacks {', '.join(missing)}; nothing was loaded.\n"
            "  find(model).state_dict() has a state for each name: load it with find(model).load_state_dict."
        )
    if saved["version"] != VERSION:
        raise StateError(
            f"the state has version {saved['version']!r}, this hookdrop reads {VERSION}; nothing was loaded."
        )
    lists = [saved[key] for key in ("sites", "target_p", "declared_p")]
    if not all(isinstance(each, list | tuple) for each in lists):
        raise StateError("the state's sites and target_p are not lists; nothing was loaded.")
    if len(set(map(len, lists))) > 1:
        raise StateError("the state's sites and target_p differ in length; nothing was loaded.")
    if not isinstance(saved["enabled"], bool):
        raise StateError(f"the state's enabled is {saved['enabled']!r}, not a bool; nothing was loaded.")
    try:
        return count(saved["step_count"], "step_count", "state", 0), saved["enabled"]
    except (TypeError, ValueError) as error:
        raise StateError(f"{error} Nothing was loaded.") from None


def _same_places(state: InjectionState, hooks: Sequence[SiteHook], saved: Mapping[str, Any]) -> None:
    here, there = [hook.site for hook in hooks], list(saved["sites"])
    if saved["name"] == state.name and here == there:
        return
    lines = [f"the state does not fit {state.name!r}; nothing was loaded."]
    if saved["name"] != state.name:
        lines.append(f"  name:              {saved['name']!r} in the state, {state.name!r} here")
    lines += [f"  only in the state: {site!r}" for site in there if site not in here]
    lines += [f"  only here:         {site!r}" for site in here if site not in there]
    if sorted(here) == sorted(there) and here != there:
        lines.append("  the same sites in another order")
    lines.append("  load what fits:    load_state_dict(state, strict=False)")
    raise StateError("\n".join(lines))


def _valid_target(hook: SiteHook, target: Any) -> float | None:
    if hook.target is None and target is None:
        return None
    if hook.target is None:
        raise StateError(f"the state has a rate of {target} for {hook.site!r}, which has none; nothing was loaded.")
    try:
        return hook.regularizer.valid_rate(target)
    except (TypeError, ValueError) as error:
        raise StateError(f"the state's target_p of {hook.site!r}: {error} Nothing was loaded.") from None


def _warn_about_differences(
    state: InjectionState, hooks: Sequence[SiteHook], saved: Mapping[str, Any], known: Sequence[SiteHook]
) -> None:
    if saved["schedule"] != repr(state.schedule):
        warn(
            f"{state.name!r}: the code's schedule {state.schedule} is used; the state was saved under "
            f"{saved['schedule']}. The step count ({saved['step_count']}) is the state's."
        )
    declared = dict(zip(saved["sites"], saved["declared_p"], strict=True))
    other = [hook for hook in known if declared[hook.site] != hook.initial_target]
    if other:
        warn(
            f"{state.name!r}: the state's target rates are used; it was saved when the code said "
            f"{declared[other[0].site]} at {other[0].site!r}, and the code says {other[0].initial_target} now.\n"
            f"  to use the code's: drop.target_p = {other[0].initial_target}"
        )
    left_out = len(hooks) - len(known), len(saved["sites"]) - len(known)
    if any(left_out):
        warn(
            f"{state.name!r}: no partner for {counted(left_out[0], 'site')} here and {left_out[1]} of the state: "
            "left as they are."
        )
