"""Summarize the runs of an arm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from comparison.analysis.pairs import PairedArm
from comparison.analysis.schema import METRICS, ArmSummary, Band, Bin, Difference, Mask, Metric, Site, Spread
from comparison.run.metrics import BINS, bin_of
from comparison.run.record import Outcome
from comparison.spec.study import Entry

Point = tuple[float, float]


def summarize_arm(
    arm: PairedArm, against_none: dict[Metric, Difference] | None, time: Spread | None, memory: Spread | None
) -> ArmSummary:
    """Summarize the finished runs of an arm."""
    entry, runs = arm.entry, arm.outcomes
    first = runs[0] if runs else None
    dropped = _known(run["dropped"] for run in runs)
    values: dict[Metric, list[float]] = {metric: [run[metric] for run in runs] for metric in METRICS}
    return ArmSummary(
        name=entry.arm.name,
        kind=_kind(entry),
        call=first["call"] if first else entry.arm.call,
        layers=list(entry.arm.layers),
        sites=first["sites"] if first else 0,
        flags=list(dict.fromkeys(flag for run in runs for flag in run["flags"])),
        command=entry.command,
        runs=len(runs),
        asked=_mean(_known(run["asked"] for run in runs)),
        dropped=_mean(dropped),
        dropped_half=half_width(dropped),
        rate_at_end=_mean(_known(run["rate_at_end"] for run in runs)),
        ramp_end=_last([run["ramp_end"] for run in runs]),
        realised=_site_rates(runs),
        values=values,
        seeds=list(arm.finished),
        means={metric: statistics.fmean(found) for metric, found in values.items() if found},
        against_none=against_none,
        set_aside=dict(arm.set_aside),
        train_loss=band([list(enumerate(run["train_loss"], 1)) for run in runs]),
        validation_accuracy=band([[(at["epoch"], at["accuracy"]) for at in run["validation"]] for run in runs]),
        validation_nll=band([[(at["epoch"], at["nll"]) for at in run["validation"]] for run in runs]),
        rate=band([run["rates"] for run in runs]),
        calibration=_calibration(arm),
        tuning=entry.tuning,
        like=entry.like,
        time=time,
        memory=memory,
        mask=next((Mask(**run["mask"]) for run in runs if run["mask"]), None),
    )


def _kind(entry: Entry) -> Literal["none", "regularizer", "recipe", "peer", "control", "reference"]:
    if entry.control:
        return "reference" if entry.control == "reference" else "control"
    assert entry.arm.kind != "probe"
    return entry.arm.kind


def band(curves: Sequence[Sequence[Point]]) -> Band:
    """Quartiles over the runs at each x that all runs share."""
    tables = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*map(set, tables))) if tables else []
    if not shared:
        return Band(x=[], low=[], median=[], high=[])
    low, median, high = np.quantile([[table[x] for x in shared] for table in tables], (0.25, 0.5, 0.75), axis=0)
    return Band(x=shared, low=list(low), median=list(median), high=list(high))


def half_width(values: Sequence[float]) -> float | None:
    """Half-width of the 95 % t interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    error: float = statistics.stdev(values) / math.sqrt(len(values))
    return float(student.ppf(0.975, len(values) - 1)) * error


def _calibration(arm: PairedArm) -> list[Bin]:
    images = [record.images for record in arm.finished.values()]
    if not images:
        return []
    confidence, correct = (np.concatenate([of_run[name] for of_run in images]) for name in ("confidence", "correct"))
    return reliability(confidence, correct)


def reliability(confidence_N: NDArray[np.generic], correct_N: NDArray[np.generic], bins: int = BINS) -> list[Bin]:
    """Mean confidence and accuracy of the predictions in each nonempty bin, in order."""
    confidences, places = confidence_N.astype(np.float64), bin_of(confidence_N, bins)
    counts, confidence, correct = (
        np.bincount(places, weights=weights, minlength=bins) for weights in (None, confidences, correct_N)
    )
    return [
        Bin(confidence=confidence[i] / counts[i], accuracy=correct[i] / counts[i], count=int(counts[i]))
        for i in np.flatnonzero(counts)
    ]


def _site_rates(runs: Sequence[Outcome]) -> list[Site]:
    sites: dict[str, list[Point]] = {}
    for run in runs:
        for site in run["realised"]:
            sites.setdefault(site["name"], []).append((site["asked"], site["dropped"]))
    return [
        Site(name=name, **dict(zip(("asked", "dropped"), map(statistics.fmean, zip(*found, strict=True)), strict=True)))
        for name, found in sites.items()
    ]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _last(steps: Sequence[int | None]) -> int | None:
    known = [step for step in steps if step is not None]
    return max(known) if known and len(known) == len(steps) else None
