"""The results in plain words.

The verdict says what helped, hurt or is unclear, and what was compared. The sentences around it, from `sentences.j2`,
say what to read before it, and what limits it, and report the controls.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from comparison.analysis.inference import holm, pairs_needed
from comparison.analysis.pairs import NOT_RUN
from comparison.analysis.schema import DECIMALS, LEVEL, METRICS, NO_CALL, SHORT, Call, Cell, Difference, Metric, Spread

PLAIN: dict[Metric, str] = {"accuracy": "accuracy", "nll": "test loss (NLL)", "ece": "calibration error (ECE)"}
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
        "by_chance": min(holm([one.p for one in chance.values()])) > LEVEL if chance else None,
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


class Change(NamedTuple):
    """What a variant changed, by how much, and this as text."""

    name: str
    call: Call
    size: float
    text: str


def verdict(cell: Cell) -> str:
    if not (found := compared(cell)):
        return "No variant has a finished pair of runs: nothing can be said yet."
    low, *_, high = 2 * sorted(len(of["accuracy"].values) for of in found.values())
    pairs, images = f"{low} to " * (low < high) + plural(high, "pair"), plural(cell.test_images, "test image")
    changes = _changes(cell)
    first = _headline(changes.pop("accuracy"))
    last = f"Compared with training without a regularizer in {pairs} of runs that share the seed, on {images}."
    return " ".join([first, *_other_changes(changes), last])


def _changes(cell: Cell) -> dict[str, list[Change]]:
    """The changes of all variants in each metric, and in the time if the controls show its noise."""
    variants, found = compared(cell), dict[str, list[Change]]()
    for metric, what in PLAIN.items():
        unit, decimals = "nats" if metric == "nll" else "points", DECIMALS[metric]
        of = [(name, one[metric].called(metric), abs(one[metric].mean)) for name, one in variants.items()]
        found[what] = [Change(*one, f"{one[-1]:.{decimals}f} {unit}") for one in of]
    if (noise := cell.time_noise) is not None:
        ratios = [(arm.name, arm.time) for arm in cell.arms if arm.name in variants and arm.time]
        of = [(name, one.called(noise), 100 * abs(one.median - 1)) for name, one in ratios]
        found["training time"] = [Change(*one, f"{one[-1]:.0f} %") for one in of]
    return found


def _headline(changes: Sequence[Change]) -> str:
    groups = [("helped", _only(changes, "better")), ("hurt", _only(changes, "worse"))]
    said = [f"{len(of)} {verb} accuracy ({_largest(of)})" for verb, of in groups if of]
    count, unclear = len(changes), len(_only(changes, NO_CALL))
    if count == 1:
        verb = next((verb for verb, of in groups if of), "made no clear difference to")
        return f"{changes[0].name} {verb} accuracy{'' if unclear else f' by {changes[0].text}'}."
    if unclear == count:
        return f"None of the {count} variants made a clear difference to accuracy."
    if len(said) == 1 and not unclear:
        return f"{'Both' if count == 2 else f'All {count}'} variants {said[0].partition(' ')[2]}."
    return f"Of {count} variants, {join([*said, *[f'{unclear} made no clear difference'] * (unclear > 0)])}."


def _only(changes: Sequence[Change], call: Call) -> list[Change]:
    return [one for one in changes if one.call == call]


def _largest(changes: Sequence[Change]) -> str:
    """One or two names with their changes; of more, the largest change and at most three names that have it."""
    ranked = sorted(changes, key=lambda one: -one.size)
    if len(ranked) < 3:
        return join([f"{one.name} by {one.text}" for one in ranked])
    return f"most {join([one.name for one in ranked if one.text == ranked[0].text][:3])}, by {ranked[0].text}"


def _other_changes(changes: dict[str, list[Change]]) -> Iterator[str]:
    """What got worse or better in loss, calibration and time, and what did not change clearly."""
    for call in ("worse", "better"):
        if said := [_counted(what, some, len(of)) for what, of in changes.items() if (some := _only(of, call))]:
            yield f"What got {call}: {join(said)}."
    if still := [what for what, of in changes.items() if of and of == _only(of, NO_CALL)]:
        yield f"No clear difference in {join(still)}."


def _counted(what: str, some: Sequence[Change], count: int) -> str:
    share = f"all {count}" if len(some) == count else f"{len(some)} of {count}"
    most = max(some, key=lambda one: one.size).text
    return f"{what} {f'with {share} ' * (count > 1)}(by {'up to ' * (len(some) > 1)}{most})"
