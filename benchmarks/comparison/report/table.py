"""The terminal table of a cell."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from comparison.analysis.schema import DECIMALS, METRICS, ArmSummary, Cell, Metric
from comparison.analysis.text import interval_text

WIDTH = 130
COLUMNS = (
    "arm",
    "rate\n",
    "asked\n",
    "dropped\n± 95 %",
    "accuracy\n%",
    "NLL\nnats",
    "ECE\n%",
    "accuracy - none\n[95 %], points",
    "NLL - none\n[95 %], nats",
    "Holm's p\nacc. / NLL",
    "time\n/ none",
)
DIFFERENCES: tuple[Metric, ...] = ("accuracy", "nll")
NOTHING = "-"


def table(cell: Cell) -> Table:
    """Two lines per arm, at most `WIDTH` columns; long names are folded."""
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, title=escape(cell.title))
    shown.add_column(COLUMNS[0], overflow="fold", min_width=20)
    for column in COLUMNS[1:]:
        shown.add_column(column, justify="right", no_wrap=True)
    for arm in cell.arms:
        shown.add_row(*_row(arm))
    return shown


def _row(arm: ArmSummary) -> list[str]:
    against = arm.against_none
    row = [escape(arm.name), _number(arm.rate_at_end, ".3g"), _number(arm.asked, ".3f"), _dropped(arm)]
    row += [_number(arm.means.get(metric), f".{DECIMALS[metric]}f") for metric in METRICS]
    row += [
        interval_text(against[metric], metric).replace(" ", "\n", 1) if against else NOTHING for metric in DIFFERENCES
    ]
    corrected = against and arm.kind not in ("control", "reference")
    row.append(
        " / ".join(f"{against[metric].p_holm:.3f}" for metric in DIFFERENCES) if against and corrected else NOTHING
    )
    return [*row, f"{arm.time.median:.2f}x" if arm.time else NOTHING]


def _dropped(arm: ArmSummary) -> str:
    half = "" if arm.dropped_half is None else f" ± {arm.dropped_half:.3f}"
    return _number(arm.dropped, ".3f") + half


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)
