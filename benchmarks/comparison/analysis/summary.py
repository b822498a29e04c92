"""Summarize a comparison from its records, also if it is incomplete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from comparison.analysis import text
from comparison.analysis.arm_summary import summarize_arm
from comparison.analysis.contrasts import contrasts, controls, differences, paired_metrics
from comparison.analysis.pairs import PairedArm, paired
from comparison.analysis.per_test_set import by_test_set
from comparison.analysis.schema import Cell, Environment, FailedRun, Spread, Summary
from comparison.run.record import Record
from comparison.spec.run_spec import Run
from comparison.spec.study import Entry

Ratios = Mapping[tuple[str, str], Spread]
"""By cell and the name of the arm."""


@dataclass(frozen=True)
class About:
    """Metadata of a comparison."""

    title: str
    created: str
    """ISO 8601, UTC."""
    command: str
    config: str
    """The YAML text."""
    seeds: int
    """Fixed before the first run, unless there are amendments."""
    amendments: list[str] = field(default_factory=list)
    """Changes after the first run, with their reasons."""
    notes: list[str] = field(default_factory=list)
    """To be read first, such as that arms are left out."""
    remarks: Mapping[str, list[str]] = field(default_factory=dict)
    """Notes on the data, by cell."""


def summarize(
    entries: Sequence[Entry], records: Mapping[str, Record], about: About, times: Ratios, memory: Ratios
) -> Summary:
    """Compute everything that the report and the terminal show.

    Args:
        entries: The arms of all cells with their runs.
        records: Records of finished runs by key, including tuning runs.
        about: Metadata.
        times: Time of a training step relative to none, by cell and arm; arms may be missing.
        memory: Memory of a training step, likewise.

    Raises:
        ValueError: A cell does not have exactly one arm without a regularizer, or has duplicate names.
    """
    of_cell: dict[str, list[Entry]] = {}
    for entry in entries:
        of_cell.setdefault(entry.cell, []).append(entry)
    cells: list[Cell] = []
    for cell, arms in of_cell.items():
        own = {run.key: records[run.key] for arm in arms for run in arm.runs.values() if run.key in records}
        for test_set, scored in by_test_set(own).items():
            title = f"{cell}, {test_set}" if test_set else cell
            costs = [{arm: spread for (of, arm), spread in ratios.items() if of == cell} for ratios in (times, memory)]
            cells.append(_cell(title, paired(arms, scored), costs, about.remarks.get(cell, [])))
    head = {name: value for name, value in vars(about).items() if name != "remarks"}
    return Summary(
        **head,
        cells=cells,
        failures=_failures(entries, records),
        environments=_environments(records.values()),
        seconds=sum(record.seconds for record in records.values()),
    )


def _cell(title: str, arms: Sequence[PairedArm], costs: Sequence[Mapping[str, Spread]], remarks: list[str]) -> Cell:
    metrics = paired_metrics(arms)
    against = differences(arms, metrics)
    outcomes = [outcome for arm in arms for outcome in arm.outcomes]
    runs = [run for arm in arms for run in arm.entry.runs.values()]
    cell = Cell(
        title=title,
        epochs=max((run.epochs for run in runs), default=0),
        steps=max((outcome["steps"] for outcome in outcomes), default=0),
        train_images=max((outcome["train_images"] for outcome in outcomes), default=0),
        test_images=max((outcome["scored_images"] for outcome in outcomes), default=0),
        skipped_images=max((outcome["skipped_images"] for outcome in outcomes), default=0),
        arms=[
            summarize_arm(arm, against.get(name), *(ratios.get(name) for ratios in costs))
            for arm in arms
            for name in [arm.entry.arm.name]
        ],
        between=contrasts(arms, metrics),
        controls=controls(arms, against),
        varied=_varied(runs),
        remarks=remarks,
    )
    words = [text.verdict(cell), *text.findings(cell), *text.caveats(cell), *text.control_sentences(cell)]
    return cell.model_copy(update={"words": words})


def _varied(runs: Sequence[Run]) -> list[str]:
    sets = ["training set"] if any(run.data.train_size for run in runs) else []
    augmented = ["augmentation"] if any(run.data.augmentation != "none" for run in runs) else []
    return [*sets, "weights", "batch order", *augmented, "masks"]


def _failures(entries: Sequence[Entry], records: Mapping[str, Record]) -> list[FailedRun]:
    """Failed final runs in the order of the entries, then failed tuning runs."""
    final = {run.key: (entry.cell, entry.arm.name) for entry in entries for run in entry.runs.values()}
    failed = {key: record for key, record in records.items() if not record.done}
    others = {key: Run.model_validate(record.spec) for key, record in failed.items() if key not in final}
    tuning = {key: (run.cell, run.arm.name) for key, run in others.items()}
    return [
        FailedRun(
            cell=cell,
            arm=arm,
            seed=records[key].spec["seed"],
            stage=records[key].spec["stage"],
            kind=failure.kind,
            message=failure.message,
            key=key,
        )
        for key, (cell, arm) in {**final, **tuning}.items()
        if key in records and (failure := records[key].failure)
    ]


def _environments(records: Iterable[Record]) -> list[Environment]:
    counts: dict[str, int] = {}
    for record in records:
        text = json.dumps(record.environment, sort_keys=True, default=str)
        counts[text] = counts.get(text, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [Environment(runs=count, details=json.loads(text)) for text, count in ordered]
