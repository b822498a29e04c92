"""`hookdrop plan MODEL ...`: show what an injection would do."""

from __future__ import annotations

import argparse
import inspect
import json
from dataclasses import dataclass
from typing import Any

from torch import nn

from hookdrop.cli import models
from hookdrop.cli.console import ROOT, Output
from hookdrop.injection.plan import Plan
from hookdrop.injection.text import parse
from hookdrop.injection.verbs import plan as make_plan
from hookdrop.recipes import RECIPES
from hookdrop.schedules import LinearSchedule
from hookdrop.utils.call_syntax import Call, CallSyntax, parse_call, signature_of
from hookdrop.utils.select import Entry, entry_text
from hookdrop.utils.tables import counted, shape_text

_SYNTAX = CallSyntax("--recipe", "recipe", RECIPES, "dropblock_resnet(p=0.1, block_size=5)", bare=True)
_SITE_OPTIONS = ("layers", "exclude", "regularizer", "at", "tensor", "p_scale")
"""Options that cannot be combined with a recipe."""
_HEADER = ("site", "type", "shape", "read as", "calls", "p", "regularizer")


@dataclass
class _Planned:
    """A plan and what to print with it."""

    plan: Plan
    model: models.LoadedModel
    code: str
    """The equivalent line of Python."""
    counts: dict[str, int]
    """Number of layers that each entry matched, by the entry as typed."""


def show_plan(args: argparse.Namespace) -> None:
    """Print what an injection or a recipe would do."""
    if args.recipe is None and (not args.layers or args.regularizer is None):
        args.refuse("pass --recipe, or both --layers and --regularizer")
    given = [name for name in _SITE_OPTIONS if getattr(args, name) not in (None, [])]
    if args.recipe is not None and given:
        args.refuse(f"--{', --'.join(given).replace('_', '-')} cannot be combined with --recipe")
    console = None if args.json else Output()
    planned = _by_layers(args) if args.recipe is None else _by_recipe(args)
    if console is None:
        print(json.dumps(_json_object(planned), indent=2))
    else:
        _show(console, planned)


def _by_layers(args: argparse.Namespace) -> _Planned:
    parse(args.regularizer)  # reports a typo before the model is built
    schedule = None if args.schedule_steps is None else LinearSchedule(steps=args.schedule_steps)
    found = models.load(args.model, args.input_size)
    entries = found.entries(args.layers)
    options = {"layers": entries, "exclude": found.entries(args.exclude), "at": args.at, "tensor": args.tensor}
    options |= {"p_scale": args.p_scale, "schedule": schedule}
    given = {name: value for name, value in options.items() if value not in (None, [])}
    plan = make_plan(found.model, args.regularizer, example_input=found.example_input, **given)
    counts = {e if isinstance(e, str) else f"type:{entry_text(e)}": plan.counts[entry_text(e)] for e in entries}
    return _Planned(plan, found, _code(args.regularizer, given), counts)


def _by_recipe(args: argparse.Namespace) -> _Planned:
    call = parse_call(args.recipe, _SYNTAX)
    recipe, settings = RECIPES[call.name], _settings(args, call)
    found = models.load(args.model, args.input_size)
    plan = recipe.plan(found.model, *call.args, example_input=found.example_input, **settings)
    arguments = ["model", *map(repr, call.args), *(f"{name}={value!r}" for name, value in settings.items())]
    follow = "" if plan.schedule is None else ".follow(optimizer)"
    return _Planned(plan, found, f"drop = recipes.{call.name}({', '.join(arguments)}){follow}", plan.counts)


def _settings(args: argparse.Namespace, call: Call) -> dict[str, Any]:
    """Return the keyword arguments of a recipe: those in the text, and the schedule."""
    settings, text = dict(call.kwargs), f"--recipe: {args.recipe!r}"
    signature = inspect.signature(RECIPES[call.name])
    try:
        given = signature.bind(None, *call.args, **settings).arguments
    except TypeError as error:
        raise TypeError(f"{text}: {error}{signature_of(call.name, _SYNTAX)}") from None
    if "example_input" in given:
        raise ValueError(f"{text}: the command line creates example_input; remove it.\n  its size: --input-size 224")
    if not isinstance(given.get("name", ""), str):
        raise TypeError(f"{text}: name must be a string, got {given['name']!r}.\n  write: name='mine'")
    if args.schedule_steps is None:
        return settings
    schedule = "schedule" if "schedule" in signature.parameters else "steps"
    if schedule in given:
        raise ValueError(
            f"{text} has {schedule}={given[schedule]!r}, which conflicts with --schedule-steps {args.schedule_steps}.\n"
            "  remove one of them."
        )
    steps = args.schedule_steps
    return {**settings, schedule: LinearSchedule(steps=steps) if schedule == "schedule" else steps}


def _json_object(planned: _Planned) -> dict[str, Any]:
    plan = planned.plan
    sites = [
        {"name": s.name, "type": s.type, "at": s.at, "shape": s.shape, "calls": s.calls, "reading": s.reading, "p": s.p}
        | {"regularizer": repr(s.regularizer)}
        for s in plan.sites
    ]
    how = {"at": plan.at, "schedule": None if plan.schedule is None else repr(plan.schedule)}
    notes = {"counts": planned.counts, "warnings": plan.warnings, "code": planned.code}
    return {**planned.model.summary(), **how, "sites": sites, **notes}


def _show(out: Output, planned: _Planned) -> None:
    plan = planned.plan
    out.line(str(planned.model))
    regularizers = [repr(site.regularizer) for site in plan.sites]
    one = len(set(regularizers)) == 1
    out.line(f"{regularizers[0] if one else plan.name} on {str(plan).partition(chr(10))[0]}")
    names = [(s.name or ROOT) + (" (skip)" if s.at == "skip" else "") for s in plan.sites]
    rows = [
        (name, s.type, shape_text(s.shape), s.reading, s.calls, s.p, "" if one else text)
        for name, s, text in zip(names, plan.sites, regularizers, strict=True)
    ]
    out.table(_HEADER, rows, dim=[s.calls == 0 for s in plan.sites])
    for entry, count in plan.counts.items():
        out.line(f"{entry}: {counted(count, 'layer')}")
    for text in plan.warnings:
        out.line(f"warning: {text}", style="bold yellow")
    out.line(f"in Python: {planned.code}")


def _code(regularizer: str, options: dict[str, Any]) -> str:
    """Return the line of Python that does what the plan shows."""
    parts = ["model", repr(parse(regularizer))]
    for name, value in options.items():
        code = f"[{', '.join(map(_entry_code, value))}]" if isinstance(value, list) else _quoted(value)
        parts.append(f"{name}={code}")
    follow = ".follow(optimizer)" if "schedule" in options else ""
    return f"drop = inject({', '.join(parts)}){follow}"


def _entry_code(entry: Entry) -> str:
    if not isinstance(entry, type):
        return _quoted(entry)
    name = entry.__name__
    return f"nn.{name}" if getattr(nn, name, None) is entry else f"{entry.__module__}.{name}"


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
