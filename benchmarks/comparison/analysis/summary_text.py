"""Sentences that report the findings of a cell, limited to what the results support."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from comparison.analysis.inference import LEVEL
from comparison.analysis.schema import DECIMALS, METRICS, Cell, Contrast, Difference, Metric

NAMES: dict[Metric, str] = {
    "accuracy": "Accuracy (higher is better)",
    "nll": "NLL (lower is better)",
    "ece": "ECE (lower is better)",
}
MANY = 3
"""A sentence about all arms counts them instead of naming them if there are more than this."""
UNCLEAR = "cannot be distinguished"


def findings(cell: Cell) -> Iterator[str]:
    """The findings for each metric."""
    against = compared(cell)
    if not against:
        yield f"No results: no regularizer has a complete pair with {baseline_name(cell)}."
        return
    for metric in METRICS:
        found = {name: of_arm[metric] for name, of_arm in against.items()}
        verdicts = _verdicts(found, baseline_name(cell))
        yield " ".join([f"{NAMES[metric]}: {verdicts}.", _significance(found), *_image_dependence(found)])
        if among := [pair for pair in cell.between if pair.metric == metric]:
            yield f"{NAMES[metric]}, between regularizers: {_between(among)}"


def _verdicts(found: dict[str, Difference], none: str) -> str:
    parts = []
    for verdict in ("above", "below", UNCLEAR):
        names = [name for name, one in found.items() if one.verdict == verdict]
        if verdict == UNCLEAR and len(names) == len(found) > MANY:
            return f"no arm can be distinguished from {none}"
        if names:
            verb = f"{verdict} from" if verdict == UNCLEAR else f"{'is' if len(names) == 1 else 'are'} {verdict}"
            parts.append(f"{_names_or_count(names, found)} {verb} {none}")
    return "; ".join(parts)


def _significance(found: dict[str, Difference]) -> str:
    """The result of the permutation test after Holm's correction."""
    significant = {name: one.p_holm for name, one in found.items() if one.p_holm <= LEVEL}
    if len(significant) == len(found) > MANY:
        low, high = min(significant.values()), max(significant.values())
        result = f"all {len(significant)} arms differ significantly (p = {low:.2g} to {high:.2g})"
    elif significant:
        each = [f"{name} (p = {p:.2g})" for name, p in significant.items()]
        result = f"{join(each)} differ{'s' if len(significant) == 1 else ''} significantly"
    else:
        result = "no arm differs significantly"
    return f"In the permutation test with Holm's correction over {plural(len(found), 'test')}, {result} at 5 %."


def _names_or_count(names: Sequence[str], found: dict[str, Difference]) -> str:
    """The names, or their count if they are all of many arms."""
    return f"all {len(names)} arms" if len(names) == len(found) > MANY else join(names)


def _image_dependence(found: dict[str, Difference]) -> Iterator[str]:
    """Verdicts that do not hold when test images are resampled."""
    if lost := [
        name for name, one in found.items() if one.verdict != UNCLEAR and one.low_images <= 0 <= one.high_images
    ]:
        yield (
            f"When test images are resampled too, the interval of {join(lost)} covers 0, so the result may be specific "
            "to these images."
        )


def _between(pairs: Sequence[Contrast]) -> str:
    """The pairs that differ, by name unless there are many; the report and the summary list all of them."""
    apart = [pair for pair in pairs if pair.difference.verdict != UNCLEAR]
    if not apart:
        return f"{'the pair' if len(pairs) == 1 else f'the {len(pairs)} pairs'} cannot be distinguished."
    if len(apart) > MANY:
        named = f"the intervals of {len(apart)} of {len(pairs)} pairs exclude 0"
    else:
        rest = len(pairs) - len(apart)
        named = join([_named(pair) for pair in apart])
        named += f"; the other {rest} of {len(pairs)} pairs cannot be distinguished" if rest else ""
    count = sum(pair.difference.p_holm <= LEVEL for pair in pairs)
    result = f"{plural(count, 'pair')} differ{'s' if count == 1 else ''}" if count else "no pair differs"
    return f"{named}. In the permutation test with Holm's correction, {result} significantly at 5 %."


def _named(pair: Contrast) -> str:
    return f"{pair.a} is {pair.difference.verdict} {pair.b} ({interval_text(pair.difference, pair.metric)})"


def join(items: Sequence[str]) -> str:
    """Join items as in `a, b and c`."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def plural(count: int, word: str) -> str:
    """Format a count, such as `1 pair` or `2 pairs`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def baseline_name(cell: Cell) -> str:
    """The name of the arm without a regularizer."""
    return cell.arms[0].name


def compared(cell: Cell) -> dict[str, dict[Metric, Difference]]:
    """The differences from none, without controls and references."""
    return {
        arm.name: arm.against_none for arm in cell.arms if arm.against_none and arm.kind not in ("control", "reference")
    }


def interval_text(found: Difference, metric: Metric) -> str:
    """Mean and interval over seeds, such as `+1.25 [+0.50, +2.00]`; a single pair has no interval."""
    mean, low, high = (f"{value:+.{DECIMALS[metric]}f}" for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]" if len(found.values) > 1 else f"{mean} [1 pair]"
