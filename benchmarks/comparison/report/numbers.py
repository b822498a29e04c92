"""Format numbers for the report."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from comparison.analysis.schema import DECIMALS, Metric

ABSENT = "–"


def plain(value: float | None, decimals: int = 2) -> str:
    """Format a number; a dash if it is missing or not finite."""
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:.{decimals}f}".replace("-", "−")


def signed(value: float | None, decimals: int = 2) -> str:
    """Format a number with its sign; a dash if it is missing or not finite."""
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:+.{decimals}f}".replace("-", "−")


def general(value: float | None) -> str:
    """Format a number with up to four significant digits."""
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.4g}".replace("-", "−")


def probability(p: float) -> str:
    """Format a p-value with three decimals, or two significant digits below 0.001."""
    if not math.isfinite(p):
        return ABSENT
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}".replace("e-0", "e-").replace("-", "−")


def interval(low: float, high: float, metric: Metric) -> str:
    """Format an interval, such as `[+0.50, +2.00]`."""
    return f"[{signed(low, DECIMALS[metric])}, {signed(high, DECIMALS[metric])}]"


def duration(seconds: float) -> str:
    """Format a duration, such as `42 s`, `3.5 min` or `2.1 h`."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def moment(created: str) -> str:
    """Format an ISO 8601 time, such as `2024-05-17 09:30 UTC`; other text is returned unchanged."""
    try:
        found = datetime.fromisoformat(created)
    except ValueError:
        return created
    return found.replace(tzinfo=found.tzinfo or UTC).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def count(number: int, singular: str, plural: str = "") -> str:
    """Format a count, such as `1 seed` or `16 seeds`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
