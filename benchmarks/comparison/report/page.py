"""The report of a comparison: one self-contained HTML page without scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from comparison.analysis import text
from comparison.analysis.schema import DECIMALS, METRICS, SHORT, ArmSummary, Cell, Metric, Summary
from comparison.report import figures
from comparison.report.table import rows

HERE = Path(__file__).parent
ABSENT = "–"


def write(summary: Summary, path: Path) -> None:
    """Write the report to `path`. It is deterministic: equal summaries give identical files."""
    path.write_text(render(summary), encoding="utf-8", newline="\n")


def render(summary: Summary) -> str:
    """Render the report as HTML."""
    settings = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(HERE), **settings)  # type: ignore[arg-type]
    environment.filters |= {"count": text.plural, "number": number, "probability": probability}
    environment.filters |= {"limits": limits, "settings": listed}
    environment.globals |= {"short": SHORT, "decimals": DECIMALS}
    cells = [CellView(i, cell) for i, cell in enumerate(summary.cells)]
    style = Markup((HERE / "style.css").read_text(encoding="utf-8"))
    created = datetime.fromisoformat(summary.created).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = environment.get_template("page.html.j2")
    return page.render(summary=summary, cells=cells, style=style, created=created)


class CellView:
    """What the template shows of a cell; its ids start with `id`."""

    def __init__(self, index: int, cell: Cell) -> None:
        self.cell, self.id = cell, f"cell{index + 1}"
        self.verdict, self.notes = text.verdict(cell), list(text.notes(cell))
        self.arms = ranked(cell)
        self.table = rows(self.arms)
        self.controls = list(text.control_sentences(cell))
        self.failed = [question for question, holds, _ in text.controls(cell) if holds is False]
        compared = {arm.name: arm.against_none for arm in self.arms if arm.against_none}
        self.against = [(name, metric, of[metric]) for name, of in compared.items() for metric in METRICS]
        self.between = [(f"{pair.a} − {pair.b}", pair.metric, pair.difference) for pair in cell.between]
        self.pictures = [
            figures.differences(
                {name: of[metric] for name, of in compared.items()}, metric, f"{self.id}-{metric}", cell.arms[0].name
            )
            for metric in (METRICS if compared else ())
        ]


def ranked(cell: Cell) -> list[ArmSummary]:
    """Regularizers by accuracy, then references and controls."""

    def rank(arm: ArmSummary) -> tuple[bool, bool, float]:
        mean = arm.against_none["accuracy"].mean if arm.against_none else 0.0
        return not arm.compared, not math.isfinite(mean), -mean

    return sorted(cell.arms, key=rank)


def number(value: float | None, decimals: int = 2, sign: str = "") -> str:
    """Format a number; a dash if it is missing or not finite."""
    return ABSENT if value is None or not math.isfinite(value) else f"{value:{sign}.{decimals}f}".replace("-", "−")


def probability(p: float) -> str:
    """Format a p-value with three decimals, or two significant digits below 0.001."""
    return number(p, 3) if not p < 0.001 else f"{p:.1e}".replace("e-0", "e-").replace("-", "−")


def limits(interval: Sequence[float], metric: Metric) -> str:
    """Format an interval."""
    return f"[{', '.join(number(limit, DECIMALS[metric], '+') for limit in interval)}]"


def listed(values: Mapping[str, Any]) -> str:
    """Format settings with at most one level of nesting, such as `p = 0.1, weight_decay = 0.05`."""
    (flat,) = pd.json_normalize([dict(values)]).to_dict("records")
    return ", ".join(f"{name} = {value}" for name, value in flat.items())
