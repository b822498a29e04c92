"""The table of a cell, for the report and for the terminal."""

import math

from rich import box
from rich.markup import escape
from rich.table import Table

from comparison.analysis.schema import DECIMALS, METRICS, ArmSummary, Cell, Metric
from comparison.analysis.text import interval_text, times

WIDTH, NOTHING = 130, "-"
COLUMNS = (
    *("variant", "rate\n", "requested\n", "dropped\n± 95 %", "accuracy\n%", "NLL\nnats", "ECE\n%"),
    *("accuracy - none\n[95 %], points", "NLL - none\n[95 %], nats"),
    *("Holm's p\nacc./NLL", "time / none\n[25-75 %]"),
)
DIFFERENCES: tuple[Metric, ...] = ("accuracy", "nll")


def table(cell: Cell) -> Table:
    """Two lines per arm, at most `WIDTH` columns; long names are folded."""
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, title=escape(cell.title))
    shown.add_column(COLUMNS[0], overflow="fold", min_width=20)
    for column in COLUMNS[1:]:
        shown.add_column(column, justify="right", no_wrap=True)
    for arm in cell.arms:
        shown.add_row(*map(escape, row(arm)))
    return shown


def row(arm: ArmSummary) -> list[str]:

    def number(value: float | None, form: str) -> str:
        return NOTHING if value is None or not math.isfinite(value) else format(value, form)

    found = [arm.against_none[metric] for metric in DIFFERENCES] if arm.against_none else []
    texts = [interval_text(*one, arm.kind == "control") for one in zip(found, DIFFERENCES, strict=False)]
    return [
        arm.name,
        number(arm.rate_at_end, ".3g"),
        number(arm.asked, ".3f"),
        number(arm.dropped, ".3f") + ("" if arm.dropped_half is None else f" ± {arm.dropped_half:.3f}"),
        *(number(arm.means.get(metric), f".{DECIMALS[metric]}f") for metric in METRICS),
        *([one.replace(" ", "\n", 1) for one in texts] or [NOTHING] * 2),
        " /\n".join(f"{one.p_holm:.3f}" for one in found if arm.compared) or NOTHING,
        times(arm.time).replace(" ", "\n", 1) if arm.time else NOTHING,
    ]
