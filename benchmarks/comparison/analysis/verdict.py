"""The first paragraph of a report, in plain words: what helped, hurt or is unclear, and what was compared."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from comparison.analysis.schema import DECIMALS, NO_CALL, Call, Cell, Metric
from comparison.analysis.text import compared, join, plural

PLAIN: dict[Metric, str] = {"accuracy": "accuracy", "nll": "test loss (NLL)", "ece": "calibration error (ECE)"}


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
        times = [(name, one.called(noise), 100 * abs(one.median - 1)) for name, one in ratios]
        found["training time"] = [Change(*one, f"{one[-1]:.0f} %") for one in times]
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
