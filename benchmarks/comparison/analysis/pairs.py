"""Match the runs of a cell into pairs, and explain why others are excluded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comparison.analysis.schema import METRICS
from comparison.run.record import Outcome, Record
from comparison.spec.study import Entry

NOT_RUN = "not run"


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


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Sort the arms: none, the configured ones, the controls.

    Raises:
        ValueError: There is not exactly one arm without a regularizer, or two arms have the same name.
    """
    ordered = sorted(entries, key=lambda entry: (entry.control != "", entry.arm.kind != "none"))
    plain = [entry.arm.name for entry in entries if entry.arm.kind == "none" and not entry.control]
    names = [entry.arm.name for entry in entries]
    if len(plain) != 1:
        raise ValueError(
            f"{entries[0].cell}: exactly one arm without a regularizer is required as the baseline, got {plain}."
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{entries[0].cell}: duplicate arm names: {', '.join(twice)}. Names must be unique.")
    return ordered


def paired(entries: Sequence[Entry], records: Mapping[str, Record]) -> list[PairedArm]:
    """The arms of one cell, `in_order`, with their pairs; incomplete pairs are excluded."""
    none, *_ = entries = in_order(entries)
    found = []
    for entry in entries:
        reasons = {seed: _reason(entry, none, seed, records) for seed in sorted(entry.runs)}
        finished = {seed: records[entry.runs[seed].key] for seed in reasons if not _missing(entry, seed, records)}
        complete = frozenset(seed for seed, reason in reasons.items() if not reason)
        found.append(PairedArm(entry, finished, complete, {seed: why for seed, why in reasons.items() if why}))
    return found


def same_start(arms: Sequence[PairedArm]) -> bool:
    """Whether all runs of a seed had the same initial weights and batches, except for the control with other seeds."""
    of_seed: dict[int, Any] = {}
    return all(
        of_seed.setdefault(seed, _start(record)) == _start(record)
        for arm in arms
        if arm.entry.control != "seeds"
        for seed, record in arm.finished.items()
    )


def _reason(entry: Entry, none: Entry, seed: int, records: Mapping[str, Record]) -> str:
    if missing := _missing(entry, seed, records):
        return missing
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
