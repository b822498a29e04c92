"""Match the runs of a cell into pairs, explain why others are excluded, and compare the arms."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from comparison.analysis.inference import RunMetric, difference, holm_corrected, run_metrics
from comparison.analysis.schema import METRICS, Contrast, Controls, Difference, Metric
from comparison.run.metrics import ece
from comparison.run.record import Outcome, Record
from comparison.spec.study import Entry

NOT_RUN = "not run"
Differences = Mapping[str, dict[Metric, Difference]]
"""Differences from none by arm; arms without a complete pair are omitted."""
PairedMetrics = Mapping[str, Mapping[Metric, Mapping[int, RunMetric]]]
"""The metrics of all complete pairs, by arm, metric and seed."""


@dataclass(frozen=True)
class PairedArm:
    """An arm's finished runs, and the seeds with a complete pair; by seed of the pair."""

    entry: Entry
    finished: Mapping[int, Record]
    complete: frozenset[int]
    set_aside: Mapping[int, str]

    @property
    def outcomes(self) -> list[Outcome]:
        """Outcomes of the finished runs, in order of their seeds."""
        return [record.outcome for record in self.finished.values() if record.outcome]


def paired(entries: Sequence[Entry], records: Mapping[str, Record]) -> list[PairedArm]:
    """The arms of one cell (none, the configured ones, the controls) with their complete pairs."""
    entries = sorted(entries, key=lambda entry: (entry.control != "", entry.arm.kind != "none"))
    found = []
    for entry in entries:
        missing = {seed: _missing(entry, seed, records) for seed in sorted(entry.runs)}
        finished = {seed: records[entry.runs[seed].key] for seed, why in missing.items() if not why}
        reasons = {seed: why or _mismatch(entry, entries[0], seed, records) for seed, why in missing.items()}
        complete = frozenset(seed for seed, why in reasons.items() if not why)
        found.append(PairedArm(entry, finished, complete, {seed: why for seed, why in reasons.items() if why}))
    return found


def _mismatch(entry: Entry, none: Entry, seed: int, records: Mapping[str, Record]) -> str:
    if entry is none:
        return ""
    if missing := _missing(none, seed, records):
        return f"{none.arm.name}: {missing}"
    run, other = (records[each.runs[seed].key] for each in (entry, none))
    if entry.control != "seeds" and _start(run) != _start(other):
        return f"no pair: initial weights or batches differ from {none.arm.name}"
    if len(run.images["correct"]) != len(other.images["correct"]):
        return f"no pair: scored on {len(run.images['correct'])} images instead of {len(other.images['correct'])}"
    return ""


def _missing(entry: Entry, seed: int, records: Mapping[str, Record]) -> str:
    record = records.get(entry.runs[seed].key) if seed in entry.runs else None
    if record is None:
        return NOT_RUN
    if record.failure:
        lines = record.failure.message.strip().splitlines() or [""]
        return f"{record.failure.kind}: {lines[0]}".rstrip(": ")
    if record.outcome is None or not all(math.isfinite(record.outcome[metric]) for metric in METRICS):
        return "nan: a metric is not finite"
    return ""


def _start(record: Record) -> Any:
    return record.outcome and (record.outcome["data"], record.outcome["weights_before"], record.outcome["batches"])


def by_test_set(records: Mapping[str, Record]) -> Mapping[str, Mapping[str, Record]]:
    """The records for each test set, with the metrics on its images; `{"": records}` if there is only one."""
    scored = [record.outcome["test_sets"] for record in records.values() if record.outcome]
    names = list(dict.fromkeys(name for names in scored for name in names))
    if not names:
        return {"": records}
    return {name: {key: _on(name, record) for key, record in records.items()} for name in names}


def _on(name: str, record: Record) -> Record:
    """The record with only the images of one test set; records without test sets, as of tuning, are unchanged."""
    if record.outcome is None or name not in record.outcome["test_sets"]:
        return record
    chosen = record.images["test_set"] == record.outcome["test_sets"].index(name)
    images = {key: values[chosen] for key, values in record.images.items()}
    outcome: Outcome = {
        **record.outcome,
        "accuracy": 100 * float(images["correct"].mean()),
        "nll": float(images["nll"].mean(dtype=np.float64)),
        "ece": ece(images["confidence"], images["correct"]),
        "scored_images": int(chosen.sum()),
    }
    return replace(record, outcome=outcome, images=images)


def paired_metrics(arms: Sequence[PairedArm]) -> PairedMetrics:
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
    of_control = {arm.entry.control: arm for arm in arms}
    still, other, none = of_control.get("aa"), of_control.get("seeds"), arms[0].finished
    equal = [_end(run) == _end(none[seed]) for seed, run in (still.finished if still else {}).items() if seed in none]
    hooked = [outcome["changes"] for arm in arms for outcome in arm.outcomes if outcome["changes"] is not None]
    starts = [(seed, _start(run)) for arm in arms if arm is not other for seed, run in arm.finished.items()]
    first = dict(reversed(starts))
    return Controls(
        aa_equal=sum(equal),
        aa_seeds=len(equal),
        none_none=against.get(other.entry.arm.name) if other else None,
        paired=all(start == first[seed] for seed, start in starts),
        unchanged=sum(not changes for changes in hooked),
        hooked=len(hooked),
    )


def _end(record: Record) -> Any:
    """What is bit-identical in two equal runs."""
    return record.outcome and (record.outcome["weights_after"], record.outcome["outputs"])
