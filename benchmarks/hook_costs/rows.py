"""Requirements on the overhead of hooks, and estimates with confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from thresholds import verdict
from timing import Samples

FORWARD_MAX = 1.005
"""Ratio: eval forward of a resnet50 with a hook on every block / without hooks."""
CALL_MAX = 2.0
"""Microseconds that an idle hook adds to the call of a layer."""
INJECT_MAX, PLAN_MAX, STEP_MAX = 150.0, 10.0, 2.5
"""Milliseconds: `inject` at 1,000 sites, `plan` of a resnet50 (both without an example), `step` with 50 sites."""
RESAMPLES = 2000


class Estimate(NamedTuple):
    """A median with its 95 % bootstrap interval."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate from at least one value, with a fixed seed."""
        drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values)))
        low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
        return cls(float(low), float(np.median(values)), float(high))

    def verdict(self, must: float | None) -> str:
        """Return whether the interval meets an upper bound: "met", "missed", "inconclusive", or "-" without one."""
        if must is None:
            return "-"
        return "inconclusive" if self.low <= must < self.high else verdict(self.high <= must)

    def text(self, digits: int) -> str:
        """Format as `1.0021 [1.0007, 1.0035]`."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


class Row(NamedTuple):
    """The values of all rounds, and the upper bound on their median."""

    values: list[float]
    must: float | None = None

    def numbers(self) -> dict[str, Any]:
        """Return the values for the JSON file."""
        found = Estimate.of(self.values)
        return {**found._asdict(), "must": self.must, "verdict": found.verdict(self.must), "values": self.values}


def ratio(samples: Mapping[str, Samples], over: str, under: str, must: float | None = None) -> Row:
    """Divide the times of `over` by those of `under`, in the rounds that have both."""
    above, below = samples[over].seconds, samples[under].seconds
    return Row([above[turn] / below[turn] for turn in above if turn in below], must)


def added(samples: Mapping[str, Samples], name: str, base: str, scale: float, must: float | None = None) -> Row:
    """Subtract the times of `base` from those of `name`, times `scale`, in the rounds that have both."""
    above, below = samples[name].seconds, samples[base].seconds
    return Row([scale * (above[turn] - below[turn]) for turn in above if turn in below], must)


def milliseconds(samples: Mapping[str, Samples], bounds: Mapping[str, float]) -> dict[str, Row]:
    """Convert times to milliseconds; the first word of a name selects its bound."""
    return {
        name: Row([1e3 * seconds for seconds in times.seconds.values()], bounds.get(name.split()[0].rstrip(",")))
        for name, times in samples.items()
    }
