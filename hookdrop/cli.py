"""The command line: `hookdrop layers MODEL` to choose layers, `hookdrop plan MODEL ...` to see what would happen."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

import hookdrop
from hookdrop import zoo
from hookdrop.dryrun import dry_run
from hookdrop.errors import HookdropError, HookdropWarning, LayerError, ShapeError
from hookdrop.globs import glob_expression
from hookdrop.layers import Entry, entry_text, select, walk
from hookdrop.ops import kernel
from hookdrop.regularizers import Regularizer, parse
from hookdrop.schedules import LinearSchedule
from hookdrop.tables import counted, shape_text, text_table

if TYPE_CHECKING:
    from rich.console import Console

    from hookdrop.plan import Plan

_ENTRY = "a full name, a quoted glob ('layer3.*', '**.bn[12]', '**'), or a class (type:BatchNorm2d)"
_LAYER_HEADER = ("name", "type", "output shape", "calls")
_SITE_HEADER = ("site", "type", "shape", "read as", "calls", "p")
_ROOT = "(the model)"

# What `layers` proposes to plan next: the first that suits the shapes.
_TRIALS = ("DropBlock(p=0.1, block_size=7)", "DropBlock(p=0.1, block_size=3)", "Dropout(p=0.1)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it could be done, 2 if not."""
    args = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            # What libraries and models warn of is not what was asked.
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", HookdropWarning)
            args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left, as `head` does. Python flushes once more at exit, to where nobody minds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (HookdropError, ValueError, TypeError) as error:
        see = f"\nin a shell: hookdrop layers {args.model}; a class is written type:BatchNorm2d"
        print(f"hookdrop: error: {error}{see if isinstance(error, LayerError) else ''}", file=sys.stderr)
        return 2
    return 0


def _version() -> str:
    return f"hookdrop {hookdrop.__version__} (compiled loops: {'yes' if kernel.available() else 'no'})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hookdrop", description=hookdrop.__doc__)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    what = "list the layers of a model: type, output shape, calls per forward"
    layers = commands.add_parser("layers", help=what, description=what)
    _add_common(layers)
    layers.add_argument("--match", action="append", metavar="ENTRY", help=f"only these: {_ENTRY}")
    layers.set_defaults(run=_layers)

    what = "show what an injection would do, with warnings"
    plan = commands.add_parser("plan", help=what, description=what)
    _add_common(plan)
    plan.add_argument("--layers", nargs="+", action="extend", required=True, metavar="ENTRY", help=_ENTRY)
    plan.add_argument("--exclude", nargs="+", action="extend", default=[], metavar="ENTRY", help="what to leave out")
    plan.add_argument("--regularizer", required=True, metavar="TEXT", help="such as 'DropBlock(p=0.1, block_size=7)'")
    plan.add_argument("--at", choices=("output", "input"), help="which side of the layers; the output if not given")
    plan.add_argument("--tensor", type=_key, metavar="KEY", help="which tensor of several: an index, a key or 'all'")
    plan.add_argument("--p-scale", choices=("depth", "depth_from_zero"), help="a rate that grows with the depth")
    plan.add_argument("--schedule-steps", type=int, metavar="N", help="reach the rate linearly in N optimizer steps")
    plan.set_defaults(run=_plan)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name of timm or torchvision: resnet50, torchvision:resnet50")
    parser.add_argument("--input-size", default="", metavar="SIZE", help="such as 320, 320x256, 3x320x320")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def _layers(args: argparse.Namespace) -> None:
    console = None if args.json else _console()
    found = zoo.load(args.model, args.input_size)
    # The model itself is left out: it has no name to choose it by.
    chosen = select(found.model, found.entries(args.match)).layers if args.match else walk(found.model)[1:]
    seen = dry_run(found.model, [layer.module for layer in chosen], found.example_input)
    rows = [
        {"name": layer.name, "type": type(layer.module).__name__, "shape": what.shape, "calls": what.calls}
        for layer, what in zip(chosen, seen, strict=True)
    ]
    if console is None:
        print(json.dumps({**found.about(), "layers": rows}, indent=2))
    else:
        _show_layers(console, args, found, rows)


def _show_layers(console: Console, args: argparse.Namespace, found: zoo.Specimen, rows: list[dict[str, Any]]) -> None:
    _say(console, str(found))
    cells = [(row["name"] or _ROOT, row["type"], _output(row), row["calls"]) for row in rows]
    _show_table(console, _LAYER_HEADER, cells, dim=[row["shape"] is None for row in rows])
    never = sum(not row["calls"] for row in rows)
    mute = sum(row["shape"] is None for row in rows) - never
    parts = [f"{counted(len(rows), 'module')}: {len(rows) - never - mute} hookable"]
    parts += [f"{never} never called in an eval forward (a hook there never fires)"] * bool(never)
    parts += [f"{mute} with no tensor to regularize"] * bool(mute)
    _say(console, ", ".join(parts))
    if never + mute < len(rows):
        _say(console, f"next: {_next_command(args, rows)}")


def _output(row: dict[str, Any]) -> str:
    return shape_text(row["shape"]) if row["shape"] else "no tensor" if row["calls"] else "never called"


def _next_command(args: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """A `plan` of the same layers, or of a row of outer blocks in the second half of the model."""
    hookable = {row["name"]: row["shape"] for row in rows if row["shape"]}
    parents = [name.rpartition(".")[0] for name in hookable if name.rpartition(".")[2].isdigit()]
    outer = [parent for parent in parents if parent and parent.count(".") == min(p.count(".") for p in parents if p)]
    block = f"{outer[len(outer) * 2 // 3]}.*" if outer else list(hookable)[-1]
    shapes = [shape for name, shape in hookable.items() if args.match or glob_expression(block).fullmatch(name)]
    text = next(text for text in _TRIALS if _suits(parse(text), shapes))
    size = ["--input-size", args.input_size] if args.input_size else []
    layers = args.match or [block]
    return shlex.join(["hookdrop", "plan", args.model, *size, "--layers", *layers, "--regularizer", text])


def _suits(regularizer: Regularizer, shapes: list[tuple[int, ...]]) -> bool:
    try:
        for shape in shapes:
            regularizer.check(shape)
    except ShapeError:
        return False
    return not any(map(regularizer.doubts, shapes))


def _plan(args: argparse.Namespace) -> None:
    console = None if args.json else _console()
    parse(args.regularizer)  # A slip in it is told before a model is built.
    schedule = None if args.schedule_steps is None else LinearSchedule(steps=args.schedule_steps)
    found = zoo.load(args.model, args.input_size)
    options = {
        "layers": found.entries(args.layers),
        "exclude": found.entries(args.exclude),
        "at": args.at,
        "tensor": args.tensor,
        "p_scale": args.p_scale,
        "schedule": schedule,
    }
    given = {name: value for name, value in options.items() if value not in (None, [])}
    planned = hookdrop.plan(found.model, args.regularizer, example_input=found.example_input, **given)
    code = _code(args.regularizer, given)
    if console is None:
        print(json.dumps(_plan_object(found, planned, given["layers"], code), indent=2))
    else:
        _show_plan(console, found, planned, code)


def _plan_object(found: zoo.Specimen, planned: Plan, entries: list[Entry], code: str) -> dict[str, Any]:
    sites = [
        {"name": s.name, "type": s.type, "shape": s.shape, "calls": s.calls, "reading": s.reading, "p": s.p}
        | {"regularizer": repr(s.regularizer)}
        for s in planned.sites
    ]
    counts = {e if isinstance(e, str) else f"type:{entry_text(e)}": planned.counts[entry_text(e)] for e in entries}
    how = {"at": planned.at, "schedule": None if planned.schedule is None else repr(planned.schedule)}
    return {**found.about(), **how, "sites": sites, "counts": counts, "warnings": planned.warnings, "code": code}


def _show_plan(console: Console, found: zoo.Specimen, planned: Plan, code: str) -> None:
    _say(console, str(found))
    title = str(planned).partition("\n")[0]
    _say(console, f"{planned.sites[0].regularizer} on {title}")
    rows = [(s.name or _ROOT, s.type, shape_text(s.shape), s.reading, s.calls, s.p) for s in planned.sites]
    _show_table(console, _SITE_HEADER, rows, dim=[s.calls == 0 for s in planned.sites])
    for entry, count in planned.counts.items():
        _say(console, f"{entry}: {counted(count, 'layer')}")
    for text in planned.warnings:
        _say(console, f"warning: {text}", style="bold yellow")
    _say(console, f"in Python: {code}")


def _code(regularizer: str, options: dict[str, Any]) -> str:
    """The line of Python that does what was planned."""
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


def _key(text: str) -> int | str:
    return int(text) if text.removeprefix("-").isdecimal() else text


def _console() -> Console:
    with zoo.extra():
        from rich.console import Console
    return Console(markup=False, highlight=False, emoji=False)


def _say(console: Console, text: str, style: str = "") -> None:
    # soft_wrap: a line is never cut or folded, so that it can be copied from a terminal and parsed in a pipe.
    console.print(text, style=style or None, soft_wrap=True)


def _show_table(console: Console, header: Sequence[str], rows: Sequence[Sequence[object]], dim: list[bool]) -> None:
    """The columns in which some row has something."""
    used = [i for i in range(len(header)) if any(row[i] not in ("", None) for row in rows)]
    table = text_table([header[i] for i in used], [[row[i] for i in used] for row in rows])
    styles = ["bold", "dim", *("dim" if is_dim else "" for is_dim in dim)]
    for line, style in zip(table.splitlines(), styles, strict=True):
        _say(console, line, style)
