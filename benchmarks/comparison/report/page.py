"""The report of a comparison: one self-contained HTML page without scripts."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from comparison.analysis.schema import Summary
from comparison.report import numbers, sections

HERE = Path(__file__).parent


def write(summary: Summary, path: Path) -> None:
    """Write the report to `path`. It is deterministic: equal summaries give identical files."""
    path.write_text(render(summary), encoding="utf-8", newline="\n")


def render(summary: Summary) -> str:
    """Render the report as HTML."""
    settings = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(HERE), **settings)  # type: ignore[arg-type]
    for name in ("count", "duration", "moment"):
        environment.filters[name] = getattr(numbers, name)
    cells = [sections.CellView(i, cell) for i, cell in enumerate(summary.cells)]
    style = Markup((HERE / "style.css").read_text(encoding="utf-8"))
    page = environment.get_template("page.html.j2")
    return page.render(summary=summary, cells=cells, about=sections.about(summary), style=style)
