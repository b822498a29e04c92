"""Required and target ratios of times, and whether hookdrop meets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import peers
from terminal import say
from timing import Quartiles, Samples, preempted_fraction, ratios


@dataclass(frozen=True)
class Threshold:
    """Bounds on the ratio of two times, `over` / `under`: `must` is required, `aim` is a stricter target."""

    over: str
    under: str
    must: float
    aim: float
    at_least: bool = False

    def meets(self, ratio: float, bound: float) -> bool:
        """Return whether the ratio meets the bound."""
        return ratio >= bound if self.at_least else ratio <= bound

    def text(self, bound: float) -> str:
        """Format as `<= 1.3`."""
        return f"{'>=' if self.at_least else '<='} {bound:g}"

    def evaluate(self, samples: Mapping[str, Samples]) -> dict[str, Any]:
        """Compute the ratio, and whether its median meets the bounds."""
        ratio = ratios(samples, self.over, self.under)
        found = {"must_holds": self.meets(ratio.median, self.must), "aim_holds": self.meets(ratio.median, self.aim)}
        return {**asdict(self), "ratio": ratio._asdict(), **found}

    def without_kernel(self) -> Threshold:
        """Return the same threshold for hookdrop without its compiled kernel."""
        over, under = (name + peers.NO_KERNEL if name.startswith("hookdrop") else name for name in self.pair)
        return replace(self, over=over, under=under)

    @property
    def pair(self) -> tuple[str, str]:
        """The names of both implementations."""
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
BYTES = {"cpu": (0.05, 0.02), "cuda": (0.15, 0.13)}
"""Bytes per element saved for backward at p = 0.1 and block_size = 7: required, and target."""
BLOCKS_MAX = 1.3
"""Slowest / fastest block size."""
MAX_PREEMPTED = 0.2
"""A larger fraction of preempted turns gives a warning."""


def warn_if_busy(console: Console, samples: Mapping[str, Samples], where: str) -> None:
    """Print a warning if other processes often preempted the jobs."""
    if (fraction := preempted_fraction(samples)) > MAX_PREEMPTED:
        say(console, f"  warning: {where}: other processes preempted {fraction:.0%} of the turns; see speed.py.")


def verdict(met: bool) -> str:
    """Return "met" or "missed"."""
    return "met" if met else "missed"


def threshold_table(title: str, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Create a table with a row per threshold and a column per shape."""
    shown = new_table(title, "ratio of times", "required", "target", *results)
    for row in zip(*results.values(), strict=True):
        threshold = Threshold(*(row[0][name] for name in ("over", "under", "must", "aim", "at_least")))
        verdicts = (f"{Quartiles(**cell['ratio'])}\n{_verdicts(cell)}" for cell in row)
        shown.add_row(
            " / ".join(threshold.pair), threshold.text(threshold.must), threshold.text(threshold.aim), *verdicts
        )
    return shown


def new_table(title: str, *columns: str) -> Table:
    """Create a table whose first column is left-aligned and whose others are right-aligned."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title, title_justify="left")
    for i, column in enumerate(columns):
        shown.add_column(column, justify="right" if i else "left", no_wrap=True)
    return shown


def _verdicts(cell: Mapping[str, Any]) -> str:
    return f"{verdict(cell['must_holds'])}, target {verdict(cell['aim_holds'])}"
