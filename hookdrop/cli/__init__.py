"""Command line: `hookdrop layers MODEL` lists layers, `hookdrop plan MODEL ...` shows what `inject` would do."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from hookdrop.cli import models
from hookdrop.injection.spec import P_SCALES
from hookdrop.injection.text import parse
from hookdrop.injection.verbs import layers as find_layers
from hookdrop.injection.verbs import plan as make_plan
from hookdrop.kernels import native
from hookdrop.recipes import RECIPE_NAMES
from hookdrop.utils.errors import HookdropError, HookdropWarning, LayerError

_ENTRY = "a full name, or a quoted glob ('layer3.*', '**.bn[12]', '**')"
_TEXT = f"'DropBlock(p=0.1, block_size=7)', or a recipe, which chooses its layers: {', '.join(RECIPE_NAMES)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 on success and 2 on an error."""
    args = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            # Warnings from libraries and models do not concern the plan.
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", HookdropWarning)
            _run(**vars(args))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. Send Python's flush at exit to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (HookdropError, ValueError, TypeError) as error:
        see = f"\nin a shell: run `hookdrop layers {args.model}`" if isinstance(error, LayerError) else ""
        print(f"hookdrop: error: {error}{see}", file=sys.stderr)
        return 2
    return 0


def _run(model: str, regularizer: str | None, input_size: str, **options: Any) -> None:
    """Print the layers, or what an injection would do."""
    source = None if regularizer is None else parse(regularizer)  # before the model is built
    title, built, example = models.load(model, input_size)
    given = {name: value for name, value in options.items() if value not in (None, [])}
    given["example_input"] = example
    print(title, find_layers(built, **given) if source is None else make_plan(built, source, **given), sep="\n")


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

    what = "list the layers of a model, and what fits each"
    layers = commands.add_parser("layers", help=what, description=what, parents=[common])
    layers.add_argument("--only", nargs="+", metavar="ENTRY", help=f"only these layers: {_ENTRY}")
    layers.set_defaults(regularizer=None)

    what = "show what an injection would do, including warnings"
    plan = commands.add_parser("plan", help=what, description=what, parents=[common])
    plan.add_argument("regularizer", metavar="REGULARIZER", help=_TEXT)
    plan.add_argument("--layers", nargs="+", action="extend", default=[], metavar="ENTRY", help=_ENTRY)
    plan.add_argument("--exclude", nargs="+", action="extend", default=[], metavar="ENTRY", help="layers to skip")
    plan.add_argument("--at", choices=("output", "input", "parameters"), help="what to regularize (default: output)")
    plan.add_argument("--p-scale", choices=P_SCALES[1:], help="change the rate with depth")
    plan.add_argument("--schedule", metavar="TEXT", help="how the rate changes, such as 'LinearSchedule(steps=1.0)'")
    plan.add_argument("--total-steps", type=int, metavar="N", help="the length of the training in optimizer steps")
    return parser
