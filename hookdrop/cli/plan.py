"""`hookdrop plan MODEL REGULARIZER ...`: show what an injection would do."""

from __future__ import annotations

import argparse
import json
from typing import Any

from torch import nn

from hookdrop.cli import models
from hookdrop.cli.console import Output
from hookdrop.injection.plan import HEADER, Plan
from hookdrop.injection.text import parse
from hookdrop.injection.verbs import plan as make_plan
from hookdrop.recipes.base import Recipe
from hookdrop.utils.select import Entry, entry_text
from hookdrop.utils.tables import counted


def show_plan(args: argparse.Namespace) -> None:
    """Print what an injection would do."""
    source = parse(args.regularizer)  # reports a typo before the model is built
    console = None if args.json else Output()
    found = models.load(args.model, args.input_size)
    options: dict[str, Any] = {"layers": found.entries(args.layers) or None, "exclude": found.entries(args.exclude)}
    options |= {name: getattr(args, name) for name in ("at", "tensor", "p_scale", "schedule", "total_steps")}
    given = {name: value for name, value in options.items() if value not in (None, [])}
    planned = make_plan(found.model, source, example_input=found.example_input, **given)
    code = _code(source, given)
    if console is None:
        print(json.dumps(_json_object(planned, found, code), indent=2))
    else:
        _show(console, planned, found, code)


def _json_object(planned: Plan, found: models.LoadedModel, code: str) -> dict[str, Any]:
    sites = [
        {"name": s.name, "type": s.type, "at": s.at, "shape": s.shape, "calls": s.calls, "reading": s.reading, "p": s.p}
        | {"regularizer": s.text}
        for s in planned.sites
    ]
    how = {"at": planned.at, "schedule": None if planned.schedule is None else repr(planned.schedule)}
    notes = {"counts": planned.counts, "warnings": planned.warnings, "code": code}
    return {**found.summary(), **how, "sites": sites, **notes}


def _show(out: Output, planned: Plan, found: models.LoadedModel, code: str) -> None:
    out.line(str(found))
    texts = {site.text for site in planned.sites}
    one = len(texts) == 1
    out.line(f"{texts.pop() if one else planned.name} on {planned.title}")
    rows = [row[:-1] if one else row for row in planned.rows]
    out.table(HEADER[: len(rows[0])], rows, dim=[site.calls == 0 for site in planned.sites])
    for entry, count in planned.counts.items():
        out.line(f"{entry}: {counted(count, 'layer')}")
    for text in planned.warnings:
        out.line(f"warning: {text}", style="bold yellow")
    out.line(f"in Python: {code}")


def _code(source: Any, options: dict[str, Any]) -> str:
    """Return the line of Python that does what the plan shows."""
    parts = ["model", f"{'recipes.' if isinstance(source, Recipe) else ''}{source!r}"]
    for name, value in options.items():
        code = f"[{', '.join(map(_entry_code, value))}]" if isinstance(value, list) else _quoted(value)
        parts.append(f"{name}={code}")
    follow = ".follow(optimizer)" if "schedule" in options else ""
    return f"drop = inject({', '.join(parts)}){follow}"


def _entry_code(entry: Entry) -> str:
    if not isinstance(entry, type):
        return _quoted(entry)
    name = entry.__name__
    return f"nn.{name}" if getattr(nn, name, None) is entry else f"{entry.__module__}.{entry_text(entry)}"


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
