"""The report of a comparison: one self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from comparison.analysis.schema import BETTER, DECIMALS, METRICS, TITLES, Summary
from comparison.report import numbers, strips, view

HERE = Path(__file__).parent
FILTERS = (
    "plain",
    "signed",
    "general",
    "sortable",
    "probability",
    "interval",
    "verdict",
    "duration",
    "moment",
    "count",
)


def write(summary: Summary, path: Path) -> None:
    """Write the report to `path`. It is deterministic: equal summaries give identical files."""
    path.write_text(render(summary), encoding="utf-8", newline="\n")


def render(summary: Summary) -> str:
    """Render the report as HTML."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            summary=summary,
            # pydantic's JSON encodes NaN as null, which browsers can parse.
            data=json.loads(summary.model_dump_json()),
            cells=[view.CellView(i, cell) for i, cell in enumerate(summary.cells)],
            sentence=view.sentence(summary),
            environments=view.environments(summary.environments),
            style=Markup(style),
            script=Markup(script),
            digest=_digest(script),
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for name in FILTERS:
        environment.filters[name] = getattr(numbers, name)
    environment.tests["finite"] = math.isfinite
    environment.filters["levels"] = strips.levels
    environment.globals.update(METRICS=METRICS, TITLES=TITLES, BETTER=BETTER, DECIMALS=DECIMALS, strips=strips)
    return environment


def _digest(script: str) -> str:
    """The hash of the only script that the page's Content-Security-Policy allows."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
