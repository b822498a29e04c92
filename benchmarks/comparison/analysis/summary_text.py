"""The findings of a cell in sentences, no more than the numbers support, and the phrases that all sentences share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from comparison.analysis.inference import LEVEL
from comparison.analysis.schema import DECIMALS, METRICS, Cell, Contrast, Difference, Metric

NAMES: dict[Metric, str] = {
    "accuracy": "Accuracy (more is better)",
    "nll": "NLL (less is better)",
    "ece": "ECE (less is better)",
}
MANY = 3
"""More arms than this are counted rather than named one by one, where a sentence is about all of them."""
UNCLEAR = "cannot be distinguished"


def findings(cell: Cell) -> Iterator[str]:
    """What was found, metric by metric."""
    against = compared(cell)
    if not against:
        yield f"Nothing can be said: no regularizer has a complete pair with {baseline_name(cell)}."
        return
    for metric in METRICS:
        found = {name: of_arm[metric] for name, of_arm in against.items()}
        said = [f"{NAMES[metric]}: {_to_none(found, baseline_name(cell))}.", _corrected(found), *_other_images(found)]
        yield " ".join(said)
        if among := [pair for pair in cell.between if pair.metric == metric]:
            yield f"{NAMES[metric]}, among the regularizers: {_among(among)}"


def _to_none(found: dict[str, Difference], none: str) -> str:
    parts = []
    for verdict in ("above", "below", UNCLEAR):
        if names := [name for name, one in found.items() if one.verdict == verdict]:
            said = f"{verdict} from" if verdict == UNCLEAR else f"{'is' if len(names) == 1 else 'are'} {verdict}"
            parts.append(f"{_all_or(names, found)} {said} {none}")
    return "; ".join(parts)


def _corrected(found: dict[str, Difference]) -> str:
    """What the permutation test says after Holm's correction."""
    left = {name: one.p_holm for name, one in found.items() if one.p_holm <= LEVEL}
    if len(left) == len(found) > MANY:
        said = f"all {len(left)} differ (p = {min(left.values()):.2g} to {max(left.values()):.2g})"
    elif left:
        each = [f"{name} (p = {p:.2g})" for name, p in left.items()]
        said = f"{listed(each)} differ{'s' if len(left) == 1 else ''}"
    else:
        said = "nothing differs"
    return f"By the permutation test with Holm's correction over {plural(len(found), 'test')}, {said} at 5 %."


def _all_or(names: Sequence[str], found: dict[str, Difference]) -> str:
    """The names, or how many they are if they are all of many."""
    return f"all {len(names)}" if len(names) == len(found) > MANY else listed(names)


def _other_images(found: dict[str, Difference]) -> Iterator[str]:
    """Verdicts that do not outlast other test images."""
    if lost := [
        name for name, one in found.items() if one.verdict != UNCLEAR and one.low_images <= 0 <= one.high_images
    ]:
        yield f"With test images redrawn too, the interval of {listed(lost)} covers 0: it may hold for these only."


def _among(pairs: Sequence[Contrast]) -> str:
    apart = [
        f"{pair.a} is {pair.difference.verdict} {pair.b} ({interval_text(pair.difference, pair.metric)})"
        for pair in pairs
        if pair.difference.verdict != UNCLEAR
    ]
    if not apart:
        return f"{'the pair' if len(pairs) == 1 else f'the {len(pairs)} pairs'} cannot be distinguished."
    rest = len(pairs) - len(apart)
    others = f"; the other {rest} of {len(pairs)} pairs cannot be distinguished" if rest else ""
    left = sum(pair.difference.p_holm <= LEVEL for pair in pairs)
    differing = f"{plural(left, 'pair')} differ{'s' if left == 1 else ''}" if left else "no pair differs"
    return f"{listed(apart)}{others}. By the permutation test with Holm's correction, {differing} at 5 %."


def listed(items: Sequence[str]) -> str:
    """As in `a, b and c`."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def plural(count: int, word: str) -> str:
    """As in `1 pair` and `2 pairs`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def baseline_name(cell: Cell) -> str:
    """The name of the arm without a regularizer."""
    return cell.arms[0].name


def compared(cell: Cell) -> dict[str, dict[Metric, Difference]]:
    """The differences to none, without the controls."""
    return {arm.name: arm.against_none for arm in cell.arms if arm.against_none and arm.kind != "control"}


def interval_text(found: Difference, metric: Metric) -> str:
    """Mean and interval over seeds, as `+1.25 [+0.50, +2.00]`; one pair has no interval."""
    mean, low, high = (f"{value:+.{DECIMALS[metric]}f}" for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]" if len(found.values) > 1 else f"{mean} [1 pair]"
