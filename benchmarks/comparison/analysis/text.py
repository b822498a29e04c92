"""The sentences around the verdict, from `sentences.j2`: what to read before it, what limits it, and the controls."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from comparison.analysis.inference import more_than_chance, pairs_needed
from comparison.analysis.pairs import NOT_RUN
from comparison.analysis.schema import DECIMALS, LEVEL, METRICS, NO_CALL, SHORT, Cell, Difference, Metric, Spread

UNITS: dict[Metric, str] = {"accuracy": "points of accuracy", "nll": "nats", "ece": "points of ECE"}


def environment(*folders: Path, **options: Any) -> Environment:
    """The environment of all templates."""
    options |= {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    found = Environment(loader=FileSystemLoader([*folders, Path(__file__).parent]), **options)
    found.filters |= {"count": plural, "listed": join, "times": times}
    return found


def sentences(cell: Cell, *parts: Literal["cautions", "notes", "controls"]) -> list[str]:
    """What may make the verdict void, to be read before it; what limits it; and the controls."""
    found, chance = compared(cell), cell.controls.none_none or {}
    every = [(of[metric], metric) for of in found.values() for metric in METRICS]
    mdes = {of: sorted(one.mde for one, metric in every if metric == of and one.mde) for of in METRICS}
    ends = {of: dict.fromkeys(f"{one:.{DECIMALS[of]}f}" for one in mdes[of][:1] + mdes[of][-1:]) for of in METRICS}
    facts: dict[str, Any] = {
        "cell": cell,
        "variants": len(found),
        "level": LEVEL,
        "smallest": min((len(found) * of["accuracy"].p_smallest for of in found.values()), default=0.0),
        "needed": pairs_needed(len(found)),
        "reasons": [why for arm in cell.arms[1:] for why in arm.set_aside.values()],
        "not_run": NOT_RUN,
        "moved": any(value for one, metric in every if metric == "accuracy" for value in one.values),
        "alone": sum(one.low * one.high > 0 and one.called(metric) == NO_CALL for one, metric in every),
        "sizes": [f"{' to '.join(of)} {UNITS[metric]}" for metric, of in ends.items() if any(map(float, of))],
        "by_chance": not more_than_chance(chance) if chance else None,
        "outside": [f"{SHORT[of]} {interval_text(one, of)}" for of, one in chance.items() if one.low * one.high > 0],
    }
    module = environment().get_template("sentences.j2").make_module(facts)
    return [" ".join(one.split()) for part in parts for one in getattr(module, part)().split("\n* ")[1:]]


def compared(cell: Cell) -> dict[str, dict[Metric, Difference]]:
    """The differences from none, without controls and references."""
    return {arm.name: arm.against_none for arm in cell.arms if arm.compared and arm.against_none}


def interval_text(found: Difference, metric: Metric, exact: bool = False) -> str:
    """Mean and interval over seeds, such as `+1.25 [+0.50, +2.00]`."""
    return f"{found.mean:+.{DECIMALS[metric]}f} {limits(found.low, found.high, metric, len(found.values), exact)}"


def limits(low: float, high: float, metric: Metric, pairs: int, exact: bool = False) -> str:
    """An interval. A single pair or equal differences have none, except those of a control, which are `exact`."""
    if low == high and not exact:
        return "[1 pair]" if pairs == 1 else "[no spread]"
    decimals = DECIMALS[metric]
    while low < high and round(low, decimals) == round(high, decimals):  # never `[-0.000, +0.000]`
        decimals += 1
    return f"[{low:+.{decimals}f}, {high:+.{decimals}f}]"


def times(of: Spread) -> str:
    """The median ratio with its quartiles, such as `1.19x [1.09, 1.26]`; the baseline has none."""
    return f"{of.median:.2f}x" + (f" [{of.low:.2f}, {of.high:.2f}]" if of.low < of.high else "")


def join(items: Sequence[str]) -> str:
    """Join items as in `a, b and c`."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def plural(count: int, word: str) -> str:
    """Format a count, such as `1 pair` or `2 pairs`."""
    return f"{count} {word}{'' if count == 1 else 's'}"
