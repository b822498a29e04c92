"""Summarize a comparison from its records, also if it is incomplete."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from scipy.stats import sem
from scipy.stats import t as student

from comparison.analysis.pairs import PairedArm, by_test_set, contrasts, controls, differences, paired, paired_metrics
from comparison.analysis.schema import METRICS, ArmSummary, Cell, Environment, FailedRun, Metric, Spread, Summary
from comparison.run.record import Record
from comparison.spec.run_spec import Run
from comparison.spec.study import Entry

Cost = tuple[Spread, Spread]
"""Time and memory of a training step relative to none."""
Costs = Mapping[tuple[str, str], Cost]
"""By cell and the name of the arm; arms may be missing."""


def summarize(
    entries: Sequence[Entry],
    records: Mapping[str, Record],
    costs: Costs,
    remarks: Mapping[str, list[str]] | None = None,
    **head: Any,
) -> Summary:
    """Compute everything that the report and the terminal show; the keywords are further fields of the summary."""
    of_cell: dict[str, list[Entry]] = {}
    for entry in entries:
        of_cell.setdefault(entry.cell, []).append(entry)
    cells: list[Cell] = []
    for cell, arms in of_cell.items():
        own = {run.key: records[run.key] for arm in arms for run in arm.runs.values() if run.key in records}
        for test_set, scored in by_test_set(own).items():
            title = f"{cell}, {test_set}" if test_set else cell
            of_arms = {arm: both for (of, arm), both in costs.items() if of == cell}
            cells.append(_cell(title, paired(arms, scored), of_arms, (remarks or {}).get(cell, [])))
    environments = Counter(json.dumps(record.environment, sort_keys=True, default=str) for record in records.values())
    return Summary(
        **head,
        cells=cells,
        failures=_failures(records),
        environments=[Environment(runs=count, details=json.loads(one)) for one, count in environments.most_common()],
        seconds=sum(record.seconds for record in records.values()),
    )


def _cell(title: str, arms: Sequence[PairedArm], costs: Mapping[str, Cost], remarks: list[str]) -> Cell:
    metrics = paired_metrics(arms)
    against = differences(arms, metrics)
    outcomes = [outcome for arm in arms for outcome in arm.outcomes]
    runs = [run for arm in arms for run in arm.entry.runs.values()]
    sizes = {"test_images": "scored_images"} | {one: one for one in ("steps", "train_images")}
    sets = ["training set"] if any(run.data.train_size for run in runs) else []
    labels = [run.images["label"] for run in arms[0].finished.values() if "label" in run.images]
    fits = [(one["first_loss"], one["train_loss"][-1]) for one in arms[0].outcomes]
    augmented = ["augmentation"] if any(run.data.augmentation != "none" for run in runs) else []
    return Cell(
        title=title,
        epochs=max((run.epochs for run in runs), default=0),
        **{name: max((one[key] for one in outcomes), default=0) for name, key in sizes.items()},  # type: ignore
        arms=[summarize_arm(arm, against.get(arm.entry.arm.name), costs.get(arm.entry.arm.name)) for arm in arms],
        between=contrasts(arms, metrics),
        controls=controls(arms, against),
        varied=[*sets, "weights", "batch order", *augmented, "masks"],
        remarks=remarks,
        fit=tuple(np.mean(fits, axis=0).tolist()) if fits else None,
        chance=max((100 * float(np.bincount(one).max() / len(one)) for one in labels), default=None),
    )


def _failures(records: Mapping[str, Record]) -> list[FailedRun]:
    failed = [(Run.model_validate(record.spec), record.failure) for record in records.values() if record.failure]
    return [
        FailedRun(cell=run.cell, arm=run.arm.name, seed=run.seed, stage=run.stage, key=run.key, **asdict(why))
        for run, why in sorted(failed, key=lambda one: one[0].stage)
    ]


def summarize_arm(arm: PairedArm, against_none: Any, costs: Cost | None) -> ArmSummary:
    entry, runs = arm.entry, arm.outcomes
    first: Any = runs[0] if runs else {}
    values: dict[Metric, list[float]] = {metric: [run[metric] for run in runs] for metric in METRICS}
    dropped = [run["dropped"] for run in runs if run["dropped"] is not None]
    return ArmSummary(
        name=entry.arm.name,
        kind="reference" if entry.control == "reference" else "control" if entry.control else entry.arm.kind,  # type: ignore[arg-type]
        call=first.get("call", entry.arm.call), layers=list(entry.arm.layers), sites=first.get("sites", 0),
        flags=list(dict.fromkeys(flag for run in runs for flag in run["flags"])),
        runs=len(runs), seeds=list(arm.finished), set_aside=dict(arm.set_aside),
        asked=_mean([run["asked"] for run in runs]), rate_at_end=_mean([run["rate_at_end"] for run in runs]),
        dropped=_mean(dropped),
        dropped_half=float(student.ppf(0.975, len(dropped) - 1) * sem(dropped)) if len(dropped) > 1 else None,
        values=values, means={metric: float(np.mean(found)) for metric, found in values.items() if found},
        against_none=against_none, tuning=entry.tuning, like=entry.like,
        time=costs and costs[0], memory=costs and costs[1],
    )  # fmt: skip


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
