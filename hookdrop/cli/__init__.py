"""Command line: `hookdrop layers MODEL` lists layers, `hookdrop plan MODEL ...` shows what `inject` would do."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version

from hookdrop.cli.layers import list_layers
from hookdrop.cli.plan import show_plan
from hookdrop.kernels import native
from hookdrop.recipes import RECIPE_NAMES
from hookdrop.utils.errors import HookdropError, HookdropWarning, LayerError

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
            args.run(args)
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


def _version() -> str:
    return f"hookdrop {version('hookdrop')} (compiled loops: {'yes' if native.available() else 'no'})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hookdrop", description=__doc__)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    what = "list the layers of a model with type, output shape, and calls per forward"
    layers = commands.add_parser("layers", help=what, description=what)
    _add_common(layers)
    layers.add_argument("--match", action="append", metavar="ENTRY", help=f"list only these layers: {_ENTRY}")
    layers.set_defaults(run=list_layers)

    what = "show what an injection would do, including warnings"
    plan = commands.add_parser("plan", help=what, description=what)
    _add_common(plan)
    plan.add_argument("regularizer", metavar="REGULARIZER", help=_TEXT)
    plan.add_argument("--layers", nargs="+", action="extend", default=[], metavar="ENTRY", help=_ENTRY)
    plan.add_argument("--exclude", nargs="+", action="extend", default=[], metavar="ENTRY", help="layers to skip")
    plan.add_argument("--at", choices=("output", "input"), help="side of the layers to regularize (default: output)")
    plan.add_argument("--tensor", type=_key, metavar="KEY", help="which of several tensors: an index, a key, or 'all'")
    plan.add_argument("--p-scale", choices=("depth", "depth_from_zero"), help="increase the rate with depth")
    plan.add_argument("--schedule", metavar="TEXT", help="how the rate changes, such as 'LinearSchedule(steps=1.0)'")
    plan.add_argument("--total-steps", type=int, metavar="N", help="the length of the training in optimizer steps")
    plan.set_defaults(run=show_plan)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a timm or torchvision model: resnet50, torchvision:resnet50")
    parser.add_argument("--input-size", default="", metavar="SIZE", help="for example 320, 320x256, or 3x320x320")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _key(text: str) -> int | str:
    return int(text) if text.removeprefix("-").isdecimal() else text
