"""What may be said of a cell, in sentences, and no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from comparison.analysis import caveats
from comparison.analysis.inference import LEVEL
from comparison.analysis.schema import METRICS, Between, Cell, Difference
from comparison.analysis.summary_text import NAMES, UNCLEAR, compared, listed, of_none, plural, text

MANY = 3
"""All of more arms are counted, and not named one by one."""


def findings(cell: Cell) -> list[str]:
    """What was found, and what has to be known before; of a cell whose own words are not there yet."""
    return [*caveats.first(cell), *_findings(cell)]


def words(cell: Cell) -> list[str]:
    """Findings, and what goes with them."""
    return [*findings(cell), *caveats.after(cell)]


def _findings(cell: Cell) -> Iterator[str]:
    against = compared(cell)
    if not against:
        yield f"Nothing can be said: no regularizer has a complete pair with {of_none(cell)}."
        return
    for metric in METRICS:
        found = {name: of_arm[metric] for name, of_arm in against.items()}
        said = [f"{NAMES[metric]}: {_to_none(found, of_none(cell))}.", _corrected(found), *_other_images(found)]
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


def _among(pairs: Sequence[Between]) -> str:
    apart = [
        f"{pair.a} is {pair.difference.verdict} {pair.b} ({text(pair.difference, pair.metric)})"
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
