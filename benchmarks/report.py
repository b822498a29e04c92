"""Paired statistics, and what may be said of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rich import box
from rich.table import Table
from scipy.stats import t

from arms import NONE, Arm, P
from digits import STEPS_PER_EPOCH, TEST_IMAGES
from paired import MEASURED_EPOCHS
from timing import quartiles

METRICS = {"accuracy": "Accuracy", "nll": "NLL (lower is better)"}
DECIMALS = {"accuracy": 2, "nll": 3}
COLUMNS = (
    "regularizer",
    "rate at\nthe end",
    "asked\n",
    "really dropped\n[± 95 %]",
    "accuracy\n%",
    "NLL\n",
    "accuracy - none\npoints [95 %]",
    "NLL - none\n[95 %]",
    "time vs\nnone",
)
Runs = Mapping[str, Sequence[Mapping[str, Any]]]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Interval:
    """A mean of paired differences with its 95 % t interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """The interval of two or more values that are independent of one another."""
        mean = statistics.fmean(values)
        error = statistics.stdev(values) / math.sqrt(len(values))
        half = float(t.ppf(0.975, len(values) - 1)) * error
        return cls(mean, mean - half, mean + half)

    @property
    def sign(self) -> int:
        """1 if all of it is above 0, -1 if all is below, 0 if 0 lies in it or on its edge."""
        return (self.low > 0) - (self.high < 0)

    def text(self, decimals: int) -> str:
        """As in `+1.25 [+0.50, +2.00]`."""
        mean, low, high = (f"{value:+.{decimals}f}" for value in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"


def by_arm(runs: Sequence[Mapping[str, Any]]) -> Runs:
    """The runs of each arm, in the order of their seeds."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for outcome in sorted(runs, key=lambda outcome: outcome["seed"]):
        found.setdefault(outcome["arm"], []).append(outcome)
    return found


def intervals_of(runs: Runs, metric: str) -> dict[Pair, Interval]:
    """The paired differences of each arm to none, then of each two arms: (arm, other) is arm - other."""
    arms = [name for name in runs if name != NONE.name]
    pairs = [*((arm, NONE.name) for arm in arms), *combinations(arms, 2)]
    return {
        (arm, other): Interval.of([a[metric] - b[metric] for a, b in zip(runs[arm], runs[other], strict=True)])
        for arm, other in pairs
    }


def table(runs: Runs, arms: Sequence[Arm], intervals: Mapping[str, Mapping[Pair, Interval]], times: Any) -> Table:
    """One row an arm; it fits in 120 columns."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, column in enumerate(COLUMNS):
        shown.add_column(column, justify="right" if i else "left", min_width=0 if i else len(COLUMNS[0]))
    for arm in arms:
        of_arm = runs[arm.name]
        row = [arm.name]
        row += [f"{of_arm[0]['rate_at_end']:.4g}", *_asked_and_dropped(of_arm)] if arm.regularizer else ["-"] * 3
        row += [f"{_mean(of_arm, metric):.{DECIMALS[metric]}f}" for metric in METRICS]
        row += [_against_none(intervals[metric], arm.name, DECIMALS[metric]) for metric in METRICS]
        shown.add_row(*row, f"{quartiles(times[arm.name])[1]:.2f}x")
    return shown


def legend(seeds: int) -> str:
    """What the table's numbers are."""
    return (
        f"Means of {seeds} paired seeds; the last epoch counts, not the best. Asked and dropped: over all training "
        f"forwards of the last {MEASURED_EPOCHS * STEPS_PER_EPOCH} steps."
    )


def in_words(metric: str, intervals: Mapping[Pair, Interval]) -> str:
    """What the intervals of one metric allow to say, and no more."""
    parts = []
    against_none = {arm: interval for (arm, other), interval in intervals.items() if other == NONE.name}
    for sign, word in ((1, "above"), (-1, "below")):
        if found := [arm for arm, interval in against_none.items() if interval.sign == sign]:
            parts.append(f"{_listed(found)} {'is' if len(found) == 1 else 'are'} {word} none")
    if unclear := [arm for arm, interval in against_none.items() if not interval.sign]:
        parts.append(f"{_listed(unclear)} cannot be distinguished from none")
    among = {pair: interval for pair, interval in intervals.items() if pair[1] != NONE.name}
    return f"{METRICS[metric]}: {'; '.join(parts)}.\n  {_among(among, DECIMALS[metric])}"


def caveat(count: int) -> str:
    """What goes with `count` intervals."""
    lines = (
        f"p = {P} was fixed beforehand, not tuned, and the rest was chosen by time and by the accuracy of none:",
        "nothing here says which regularizer is best at its best rate.",
        f"The {count} intervals (each against none and each other, accuracy and NLL) are 95 % each, uncorrected:",
        f"if nothing differed, about {0.05 * count:.0f} of them would still exclude 0.",
        f"They are over training sets, weights, batch orders and masks, with the same {TEST_IMAGES} test images.",
    )
    return "\n".join(lines)


def _among(intervals: Mapping[Pair, Interval], decimals: int) -> str:
    apart = [
        f"{a} is {'above' if interval.sign > 0 else 'below'} {b} ({interval.text(decimals)})"
        for (a, b), interval in intervals.items()
        if interval.sign
    ]
    if not apart:
        return "The regularizers cannot be distinguished from one another."
    rest = len(intervals) - len(apart)
    others = f"; the other {rest} of {len(intervals)} pairs cannot be distinguished" if rest else ""
    return f"Among the regularizers, {_listed(apart)}{others}."


def _asked_and_dropped(runs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    dropped = Interval.of([outcome["dropped"] for outcome in runs])
    return f"{_mean(runs, 'asked'):.4f}", f"{dropped.mean:.4f} ± {dropped.high - dropped.mean:.4f}"


def _mean(runs: Sequence[Mapping[str, Any]], what: str) -> float:
    return statistics.fmean(outcome[what] for outcome in runs)


def _against_none(intervals: Mapping[Pair, Interval], arm: str, decimals: int) -> str:
    return intervals[arm, NONE.name].text(decimals) if (arm, NONE.name) in intervals else "-"


def _listed(items: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))
