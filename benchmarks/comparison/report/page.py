"""The report of a comparison: one HTML page that needs nothing else, no network either."""

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
    """Write the page to `path`; the same summary makes the same bytes."""
    path.write_text(render(summary), encoding="utf-8", newline="\n")


def render(summary: Summary) -> str:
    """The page's HTML."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            summary=summary,
            # Through pydantic's own JSON: NaN becomes null, which a browser can parse.
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
    """What the page's own policy lets run: this script and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
