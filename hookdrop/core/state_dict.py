"""Save and load the state of injections: what the code cannot rebuild, and the settings that it was saved with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from hookdrop.core.errors import InjectionError, StateError, warn
from hookdrop.core.sink import RateSink
from hookdrop.core.spec import described, spec_of
from hookdrop.core.state import InjectionState, changing
from hookdrop.core.tables import counted, some

VERSION = 2
_LISTS = ("sites", "target_p", "start")
_TYPES: dict[str, type] = {"step_count": int, "enabled": bool, "spec": str, **dict.fromkeys(_LISTS, list)}

Parts: TypeAlias = Sequence[tuple[InjectionState, Sequence[RateSink]]]
"""The states, each with the sinks of a handle."""


def save(parts: Parts) -> dict[str, Any]:
    """Return plain numbers, strings, lists and dicts, for `torch.load(weights_only=True)` and JSON.

    The keys are the same for all settings: distributed checkpoints look up each key of a nested dict on its own, and
    would not read the rest of a state that lacks one.
    """
    saved: dict[str, Any] = {}
    for state, sinks in parts:
        if state.name in saved:
            raise InjectionError(
                f"two injections here are named {state.name!r} (in a copy inside the model?).\n"
                "  save each: find(part).state_dict()   or inject with name=..."
            )
        saved[state.name] = {
            "step_count": state.step_count,
            "enabled": state.enabled,
            "sites": [sink.site for sink in sinks],
            "target_p": [sink.target for sink in sinks],
            "start": [getattr(sink, "start_norm", 0.0) for sink in sinks],
            # With the rates that the code declares: loading compares the settings, and does not restore them.
            "spec": json.dumps(described(spec_of(state, sinks, declared=True))),
        }
    return {"version": VERSION, "injections": saved}


def load(parts: Parts, saved: Any, strict: bool) -> None:
    """Validate `saved`, then apply it to all injections, or to none after an error."""
    injections = _validated(saved)
    here, there = {state.name for state, _ in parts}, {*injections}
    if here != there and (strict or not here & there):
        advice = "load what matches: load_state_dict(state, strict=False)" if here & there else "inject by these names."
        raise StateError(
            "the state does not have the injections that are here. Nothing was loaded.\n"
            f"  only in the state: {sorted(there - here)}\n  only here:         {sorted(here - there)}\n  {advice}"
        )
    wanted = [(state, sinks, injections[state.name]) for state, sinks in parts if state.name in injections]
    targets = [list(_matched(state, sinks, one, strict)) for state, sinks, one in wanted]
    for state, sinks, one in wanted:
        _warn_about_differences(state, sinks, one)
    try:
        with changing([state for state, _, _ in wanted]):
            for (state, _, one), own in zip(wanted, targets, strict=True):
                state.step_count, state.enabled = one["step_count"], one["enabled"]
                for sink, target in own:
                    sink.target = target
    except ValueError as error:
        raise StateError(f"{error} Nothing was loaded.") from None
    for state, _, _ in wanted:
        state.live.steps_ahead = None


def _validated(saved: Any) -> Mapping[str, Any]:
    found: Any = saved.get("injections") if isinstance(saved, Mapping) else None
    if not isinstance(found, Mapping) or saved.get("version") != VERSION:
        raise StateError(
            f"this is not the state of injections, of version {VERSION}. Nothing was loaded.\n"
            "  load what drop.state_dict() or find(model).state_dict() returned, not the state of the model."
        )
    for name, one in found.items():
        try:
            is_valid = all(type(one[key]) is kind for key, kind in _TYPES.items()) and one["step_count"] >= 0
            is_valid &= len({len(one[key]) for key in _LISTS}) == 1 and isinstance(json.loads(one["spec"]), dict)
        except (TypeError, KeyError, ValueError):
            is_valid = False
        if not is_valid:
            raise StateError(f"the state of {name!r} is not what state_dict() returned: {one!r}. Nothing was loaded.")
    return found


def _matched(
    state: InjectionState, sinks: Sequence[RateSink], saved: Mapping[str, Any], strict: bool
) -> Iterator[tuple[RateSink, float | None]]:
    """Yield each sink that the state has, with its target."""
    here, there = [sink.site for sink in sinks], dict(zip(saved["sites"], saved["target_p"], strict=True))
    if (strict and set(here) != set(there)) or not set(here) & set(there):
        lines = [f"the state does not match {state.name!r}. Nothing was loaded."]
        lines += [f"  only in the state: {site!r}" for site in there if site not in here]
        lines += [f"  only here:         {site!r}" for site in here if site not in there]
        if set(here) & set(there):
            lines.append("  load what matches: load_state_dict(state, strict=False)")
        raise StateError("\n".join(lines))
    for sink in sinks:
        target = there.get(sink.site)
        if sink.site in there and not (sink.target is None and target is None):
            try:
                if sink.target is None:
                    raise ValueError(f"the site has no rate, got {target}.")
                yield sink, sink.valid_target(target)
            except (TypeError, ValueError) as error:
                raise StateError(f"the state's target_p of {sink.site!r}: {error} Nothing was loaded.") from None


def _warn_about_differences(state: InjectionState, sinks: Sequence[RateSink], saved: Mapping[str, Any]) -> None:
    """Warn about settings of the code that the state was not saved with; those of the code apply."""
    here, there = described(spec_of(state, sinks, declared=True)), json.loads(saved["spec"])
    lines = []
    for key in sorted((here.keys() | there.keys()) - {"name"}):
        new, old = here.get(key), there.get(key)
        if key == "layers":
            more, fewer = len(set(new or ()) - set(old or ())), len(set(old or ()) - set(new or ()))
            if more or fewer:
                lines.append(
                    f"  {counted(more, 'site')} only here (unchanged), {counted(fewer, 'site')} not here (ignored)"
                )
        elif new != old:
            lines.append(f"  {key}: {old} in the state, {new} here")
    starts = dict(zip(saved["sites"], saved["start"], strict=True))
    own = {sink.site: getattr(sink, "start_norm", 0.0) for sink in sinks}
    if other := [site for site in own if not math.isclose(own[site], starts.get(site, own[site]), rel_tol=1e-4)]:
        lines.append(
            f"  other weights at the injection ({some(other)}): inject before a checkpoint's weights are loaded"
        )
    if lines:
        warn(
            "\n".join([f"{state.name!r} was saved with other settings than it has here:", *lines])
            + f"\n  those here apply; the step count ({saved['step_count']}) and the target rates come from the state."
            "\n  for another target rate: drop.target_p = ..."
        )
