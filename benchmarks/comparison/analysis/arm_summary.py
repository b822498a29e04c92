"""Summarize the runs of an arm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import sem
from scipy.stats import t as student

from comparison.analysis.pairs import PairedArm
from comparison.analysis.schema import METRICS, ArmSummary, Band, Bin, Difference, Metric, Site, Spread
from comparison.run.metrics import BINS, bin_of

Point = tuple[float, float]


def summarize_arm(
    arm: PairedArm, against_none: dict[Metric, Difference] | None, time: Spread | None, memory: Spread | None
) -> ArmSummary:
    """Summarize the finished runs of an arm."""
    entry, runs = arm.entry, arm.outcomes
    first: Any = runs[0] if runs else {}
    values: dict[Metric, list[float]] = {metric: [run[metric] for run in runs] for metric in METRICS}
    dropped = [run["dropped"] for run in runs if run["dropped"] is not None]
    ends = [run["ramp_end"] for run in runs if run["ramp_end"] is not None]
    kind = "reference" if entry.control == "reference" else "control" if entry.control else entry.arm.kind
    return ArmSummary(
        name=entry.arm.name,
        kind=kind,  # type: ignore[arg-type]
        call=first.get("call", entry.arm.call),
        layers=list(entry.arm.layers),
        sites=first.get("sites", 0),
        flags=list(dict.fromkeys(flag for run in runs for flag in run["flags"])),
        command=entry.command,
        runs=len(runs),
        asked=_mean([run["asked"] for run in runs]),
        dropped=_mean(dropped),
        dropped_half=half_width(dropped),
        rate_at_end=_mean([run["rate_at_end"] for run in runs]),
        ramp_end=max(ends) if ends and len(ends) == len(runs) else None,
        realised=_site_rates([site for run in runs for site in run["realised"]]),
        values=values,
        seeds=list(arm.finished),
        means={metric: float(np.mean(found)) for metric, found in values.items() if found},
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
    )


def band(curves: Sequence[Sequence[Point]]) -> Band:
    """Quartiles over the runs at each x that all runs share."""
    if not any(curves):
        return Band(x=[], low=[], median=[], high=[])
    table = pd.DataFrame([dict(curve) for curve in curves]).dropna(axis="columns").sort_index(axis="columns")
    low, median, high = (table.quantile(q).tolist() for q in (0.25, 0.5, 0.75))
    return Band(x=table.columns.tolist(), low=low, median=median, high=high)


def half_width(values: Sequence[float]) -> float | None:
    """Half-width of the 95 % t interval of the mean; None for fewer than two values."""
    return float(student.ppf(0.975, len(values) - 1) * sem(values)) if len(values) > 1 else None


def _calibration(arm: PairedArm) -> list[Bin]:
    images = [record.images for record in arm.finished.values()]
    if not images:
        return []
    confidence, correct = (np.concatenate([of_run[name] for of_run in images]) for name in ("confidence", "correct"))
    return reliability(confidence, correct)


def reliability(confidence_N: NDArray[np.generic], correct_N: NDArray[np.generic], bins: int = BINS) -> list[Bin]:
    """Mean confidence and accuracy of the predictions in each nonempty bin, in order."""
    table = pd.DataFrame({"confidence": confidence_N.astype(np.float64), "accuracy": correct_N.astype(np.float64)})
    found = table.groupby(bin_of(confidence_N, bins)).agg(["mean", "size"])
    return [Bin(confidence=row[0], accuracy=row[2], count=int(row[1])) for row in found.to_numpy()]


def _site_rates(sites: Sequence[Any]) -> list[Site]:
    if not sites:
        return []
    means = pd.DataFrame(sites).groupby("name", sort=False).mean()
    return [Site(name=str(name), asked=row["asked"], dropped=row["dropped"]) for name, row in means.iterrows()]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
