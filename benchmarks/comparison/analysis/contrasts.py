"""Differences between the arms of a cell, and what its controls say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from comparison.analysis.inference import Measured, corrected, difference, measured
from comparison.analysis.pairs import Paired, same_start
from comparison.analysis.schema import METRICS, Contrast, Controls, Difference, Metric

Differences = Mapping[str, dict[Metric, Difference]]
"""To none, by the name of the arm; arms without a complete pair are not there."""
Measures = Mapping[str, Mapping[Metric, Mapping[int, Measured]]]


def measures(arms: Sequence[Paired]) -> Measures:
    """The runs of complete pairs, by arm, metric and seed."""
    found = {}
    for arm in arms:
        runs = {seed: measured(arm.finished[seed]) for seed in sorted(arm.complete)}
        found[arm.entry.arm.name] = {metric: {seed: run[metric] for seed, run in runs.items()} for metric in METRICS}
    return found


def differences(arms: Sequence[Paired], of: Measures) -> Differences:
    """To none, the first arm; Holm's correction is over the arms of one metric, without the controls."""
    none, *others = arms
    usable = [arm for arm in others if arm.complete]
    found: dict[str, dict[Metric, Difference]] = {arm.entry.arm.name: {} for arm in usable}
    for metric in METRICS:
        base = of[none.entry.arm.name][metric]
        for controls in (False, True):
            names = [arm.entry.arm.name for arm in usable if bool(arm.entry.control) == controls]
            raw = [difference(of[name][metric], base) for name in names]
            for name, one in zip(names, raw if controls else corrected(raw), strict=True):
                found[name][metric] = one
    return found


def contrasts(arms: Sequence[Paired], of: Measures) -> list[Contrast]:
    """Each two arms that are neither none nor a control; Holm's correction is over all of them in one metric."""
    names = [arm.entry.arm.name for arm in arms[1:] if not arm.entry.control]
    found = []
    for metric in METRICS:
        pairs = [(a, b) for a, b in combinations(names, 2) if of[a][metric].keys() & of[b][metric].keys()]
        family = corrected([difference(of[a][metric], of[b][metric]) for a, b in pairs])
        found += [Contrast(a=a, b=b, metric=metric, difference=one) for (a, b), one in zip(pairs, family, strict=True)]
    return found


def controls(arms: Sequence[Paired], against: Differences) -> Controls:
    """Whether the comparison itself is sound."""
    equal = [same for arm in arms if arm.entry.control == "aa" for same in _same_ends(arm, arms[0])]
    other = next((against.get(arm.entry.arm.name) for arm in arms if arm.entry.control == "seeds"), None)
    hooked = [outcome["changes"] for arm in arms for outcome in arm.outcomes if outcome["changes"] is not None]
    return Controls(
        aa_equal=sum(equal),
        aa_seeds=len(equal),
        none_none=other,
        paired=same_start(arms),
        unchanged=sum(not changes for changes in hooked),
        hooked=len(hooked),
    )


def _same_ends(arm: Paired, none: Paired) -> list[bool]:
    """Of each seed that both finished: whether weights and outputs came out bit-equal."""
    pairs = [
        (arm.finished[seed].outcome, none.finished[seed].outcome) for seed in arm.finished if seed in none.finished
    ]
    return [a["weights_after"] == b["weights_after"] and a["outputs"] == b["outputs"] for a, b in pairs if a and b]
