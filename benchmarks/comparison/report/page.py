"""The report of a comparison: one self-contained HTML page without scripts."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from comparison.analysis import text
from comparison.analysis.schema import DECIMALS, SHORT, Cell, Summary
from comparison.analysis.text import sentences, verdict
from comparison.report import figures
from comparison.report.table import COLUMNS, row

HERE = Path(__file__).parent


def write(summary: Summary, path: Path) -> None:
    """Write the report to `path`. It is deterministic: equal summaries give identical files."""
    path.write_text(render(summary), encoding="utf-8", newline="\n")


def render(summary: Summary) -> str:
    environment = text.environment(HERE, autoescape=True)
    environment.filters |= {"number": number, "probability": probability, "settings": listed}
    environment.globals |= {"short": SHORT, "decimals": DECIMALS, "limits": text.limits}
    cells = [CellView(i, cell) for i, cell in enumerate(summary.cells)]
    style = Markup((HERE / "style.css").read_text(encoding="utf-8"))
    created = datetime.fromisoformat(summary.created).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = environment.get_template("page.html.j2")
    return page.render(summary=summary, cells=cells, style=style, created=created)


class CellView:
    """What the template shows of a cell; its ids start with `id`."""

    def __init__(self, index: int, cell: Cell) -> None:
        self.cell, self.id = cell, f"cell{index + 1}"
        self.verdict, self.cautions, self.notes = verdict(cell), sentences(cell, "cautions"), sentences(cell, "notes")
        # Variants by accuracy, then references and controls.
        means = {name: of["accuracy"].mean for name, of in text.compared(cell).items()}
        self.arms = sorted(cell.arms, key=lambda arm: (not arm.compared, -means.get(arm.name, 0.0)))
        self.columns, self.rows = COLUMNS, [row(arm) for arm in self.arms]
        self.controls = sentences(cell, "controls")
        controls = {arm.name for arm in self.arms if not arm.compared}
        found = {arm.name: arm.against_none for arm in self.arms if arm.against_none}
        self.against = [(name, *of_metric, name in controls) for name, of in found.items() for of_metric in of.items()]
        self.between = [(f"{pair.a} − {pair.b}", pair.metric, pair.difference, False) for pair in cell.between]
        self.picture = found and figures.differences(found, self.id, cell.arms[0].name, controls)


def number(value: float | None, decimals: int = 2, sign: str = "") -> str:
    """Format a number; a dash if it is missing or not finite."""
    return "–" if value is None or not math.isfinite(value) else f"{value:{sign}.{decimals}f}".replace("-", "−")


def probability(p: float) -> str:
    """Format a p-value with three decimals, or two significant digits below 0.001."""
    return number(p, 3) if not p < 0.001 else f"{p:.1e}".replace("e-0", "e-").replace("-", "−")


def listed(values: Mapping[str, Any]) -> str:
    """Format settings with at most one level of nesting, such as `p = 0.1, weight_decay = 0.05`."""
    (flat,) = pd.json_normalize([dict(values)]).to_dict("records")
    return ", ".join(f"{name} = {value}" for name, value in flat.items())
