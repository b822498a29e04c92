"""Command line: `hookdrop layers MODEL` lists layers, `hookdrop plan MODEL ...` shows what `inject` would do."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hookdrop import __version__
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
    args = _parse(argv)
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
        print(f"hookdrop: error: {error}{_shell_hint(args, error)}", file=sys.stderr)
        return 2
    return 0


def _run(model: str, regularizer: str | None, input_size: str, **options: Any) -> None:
    """Print the layers, or what an injection would do."""
    if regularizer is not None:
        _check_order(model, regularizer, options["layers"])
    source = None if regularizer is None else parse(regularizer)  # before the model is built
    title, built, example = models.load(model, input_size)
    given = {name: value for name, value in options.items() if value not in (None, [])}
    given["example_input"] = example
    print(title, find_layers(built, **given) if source is None else make_plan(built, source, **given), sep="\n")


def _check_order(model: str, regularizer: str, layers: Sequence[str]) -> None:
    """Raise an error with the right order if another argument than the second looks like a regularizer."""
    calls = [word for word in (model, regularizer, *layers) if "(" in word]
    if len(calls) == 1 and calls != [regularizer]:
        first, *others = (word for word in (model, regularizer, *layers) if word not in calls)
        raise HookdropError(
            "the model comes first, then the regularizer, then the layers.\n"
            f"  write: {shlex.join(['hookdrop', 'plan', first, *calls, *others])}"
        )


def _shell_hint(args: argparse.Namespace, error: Exception) -> str:
    """Return what to do about layers in a shell, where the message of `error` is about arguments in Python."""
    if not isinstance(error, LayerError):
        return ""
    given = [*getattr(args, "layers", []), *getattr(args, "only", []), *getattr(args, "exclude", [])]
    files = [entry for entry in given if Path(entry).exists()]
    expanded = f"\n{files[0]!r} is a file here: quote a glob, or the shell replaces it by file names" if files else ""
    where = "" if args.regularizer is None or given else ", and add names or globs from there, or --layers ..."
    return f"{expanded}\nin a shell: run `hookdrop layers {args.model}`{where}"


# --- arguments


class _Parser(argparse.ArgumentParser):
    """Shows examples with every error."""

    def error(self, message: str) -> NoReturn:
        examples = {
            "layers": "hookdrop layers resnet50",
            "plan": "hookdrop plan resnet50 'DropBlock(p=0.1, block_size=7)' 'layer3.*'",
        }
        shown = [text for name, text in examples.items() if self.prog in ("hookdrop", f"hookdrop {name}")]
        super().error("\n  for example: ".join([message, *shown]))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse does not take layers after an option.
    if unknown := [word for word in rest if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    entries = [*vars(args).pop("entries"), *rest]
    name = "only" if args.regularizer is None else "layers"
    setattr(args, name, entries + getattr(args, name))
    return args


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hookdrop", description=__doc__)
    loops = "yes" if native.available() else "no"
    parser.add_argument("--version", action="version", version=f"hookdrop {__version__} (compiled loops: {loops})")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = _Parser(add_help=False)
    common.add_argument("model", metavar="MODEL", help="a timm or torchvision model: resnet50, torchvision:resnet50")
    common.add_argument("--input-size", default="", metavar="SIZE", help="for example 320, 320x256, or 3x320x320")
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": [], "metavar": "LAYERS"}

    what = "list the layers of a model, and what fits each"
    layers = commands.add_parser("layers", help=what, description=what, parents=[common])
    layers.add_argument("entries", nargs="*", default=[], metavar="LAYERS", help=f"only these: {_ENTRY}")
    layers.add_argument("--only", help="the same as LAYERS", **several)
    layers.set_defaults(regularizer=None)

    what = "show what an injection would do, including warnings"
    plan = commands.add_parser("plan", help=what, description=what, parents=[common])
    plan.add_argument("regularizer", metavar="REGULARIZER", help=_TEXT)
    plan.add_argument("entries", nargs="*", default=[], metavar="LAYERS", help=_ENTRY)
    plan.add_argument("--layers", help="the same as LAYERS", **several)
    plan.add_argument("--exclude", help="layers to skip", **several)
    plan.add_argument("--at", choices=("output", "input", "parameters"), help="what to regularize (default: output)")
    plan.add_argument("--p-scale", choices=P_SCALES[1:], help="change the rate with depth")
    plan.add_argument("--schedule", metavar="TEXT", help="how the rate changes, such as 'LinearSchedule(steps=1.0)'")
    plan.add_argument("--total-steps", type=int, metavar="N", help="the length of the training in optimizer steps")
    return parser
