"""Phrases that the sentences and the table are made of."""

from __future__ import annotations

from collections.abc import Sequence

from comparison.analysis.schema import DECIMALS, Cell, Difference, Metric

NAMES: dict[Metric, str] = {
    "accuracy": "Accuracy (more is better)",
    "nll": "NLL (less is better)",
    "ece": "ECE (less is better)",
}
UNCLEAR = "cannot be distinguished"


def listed(items: Sequence[str]) -> str:
    """As in `a, b and c`."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def plural(count: int, word: str) -> str:
    """As in `1 pair` and `2 pairs`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def of_none(cell: Cell) -> str:
    """The name of the arm without a regularizer."""
    return cell.arms[0].name


def compared(cell: Cell) -> dict[str, dict[Metric, Difference]]:
    """The differences to none, without the controls."""
    return {arm.name: arm.against_none for arm in cell.arms if arm.against_none and arm.kind != "control"}


def text(found: Difference, metric: Metric) -> str:
    """Mean and interval over seeds, as `+1.25 [+0.50, +2.00]`; one pair has no interval."""
    mean, low, high = (f"{value:+.{DECIMALS[metric]}f}" for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]" if len(found.values) > 1 else f"{mean} [1 pair]"
