"""Numbers as a reader wants them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from comparison.analysis.schema import BETTER, DECIMALS, Difference, Metric

ABSENT = "–"


def plain(value: float | None, decimals: int = 2) -> str:
    """A number with so many decimals; a dash if there is none."""
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:.{decimals}f}".replace("-", "−")


def signed(value: float | None, decimals: int = 2) -> str:
    """The same with its sign."""
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:+.{decimals}f}".replace("-", "−")


def sortable(value: float | None) -> str:
    """The number for the script that sorts; nothing if there is none."""
    return "" if value is None or not math.isfinite(value) else repr(value)


def general(value: float | None) -> str:
    """Four significant digits at the most."""
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.4g}".replace("-", "−")


def probability(p: float) -> str:
    """A p-value: three decimals, or two digits of a smaller one."""
    if not math.isfinite(p):
        return ABSENT
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}".replace("e-0", "e-").replace("-", "−")


def interval(low: float, high: float, metric: Metric) -> str:
    """As in `[+0.50, +2.00]`."""
    return f"[{signed(low, DECIMALS[metric])}, {signed(high, DECIMALS[metric])}]"


def verdict(difference: Difference, metric: Metric, other: str) -> str:
    """What the interval over seeds allows to say, and whether Holm's correction does too."""
    if difference.verdict == "cannot be distinguished":
        return f"cannot be distinguished from {other}"
    better = (difference.verdict == "above") == (BETTER[metric] > 0)
    words = f"{'better' if better else 'worse'} than {other}"
    return words if difference.p_holm < 0.05 else f"{words}, but not after Holm's correction"


def duration(seconds: float) -> str:
    """As in `42 s`, `3.5 min`, `2.1 h`."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def moment(created: str) -> str:
    """An ISO 8601 time as in `2024-05-17 09:30 UTC`; as it is if it is none."""
    try:
        found = datetime.fromisoformat(created)
    except ValueError:
        return created
    return found.replace(tzinfo=found.tzinfo or UTC).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def count(number: int, singular: str, plural: str = "") -> str:
    """As in `1 seed`, `16 seeds`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
