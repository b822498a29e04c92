"""Axes that the small plots of a table's rows share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.ticker import MaxNLocator

from comparison.analysis.schema import Difference

WIDTH, HEIGHT, EDGE = 236, 40, 22


@dataclass(frozen=True)
class Axis:
    """A range of values across the width of a strip."""

    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float], through: float = 0.0) -> Axis:
        """The axis that holds all finite values and one more."""
        finite = [through, *(value for value in values if math.isfinite(value))]
        low, high = min(finite), max(finite)
        if low == high:
            low, high = low - 0.5, high + 0.5
        found = MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        return cls(low, high, tuple(float(tick) for tick in found if low <= tick <= high))

    def at(self, value: float) -> str:
        """Where a value lies, in pixels from the left."""
        return f"{EDGE + (WIDTH - 2 * EDGE) * (value - self.low) / (self.high - self.low):.1f}"

    def label(self, tick: float, sign: bool = True) -> str:
        """A tick's text."""
        text = f"{tick:+.6g}" if sign and tick else f"{tick:.6g}"
        return text.replace("-", "−")


def axis_of(differences: Iterable[Difference | None]) -> Axis:
    """The axis of some differences: zero, every seed and every interval are on it."""
    values: list[float] = []
    for found in differences:
        if found:
            values += [*found.values, found.low, found.high, found.low_images, found.high_images]
    return Axis.of(values)


def levels(values: Iterable[float]) -> list[tuple[float, float]]:
    """Each value with a height, in turn, so that dots of like values stay apart."""
    return [(value, (7, 12, 17)[i % 3]) for i, value in enumerate(values)]
