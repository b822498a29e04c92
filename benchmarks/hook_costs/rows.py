"""What hooks may cost, and what the times allow to say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cost import Samples
from thresholds import word

FORWARD_MUST = 1.005
"""Eval forward of a resnet50 with a hook on every block / the same without."""
CALL_MUST = 2.0
"""Microseconds that a hook adds to the call of a layer, while there is nothing to drop."""
INJECT_MUST, PLAN_MUST, STEP_MUST = 150.0, 10.0, 2.5
"""Milliseconds of `inject` at 1,000 sites and of `plan` of a resnet50, both without an example, and of `step` at 50."""
RESAMPLED = 2000


class Estimate(NamedTuple):
    """A median and its 95 % bootstrap interval."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Of one value or more; the same for the same values."""
        drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLED, len(values)))
        low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
        return cls(float(low), float(np.median(values)), float(high))

    def verdict(self, must: float | None) -> str:
        """What the interval allows to say of an upper bound."""
        if must is None:
            return "-"
        return "cannot be distinguished" if self.low <= must < self.high else word(self.high <= must)

    def text(self, digits: int) -> str:
        """As in `1.0021 [1.0007, 1.0035]`."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


class Row(NamedTuple):
    """What was measured, a number for each round, and the most that their median may be."""

    values: list[float]
    must: float | None = None

    def numbers(self) -> dict[str, Any]:
        """For the JSON file."""
        found = Estimate.of(self.values)
        return {**found._asdict(), "must": self.must, "verdict": found.verdict(self.must), "values": self.values}


def ratio(samples: Mapping[str, Samples], over: str, under: str, must: float | None = None) -> Row:
    """Times of `over` / times of `under`, in the rounds that had both."""
    above, below = samples[over].seconds, samples[under].seconds
    return Row([above[turn] / below[turn] for turn in above if turn in below], must)


def added(samples: Mapping[str, Samples], name: str, base: str, scale: float, must: float | None = None) -> Row:
    """`scale` times what `name` took longer than `base`, in the rounds that had both."""
    above, below = samples[name].seconds, samples[base].seconds
    return Row([scale * (above[turn] - below[turn]) for turn in above if turn in below], must)


def milliseconds(samples: Mapping[str, Samples], musts: Mapping[str, float]) -> dict[str, Row]:
    """The times themselves; which must is theirs goes by the first word of their names."""
    return {
        name: Row([1e3 * seconds for seconds in of_name.seconds.values()], musts.get(name.split()[0].rstrip(",")))
        for name, of_name in samples.items()
    }
