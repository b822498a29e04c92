"""Save and load the state of an injection: the minimum that the code cannot rebuild."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hookdrop.errors import StateError, warn
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.state import InjectionState
from hookdrop.utils.tables import counted
from hookdrop.utils.validation import count

VERSION = 1
_KEYS = ("version", "name", "sites", "step_count", "target_p", "declared_p", "enabled", "schedule")


class Rated(Protocol):
    """A hook, or an attribute that `set_dropout` changes."""

    site: str
    target: float | None
    initial_target: float | None

    def valid_target(self, value: object) -> float:
        """Return `value` as a float, or raise if it is out of range."""


def save(state: InjectionState, hooks: Sequence[Rated]) -> dict[str, Any]:
    """Return plain numbers, strings, and lists, for `torch.load(weights_only=True)` and JSON.

    `declared_p` and `schedule` record the settings in the code: loading compares them, and does not restore them.
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
    hooks: Sequence[Rated],
    saved: Mapping[str, Any],
    strict: bool,
    changing: Callable[[], AbstractContextManager[None]],
) -> None:
    """Validate `saved`, then apply it; `changing` undoes the change if a rate is out of range."""
    step, enabled = _validated(saved)
    if strict:
        _check_same_sites(state, hooks, saved)
    targets = dict(zip(saved["sites"], saved["target_p"], strict=True))
    known = [hook for hook in hooks if hook.site in targets]
    if not known:
        raise StateError(f"the state has none of the sites of {state.name!r}. Nothing was loaded.")
    new = [(hook, _valid_target(hook, targets[hook.site])) for hook in known]
    _warn_about_differences(state, hooks, saved, known)
    try:
        with changing():
            for hook, target in new:
                hook.target = target
            state.step_count, state.enabled = step, enabled
    except ValueError as error:
        raise StateError(f"{error} Nothing was loaded.") from None


def _validated(saved: Mapping[str, Any]) -> tuple[int, bool]:
    missing = [key for key in _KEYS if not isinstance(saved, Mapping) or key not in saved]
    if missing:
        raise StateError(
            f"this is not the state of an injection: it lacks {', '.join(missing)}. Nothing was loaded.\n"
            "  load what drop.state_dict() returned (not the model's). For all injections of a model: "
            "find(model).state_dict() and find(model).load_state_dict()."
        )
    if saved["version"] != VERSION:
        raise StateError(
            f"the state has version {saved['version']!r}, this hookdrop reads version {VERSION}. Nothing was loaded."
        )
    lists = [saved[key] for key in ("sites", "target_p", "declared_p")]
    if not all(isinstance(each, list | tuple) for each in lists):
        raise StateError("the state's sites, target_p, and declared_p must be lists. Nothing was loaded.")
    if len(set(map(len, lists))) > 1:
        raise StateError("the state's sites, target_p, and declared_p differ in length. Nothing was loaded.")
    if not isinstance(saved["enabled"], bool):
        raise StateError(f"the state's enabled must be a bool, got {saved['enabled']!r}. Nothing was loaded.")
    try:
        return count(saved["step_count"], "step_count", "state", 0), saved["enabled"]
    except (TypeError, ValueError) as error:
        raise StateError(f"{error} Nothing was loaded.") from None


def _check_same_sites(state: InjectionState, hooks: Sequence[Rated], saved: Mapping[str, Any]) -> None:
    here, there = [hook.site for hook in hooks], list(saved["sites"])
    if saved["name"] == state.name and here == there:
        return
    lines = [f"the state does not match {state.name!r}. Nothing was loaded."]
    if saved["name"] != state.name:
        lines.append(f"  name:              {saved['name']!r} in the state, {state.name!r} here")
    lines += [f"  only in the state: {site!r}" for site in there if site not in here]
    lines += [f"  only here:         {site!r}" for site in here if site not in there]
    if sorted(here) == sorted(there) and here != there:
        lines.append("  the same sites in a different order")
    if set(here) & set(there):
        lines.append("  load what matches: load_state_dict(state, strict=False)")
    raise StateError("\n".join(lines))


def _valid_target(hook: Rated, target: Any) -> float | None:
    if hook.target is None and target is None:
        return None
    if hook.target is None:
        raise StateError(f"the state has a rate of {target} for {hook.site!r}, which has none. Nothing was loaded.")
    try:
        return hook.valid_target(target)
    except (TypeError, ValueError) as error:
        raise StateError(f"the state's target_p of {hook.site!r}: {error} Nothing was loaded.") from None


def _warn_about_differences(
    state: InjectionState, hooks: Sequence[Rated], saved: Mapping[str, Any], known: Sequence[Rated]
) -> None:
    if saved["schedule"] != repr(state.schedule):
        warn(
            f"{state.name!r} uses the schedule in the code, {state.schedule}; the state was saved with "
            f"{saved['schedule']}. The step count ({saved['step_count']}) comes from the state."
        )
    declared = dict(zip(saved["sites"], saved["declared_p"], strict=True))
    changed = [hook for hook in known if declared[hook.site] != hook.initial_target]
    if changed:
        first = changed[0]
        settable = isinstance(first, SiteHook)
        instead = f"drop.target_p = {first.initial_target}" if settable else f"drop.seek({saved['step_count']}) instead"
        warn(
            f"{state.name!r} uses the target rates of the state; at {first.site!r} the rate in the code changed "
            f"from {declared[first.site]} to {first.initial_target}.\n  to use the code's rate: {instead}"
        )
    only_here, only_saved = len(hooks) - len(known), len(saved["sites"]) - len(known)
    if only_here or only_saved:
        warn(
            f"{state.name!r}: {counted(only_here, 'site')} here not in the state (unchanged), "
            f"{counted(only_saved, 'site')} in the state not here (ignored)."
        )
