"""The sentences of a report: the verdict, what limits it, and the controls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from comparison.analysis.inference import LEVEL, more_than_chance
from comparison.analysis.pairs import NOT_RUN
from comparison.analysis.schema import DECIMALS, METRICS, SHORT, Cell, Difference, Metric

UNITS: dict[Metric, str] = {"accuracy": "points of accuracy", "nll": "nats", "ece": "points of ECE"}


def verdict(cell: Cell) -> str:
    """One sentence: the best and the worst arm in accuracy, and what cannot be told apart from none."""
    none, where = f"“{cell.arms[0].name}”", f"On “{cell.title}”,"
    found = {name: of_arm["accuracy"] for name, of_arm in compared(cell).items()}
    if not found:
        return f"{where} no regularizer has a complete pair with {none}."
    if not any(value for one in found.values() for value in one.values):
        return f"{where} all arms are equal: every run has the accuracy of its pair with {none}."
    best, *_, worst = ranked = sorted(found, key=lambda name: -found[name].mean) * (2 if len(found) == 1 else 1)
    high, low = (f"“{name}” ({interval_text(found[name], 'accuracy')})" for name in (best, worst))
    unclear = [name for name in ranked if not found[name].clear]
    if len(found) == 1:
        against = "cannot be told apart from"
        if found[best].clear:
            against = "is better than" if found[best].better("accuracy") else "is worse than"
        return f"{where} {high} {against} {none} in accuracy."
    if len(unclear) == len(found):
        return (
            f"{where} no regularizer can be told apart from {none} in accuracy; the mean difference is highest with "
            f"{high} and lowest with {low}."
        )
    text = f"{where} accuracy against {none} is highest with {high} and lowest with {low}"
    if found[best].mean <= 0:
        text = f"{where} accuracy is highest with {none}; the closest is {high} and the lowest {low}"
    names = join([f"“{name}”" for name in unclear])
    return f"{text}; {names} cannot be told apart from {none}." if unclear else f"{text}."


def notes(cell: Cell) -> Iterator[str]:
    """What limits the verdict: missing pairs, power, tuning and data."""
    others, found = cell.arms[1:], compared(cell)
    if cell.fit and cell.fit[1] > 0.9 * cell.fit[0]:
        yield (
            f"Hardly trained: the training loss of “{cell.arms[0].name}” went from {cell.fit[0]:.2f} to "
            f"{cell.fit[1]:.2f} in {plural(cell.steps, 'step')}. "
            "Raise epochs or the learning rate: there is nothing to regularize yet."
        )
    if waiting := sum(why.split(": ")[-1] == NOT_RUN for arm in others for why in arm.set_aside.values()):
        yield (
            f"Not finished: {plural(waiting, 'pair')} missing. The number of seeds was fixed in advance; stopping "
            "early based on the results would make intervals and p too small."
        )
    if aside := sum(len(arm.set_aside) for arm in others):
        yield f"Excluded: {plural(aside, 'pair')}; see the runs."
    if found:
        yield from _power(cell.arms[0].name, found)
    if edge := [f"{arm.name} ({join(arm.tuning.at_edge)})" for arm in cell.arms if arm.tuning and arm.tuning.at_edge]:
        yield f"Tuned to the edge of the search space, so a better value may lie outside: {join(edge)}."
    if fixed := [arm.name for arm in others if arm.compared and not arm.tuning and not arm.like]:
        yield f"Fixed in advance, not tuned, so not necessarily at the best rate: {join(fixed)}."
    if found:
        yield f"The seeds differ in {join(cell.varied)}; all use the same {plural(cell.test_images, 'test image')}."
    yield from cell.remarks


def _power(none: str, found: dict[str, dict[Metric, Difference]]) -> Iterator[str]:
    count, pairs = len(found) * len(METRICS), max(len(of["accuracy"].values) for of in found.values())
    smallest = min(1.0, len(found) * min(of["accuracy"].p_smallest for of in found.values()))
    yield (
        f"Verdicts are based on {plural(count, 'uncorrected 95 % interval')} (bootstrap over seeds): without any true "
        f"differences, about {0.05 * count:.2g} of them would still exclude 0. With {plural(pairs, 'pair')}, the "
        f"smallest possible p after Holm's correction over {plural(len(found), 'difference')} is {smallest:.2g}."
        f"{' No difference can be significant at 5 %.' if smallest > LEVEL else ''}"
    )
    sizes = {metric: sorted(of[metric].mde or 0 for of in found.values() if of[metric].mde) for metric in METRICS}
    if known := [f"{_range(sizes[metric], DECIMALS[metric])} {UNITS[metric]}" for metric in METRICS if sizes[metric]]:
        yield (
            f"Differences from {none} below {join(known)} are detected with less than 80 % power (paired t test at "
            "5 %, observed spread, depending on the arm). Arms that cannot be told apart are not necessarily equal."
        )


def controls(cell: Cell) -> list[tuple[str, bool | None, str]]:
    """Each control: the question, whether it holds (None: not measured), and the numbers behind it."""
    found, none = cell.controls, cell.arms[0].name if cell.arms else "none"
    chance = found.none_none
    outside = [f"{SHORT[metric]} {interval_text(one, metric)}" for metric, one in (chance or {}).items() if one.clear]
    return [
        (
            f"Is the arm with p = 0 injected (A/A) bit-identical to {none}, in weights and outputs?",
            found.aa_equal == found.aa_seeds if found.aa_seeds else None,
            f" ({found.aa_equal} of {plural(found.aa_seeds, 'seed')})",
        ),
        (
            f"Is the difference between {none} with other seeds and {none} consistent with chance?",
            None if chance is None else not more_than_chance(chance),
            f" (after Holm's correction; 0 is outside the 95 % interval of {join(outside)})" if outside else "",
        ),
        ("Did all arms of a seed have the same initial weights and batches?", found.paired, ""),
        (
            "Were state_dict, repr and eval output bit-identical with hooks and after remove()?",
            found.unchanged == found.hooked if found.hooked else None,
            f" ({found.unchanged} of {plural(found.hooked, 'run')})",
        ),
    ]


def control_sentences(cell: Cell) -> Iterator[str]:
    """The answers to the questions of the controls."""
    for question, holds, numbers in controls(cell):
        answer = "not measured" if holds is None else f"{'yes' if holds else 'no'}{numbers}"
        yield f"{'Warning' if holds is False else 'Control'}: {question} {answer}."


def compared(cell: Cell) -> dict[str, dict[Metric, Difference]]:
    """The differences from none, without controls and references."""
    return {arm.name: arm.against_none for arm in cell.arms if arm.compared and arm.against_none}


def interval_text(found: Difference, metric: Metric) -> str:
    """Mean and interval over seeds, such as `+1.25 [+0.50, +2.00]`; a single pair has no interval."""
    mean, low, high = (f"{value:+.{DECIMALS[metric]}f}" for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]" if len(found.values) > 1 else f"{mean} [1 pair]"


def join(items: Sequence[str]) -> str:
    """Join items as in `a, b and c`."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def plural(count: int, word: str) -> str:
    """Format a count, such as `1 pair` or `2 pairs`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def _range(values: Sequence[float], decimals: int) -> str:
    return " to ".join(dict.fromkeys(f"{value:.{decimals}f}" for value in (values[0], values[-1])))
