"""How an arm looks in every figure: a colour, a marker and a dash, so that the colour is never the only sign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from comparison.analysis.schema import ArmFound

COLOURS = 8
"""`--arm-0` (text colour, for none) to `--arm-7` of style.css: Okabe's and Ito's."""
MARKERS = {
    "o": "M-3.5,0a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0z",
    "s": "M-3,-3h6v6h-6z",
    "^": "M0,-4l4,7h-8z",
    "D": "M0,-4l4,4l-4,4l-4,-4z",
    "v": "M0,4l4,-7h-8z",
    "P": "M-1.3,-4h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7v-2.6h2.7z",
    "p": "M0,-4l3.8,2.8l-1.5,4.4h-4.6l-1.5,-4.4z",
}
"""Matplotlib's name of each marker, and its path around (0, 0) for swatches."""
DASHES: tuple[tuple[float, ...], ...] = ((6, 2), (2, 2), (7, 2, 2, 2), (4, 3), (8, 2, 2, 2, 2, 2))


@dataclass(frozen=True)
class Look:
    """One arm's."""

    colour: int
    marker: str
    dash: tuple[float, ...]

    @property
    def path(self) -> str:
        """The marker as SVG."""
        return MARKERS[self.marker]

    @property
    def dasharray(self) -> str:
        """The dash as SVG."""
        return " ".join(f"{length:g}" for length in self.dash)


def looks_of(arms: Sequence[ArmFound]) -> list[Look]:
    """A look for each arm, in order; no two are the same."""
    markers, looks, count = list(MARKERS)[1:], [], 0
    for arm in arms:
        if arm.kind == "none":
            looks.append(Look(0, "o", ()))
            continue
        # 7 colours, 6 markers, 5 dashes: the combination comes again after 210.
        looks.append(Look(1 + count % (COLOURS - 1), markers[count % len(markers)], DASHES[count % len(DASHES)]))
        count += 1
    return looks
