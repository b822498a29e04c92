"""Which runs of a cell are pairs, and why others are not."""

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
class Paired:
    """An arm's finished runs, and those of them that have a partner without a regularizer; by seed of the pair."""

    entry: Entry
    finished: Mapping[int, Record]
    complete: frozenset[int]
    set_aside: Mapping[int, str]

    @property
    def outcomes(self) -> list[Outcome]:
        """Of the finished runs, in the order of their seeds."""
        return [record.outcome for record in self.finished.values() if record.outcome]


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """None first, then as configured, then the controls.

    Raises:
        ValueError: there is not one arm without a regularizer, or two arms have the same name.
    """
    ordered = sorted(entries, key=lambda entry: (entry.control != "", entry.arm.kind != "none"))
    plain = [entry.arm.name for entry in entries if entry.arm.kind == "none" and not entry.control]
    names = [entry.arm.name for entry in entries]
    if len(plain) != 1:
        raise ValueError(
            f"{entries[0].cell}: the arms without a regularizer are {plain}; there has to be one to compare with."
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{entries[0].cell}: more than one arm is named {', '.join(twice)}. Rename all but one.")
    return ordered


def paired(entries: Sequence[Entry], records: Mapping[str, Record]) -> list[Paired]:
    """The arms of one cell, `in_order`, with their pairs; a pair without its other half is set aside."""
    none, *_ = entries = in_order(entries)
    found = []
    for entry in entries:
        reasons = {seed: _reason(entry, none, seed, records) for seed in sorted(entry.runs)}
        finished = {seed: records[entry.runs[seed].key] for seed in reasons if not _missing(entry, seed, records)}
        complete = frozenset(seed for seed, reason in reasons.items() if not reason)
        found.append(Paired(entry, finished, complete, {seed: why for seed, why in reasons.items() if why}))
    return found


def same_start(arms: Sequence[Paired]) -> bool:
    """Whether the runs of each seed began with the same weights and saw the same batches; but for other seeds' none."""
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
        return f"no pair: it did not begin with the weights of {none.arm.name}, or saw other batches"
    if len(run.images["correct"]) != len(other.images["correct"]):
        return f"no pair: it was scored on {len(run.images['correct'])} images, not {len(other.images['correct'])}"
    return ""


def _missing(entry: Entry, seed: int, records: Mapping[str, Record]) -> str:
    record = records.get(entry.runs[seed].key) if seed in entry.runs else None
    if record is None:
        return NOT_RUN
    if record.failure:
        lines = record.failure.message.strip().splitlines() or [""]
        return f"{record.failure.kind}: {lines[0]}".rstrip(": ")
    if record.outcome is None or not all(math.isfinite(record.outcome[metric]) for metric in METRICS):
        return "nan: a metric is not a finite number"
    return ""


def _start(record: Record) -> Any:
    return record.outcome and (record.outcome["weights_before"], record.outcome["batches"])
