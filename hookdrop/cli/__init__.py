"""Command line: `hookdrop layers MODEL` lists layers, `hookdrop plan MODEL ...` shows what `inject` would do."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from torch import nn

from hookdrop.cli import models
from hookdrop.injection.text import parse
from hookdrop.injection.verbs import plan as make_plan
from hookdrop.kernels import native
from hookdrop.recipes import RECIPE_NAMES
from hookdrop.recipes.base import Recipe
from hookdrop.utils.errors import HookdropError, HookdropWarning, LayerError
from hookdrop.utils.select import Entry, entry_text

_ENTRY = "a full name, a quoted glob ('layer3.*', '**.bn[12]', '**'), or a class (type:BatchNorm2d)"
_TEXT = f"'DropBlock(p=0.1, block_size=7)', or a recipe, which chooses its layers: {', '.join(RECIPE_NAMES)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 on success and 2 on an error."""
    args = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            # Warnings from libraries and models do not concern the plan.
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", HookdropWarning)
            _run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. Send Python's flush at exit to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (HookdropError, ValueError, TypeError) as error:
        see = f"\nin a shell: run `hookdrop layers {args.model}`; write a class as type:BatchNorm2d"
        print(f"hookdrop: error: {error}{see if isinstance(error, LayerError) else ''}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    """Print what an injection would do, or the layers."""
    source = None if args.regularizer is None else parse(args.regularizer)  # before the model is built
    found = models.load(args.model, args.input_size)
    options = {name: value for name, value in vars(args).items() if name not in _OF_COMMAND and value not in (None, [])}
    options |= {name: found.entries(options[name]) for name in ("layers", "exclude") if name in options}
    planned = make_plan(found.model, source, example_input=found.example_input, **options)
    if not args.json:
        code = [] if source is None else [f"in Python: {_code(source, options)}"]
        print(found, planned, *code, sep="\n")
        return
    keys = ("name", "type", "at", "shape", "calls", "reading", "p")
    sites = [{key: getattr(s, key) for key in keys} | {"regularizer": s.text} for s in planned.sites]
    how = {"at": planned.at, "schedule": None if planned.schedule is None else repr(planned.schedule)}
    notes = {"counts": planned.counts, "warnings": planned.warnings}
    code_of = {} if source is None else {"code": _code(source, options)}
    print(json.dumps({**found.summary(), **how, "sites": sites, **notes, **code_of}, indent=2))


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hookdrop", description=__doc__)
    loops = "yes" if native.available() else "no"
    parser.add_argument(
        "--version", action="version", version=f"hookdrop {version('hookdrop')} (compiled loops: {loops})"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("model", metavar="MODEL", help="a timm or torchvision model: resnet50, torchvision:resnet50")
    common.add_argument("--input-size", default="", metavar="SIZE", help="for example 320, 320x256, or 3x320x320")
    common.add_argument("--json", action="store_true", help="print one JSON object")

    what = "list the layers of a model with type, output shape, and calls per forward"
    layers = commands.add_parser("layers", help=what, description=what, parents=[common])
    layers.add_argument(
        "--layers", nargs="+", default=["**"], metavar="ENTRY", help=f"list only these layers: {_ENTRY}"
    )
    layers.set_defaults(regularizer=None)

    what = "show what an injection would do, including warnings"
    plan = commands.add_parser("plan", help=what, description=what, parents=[common])
    plan.add_argument("regularizer", metavar="REGULARIZER", help=_TEXT)
    plan.add_argument("--layers", nargs="+", action="extend", default=[], metavar="ENTRY", help=_ENTRY)
    plan.add_argument("--exclude", nargs="+", action="extend", default=[], metavar="ENTRY", help="layers to skip")
    plan.add_argument("--at", choices=("output", "input"), help="side of the layers to regularize (default: output)")
    plan.add_argument("--tensor", type=_key, metavar="KEY", help="which of several tensors: an index, a key, or 'all'")
    plan.add_argument("--p-scale", choices=("depth", "depth_from_zero", "equal"), help="increase the rate with depth")
    plan.add_argument("--schedule", metavar="TEXT", help="how the rate changes, such as 'LinearSchedule(steps=1.0)'")
    plan.add_argument("--total-steps", type=int, metavar="N", help="the length of the training in optimizer steps")
    return parser


_OF_COMMAND = ("model", "regularizer", "input_size", "json")
"""The arguments that are not keywords of `inject`."""


def _key(text: str) -> int | str:
    return int(text) if text.removeprefix("-").isdecimal() else text
