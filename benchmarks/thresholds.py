"""Thresholds on ratios of times that hookdrop must meet or aims at, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import peers
from cost import Samples, Spread, disturbed, ratios
from terminal import say


@dataclass(frozen=True)
class Threshold:
    """A bound on the ratio of two times, `over` / `under`: one that must hold, and a stricter one to aim at."""

    over: str
    under: str
    must: float
    aim: float
    at_least: bool = False

    def holds(self, ratio: float, bound: float) -> bool:
        """Whether the ratio is on the right side of the bound."""
        return ratio >= bound if self.at_least else ratio <= bound

    def text(self, bound: float) -> str:
        """As in `<= 1.3`."""
        return f"{'>=' if self.at_least else '<='} {bound:g}"

    def judged(self, samples: Mapping[str, Samples]) -> dict[str, Any]:
        """The ratio in these times, and what the median says of the bounds."""
        ratio = ratios(samples, self.over, self.under)
        found = {"must_holds": self.holds(ratio.median, self.must), "aim_holds": self.holds(ratio.median, self.aim)}
        return {**asdict(self), "ratio": ratio._asdict(), **found}

    def without_kernel(self) -> Threshold:
        """The same for hookdrop without its compiled loops."""
        over, under = (name + peers.NO_KERNEL if name.startswith("hookdrop") else name for name in self.pair)
        return replace(self, over=over, under=under)

    @property
    def pair(self) -> tuple[str, str]:
        """Both names."""
        return self.over, self.under


THRESHOLDS = (
    Threshold(peers.TORCHVISION, peers.BATCH, must=12, aim=30, at_least=True),
    Threshold(peers.TIMM, peers.BATCH, must=12, aim=30, at_least=True),
    Threshold(peers.BATCH, peers.LIMIT, must=3.0, aim=1.3),
    Threshold(peers.EXPECTED, peers.LIMIT, must=2.4, aim=1.1),
    Threshold(peers.TORCH_DROPOUT, peers.BATCH, must=4, aim=10, at_least=True),
    Threshold(peers.SHARED, peers.TIMM_SHARED, must=1.1, aim=0.8),
    Threshold(peers.DROPOUT, peers.TORCH_DROPOUT, must=1.0, aim=0.2),
)
BYTES_MUST, BYTES_AIM = 0.05, 0.02
"""Bytes kept for the backward pass, per element, at p = 0.1 in blocks of 7."""
BLOCKS_MUST, COMPILED_MUST, STEP_MUST = 1.3, 1.2, 50.0
"""Slowest / fastest block size; compiled / eager; microseconds for each site of an optimizer step."""
BUSY = 0.2
"""The fraction of turns that may be disturbed without a word."""


def beware(console: Console, samples: Mapping[str, Samples], where: str) -> None:
    """Say so if the machine was busy with something else."""
    if (share := disturbed(samples)) > BUSY:
        say(console, f"  beware: {where}, in {share:.0%} of the turns something else was given a core; see speed.py.")


def word(holds: bool) -> str:
    """The verdict."""
    return "holds" if holds else "misses"


def table(title: str, judged: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """One row for each threshold, one column for each shape."""
    shown = new_table(title, "ratio of times", "must", "aim", *judged)
    for row in zip(*judged.values(), strict=True):
        threshold = Threshold(*(row[0][name] for name in ("over", "under", "must", "aim", "at_least")))
        verdicts = (f"{Spread(**cell['ratio'])}\n{_verdict(cell)}" for cell in row)
        shown.add_row(
            " / ".join(threshold.pair), threshold.text(threshold.must), threshold.text(threshold.aim), *verdicts
        )
    return shown


def new_table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title, title_justify="left")
    for i, column in enumerate(columns):
        shown.add_column(column, justify="right" if i else "left", no_wrap=True)
    return shown


def _verdict(cell: Mapping[str, Any]) -> str:
    return f"{word(cell['must_holds'])}, aim {word(cell['aim_holds'])}"
