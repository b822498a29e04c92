"""`hookdrop layers MODEL`: list layers to choose from."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import Any

from hookdrop.cli import models
from hookdrop.cli.console import ROOT, Output
from hookdrop.injection.text import parse
from hookdrop.regularizers import Regularizer
from hookdrop.survey import survey
from hookdrop.utils.errors import ShapeError
from hookdrop.utils.names import glob_expression
from hookdrop.utils.select import named_layers, select
from hookdrop.utils.tables import counted, shape_text

_HEADER = ("name", "type", "output shape", "calls")

# The first one that fits the shapes is suggested.
_SUGGESTIONS = ("DropBlock(p=0.1, block_size=7)", "DropBlock(p=0.1, block_size=3)", "Dropout(p=0.1)")


def list_layers(args: argparse.Namespace) -> None:
    """Print the layers of a model with their types, output shapes, and calls."""
    console = None if args.json else Output()
    found = models.load(args.model, args.input_size)
    # Skip the model itself, which has no name to select it by.
    chosen = select(found.model, found.entries(args.match)).layers if args.match else named_layers(found.model)[1:]
    facts = survey(found.model, found.example_input)
    seen = [facts.calls(layer.name) for layer in chosen]
    rows = [
        {"name": layer.name, "type": type(layer.module).__name__, "shape": run.shape, "calls": run.calls}
        for layer, run in zip(chosen, seen, strict=True)
    ]
    if console is None:
        print(json.dumps({**found.summary(), "layers": rows}, indent=2))
    else:
        _show(console, args, found, rows)


def _show(out: Output, args: argparse.Namespace, found: models.LoadedModel, rows: list[dict[str, Any]]) -> None:
    out.line(str(found))
    cells = [(row["name"] or ROOT, row["type"], _output(row), row["calls"]) for row in rows]
    out.table(_HEADER, cells, dim=[row["shape"] is None for row in rows])
    never = sum(not row["calls"] for row in rows)
    no_tensor = sum(row["shape"] is None for row in rows) - never
    hookable = len(rows) - never - no_tensor
    called = f", {never} never called in an eval forward (hooks there never fire)" if never else ""
    tensors = f", {no_tensor} with no tensor to regularize" if no_tensor else ""
    out.line(f"{counted(len(rows), 'module')}: {hookable} hookable{called}{tensors}")
    if hookable:
        out.line(f"next: {_next_command(args, rows)}")


def _output(row: dict[str, Any]) -> str:
    return shape_text(row["shape"]) if row["shape"] else "no tensor" if row["calls"] else "never called"


def _next_command(args: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """Return a `plan` command for the same layers, or for a list of outer blocks in the second half of the model."""
    hookable = {row["name"]: row["shape"] for row in rows if row["shape"]}
    parents = [name.rpartition(".")[0] for name in hookable if name.rpartition(".")[2].isdigit()]
    outer = [parent for parent in parents if parent and parent.count(".") == min(p.count(".") for p in parents if p)]
    block = f"{outer[len(outer) * 2 // 3]}.*" if outer else list(hookable)[-1]
    shapes = [shape for name, shape in hookable.items() if args.match or glob_expression(block).fullmatch(name)]
    text = next(text for text in _SUGGESTIONS if _fits(parse(text), shapes))
    size = ["--input-size", args.input_size] if args.input_size else []
    layers = args.match or [block]
    return shlex.join(["hookdrop", "plan", args.model, text, *size, "--layers", *layers])


def _fits(regularizer: Regularizer, shapes: list[tuple[int, ...]]) -> bool:
    try:
        for shape in shapes:
            regularizer.check(shape)
    except ShapeError:
        return False
    return not any(map(regularizer.shape_warnings, shapes))
