"""Shared axes of the small plots in table rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.ticker import MaxNLocator

from comparison.analysis.schema import Difference

WIDTH, HEIGHT, EDGE = 236, 40, 22


@dataclass(frozen=True)
class Axis:
    """Maps a range of values to the width of a strip."""

    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float], through: float = 0.0) -> Axis:
        """An axis that contains all finite values and `through`."""
        finite = [through, *(value for value in values if math.isfinite(value))]
        low, high = min(finite), max(finite)
        if low == high:
            low, high = low - 0.5, high + 0.5
        found = MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        return cls(low, high, tuple(float(tick) for tick in found if low <= tick <= high))

    def at(self, value: float) -> str:
        """The x position of a value, in pixels."""
        return f"{EDGE + (WIDTH - 2 * EDGE) * (value - self.low) / (self.high - self.low):.1f}"

    def label(self, tick: float, sign: bool = True) -> str:
        """The label of a tick."""
        text = f"{tick:+.6g}" if sign and tick else f"{tick:.6g}"
        return text.replace("-", "−")


def axis_of(differences: Iterable[Difference | None]) -> Axis:
    """An axis that contains zero, all seeds and all intervals of the differences."""
    values: list[float] = []
    for found in differences:
        if found:
            values += [*found.values, found.low, found.high, found.low_images, found.high_images]
    return Axis.of(values)


def levels(values: Iterable[float]) -> list[tuple[float, float]]:
    """Each value with a staggered y position, so that dots of similar values do not overlap."""
    return [(value, (7, 12, 17)[i % 3]) for i, value in enumerate(values)]
