"""What the programs that time or measure share: options, parts that run one after another, and the file of results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from machine import format_machine, machine_info
from terminal import make_console, say

MIN_ROUNDS, QUICK_ROUNDS = 12, 3
Part = Callable[[argparse.Namespace, Console], dict[str, Any]]
"""A part prints its tables and returns its results."""


def parser(description: str | None, parts: Mapping[str, Part], rounds: int, out: str) -> argparse.ArgumentParser:
    """Create a parser with the options that all programs have."""
    found = argparse.ArgumentParser(description=(description or "").partition(":")[0])
    found.add_argument("--part", nargs="+", choices=[*parts], default=[*parts], help="what to measure (default: all)")
    found.add_argument("--rounds", type=_positive, help=f"rounds of each measurement (default: {rounds})")
    found.add_argument("--threads", type=_positive, default=2, help="PyTorch threads (default: 2)")
    found.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    found.add_argument("--quick", action="store_true", help=f"smoke test: {QUICK_ROUNDS} rounds of smaller tensors")
    found.add_argument("--json", type=Path, default=Path(out), help="file of the results (default: %(default)s)")
    found.set_defaults(default_rounds=rounds)
    return found


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def main(options: argparse.Namespace, parts: Mapping[str, Part], **fixed: object) -> int:
    """Run the parts, and write the results after each; the exit status does not depend on the results.

    Args:
        options: of `parser`.
        parts: what to run.
        **fixed: other settings that the results depend on.
    """
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else options.default_rounds)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    console, machine = make_console(), machine_info(options.device)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()} | fixed
    results: dict[str, Any] = {"machine": machine, "settings": settings}
    note = " This is a smoke test: the verdicts are not reliable." if options.rounds < MIN_ROUNDS else ""
    say(console, f"{format_machine(machine)}\n{options.rounds} rounds in random order; see timing.py.{note}")
    for name in options.part:
        results[name] = parts[name](options, console)
        options.json.write_text(json.dumps(results, indent=1, allow_nan=False))
    say(console, f"Results: {options.json}")
    return 0
