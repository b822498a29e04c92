"""Differences between the arms of a cell, and its controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from comparison.analysis.inference import RunMetric, difference, holm_corrected, run_metrics
from comparison.analysis.pairs import PairedArm, same_start
from comparison.analysis.schema import METRICS, Contrast, Controls, Difference, Metric

Differences = Mapping[str, dict[Metric, Difference]]
"""Differences from none by arm; arms without a complete pair are omitted."""
PairedMetrics = Mapping[str, Mapping[Metric, Mapping[int, RunMetric]]]


def paired_metrics(arms: Sequence[PairedArm]) -> PairedMetrics:
    """The metrics of all complete pairs, by arm, metric and seed."""
    found = {}
    for arm in arms:
        runs = {seed: run_metrics(arm.finished[seed]) for seed in sorted(arm.complete)}
        found[arm.entry.arm.name] = {metric: {seed: run[metric] for seed, run in runs.items()} for metric in METRICS}
    return found


def differences(arms: Sequence[PairedArm], metrics: PairedMetrics) -> Differences:
    """Differences from none, the first arm. Holm's correction covers the arms of one metric, without the controls."""
    none, *others = arms
    usable = [arm for arm in others if arm.complete]
    found: dict[str, dict[Metric, Difference]] = {arm.entry.arm.name: {} for arm in usable}
    for metric in METRICS:
        base = metrics[none.entry.arm.name][metric]
        for controls in (False, True):
            names = [arm.entry.arm.name for arm in usable if bool(arm.entry.control) == controls]
            raw = [difference(metrics[name][metric], base) for name in names]
            for name, one in zip(names, raw if controls else holm_corrected(raw), strict=True):
                found[name][metric] = one
    return found


def contrasts(arms: Sequence[PairedArm], metrics: PairedMetrics) -> list[Contrast]:
    """Differences between all pairs of regularizers. Holm's correction covers all pairs in one metric."""
    names = [arm.entry.arm.name for arm in arms[1:] if not arm.entry.control]
    found = []
    for metric in METRICS:
        pairs = [(a, b) for a, b in combinations(names, 2) if metrics[a][metric].keys() & metrics[b][metric].keys()]
        family = holm_corrected([difference(metrics[a][metric], metrics[b][metric]) for a, b in pairs])
        found += [Contrast(a=a, b=b, metric=metric, difference=one) for (a, b), one in zip(pairs, family, strict=True)]
    return found


def controls(arms: Sequence[PairedArm], against: Differences) -> Controls:
    """The results of the control runs and of the footprint checks."""
    equal = [same for arm in arms if arm.entry.control == "aa" for same in _bit_identical(arm, arms[0])]
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


def _bit_identical(arm: PairedArm, none: PairedArm) -> list[bool]:
    """Whether final weights and outputs are bit-identical, for each seed that both finished."""
    pairs = [
        (arm.finished[seed].outcome, none.finished[seed].outcome) for seed in arm.finished if seed in none.finished
    ]
    return [a["weights_after"] == b["weights_after"] and a["outputs"] == b["outputs"] for a, b in pairs if a and b]
