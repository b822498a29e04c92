"""The color, marker and dash of each arm in all figures, so that arms never differ in color alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from comparison.analysis.schema import ArmSummary

COLORS = 8
"""`--arm-0` (text color, for none) to `--arm-7` in style.css: the Okabe-Ito palette."""
MARKERS = {
    "o": "M-3.5,0a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0z",
    "s": "M-3,-3h6v6h-6z",
    "^": "M0,-4l4,7h-8z",
    "D": "M0,-4l4,4l-4,4l-4,-4z",
    "v": "M0,4l4,-7h-8z",
    "P": "M-1.3,-4h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7v-2.6h2.7z",
    "p": "M0,-4l3.8,2.8l-1.5,4.4h-4.6l-1.5,-4.4z",
}
"""Matplotlib's marker names, and their SVG paths around (0, 0) for swatches."""
DASHES: tuple[tuple[float, ...], ...] = ((6, 2), (2, 2), (7, 2, 2, 2), (4, 3), (8, 2, 2, 2, 2, 2))


@dataclass(frozen=True)
class ArmStyle:
    """The style of an arm."""

    color: int
    marker: str
    dash: tuple[float, ...]

    @property
    def path(self) -> str:
        """The marker as an SVG path."""
        return MARKERS[self.marker]

    @property
    def dasharray(self) -> str:
        """The dash as an SVG attribute."""
        return " ".join(f"{length:g}" for length in self.dash)


def arm_styles(arms: Sequence[ArmSummary]) -> list[ArmStyle]:
    """A unique style for each arm, in order."""
    markers, styles, count = list(MARKERS)[1:], [], 0
    for arm in arms:
        if arm.kind == "none":
            styles.append(ArmStyle(0, "o", ()))
            continue
        # 7 colors, 6 markers and 5 dashes give 210 different combinations.
        styles.append(ArmStyle(1 + count % (COLORS - 1), markers[count % len(markers)], DASHES[count % len(DASHES)]))
        count += 1
    return styles
