"""Measure the overhead of idle hooks, and of placing, stepping and removing them: `python benchmarks/overhead.py`.

All jobs run in one process, in a new random order each round (see timing.py), and are compared within a round. The
hooked model and a control copy without hooks share the weights of the original model, so that only their modules
differ. The control shows what the method reports if there is no difference.

A requirement is an upper bound on a median, which has a 95 % bootstrap interval. It is met if the whole interval is
within the bound, missed if the whole interval is above it, and inconclusive otherwise. Ratios characterize the code;
times also depend on the machine. Run nothing else at the same time; the script warns if other processes often preempt
the jobs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import peers
from hook_costs.parts import PARTS
from hook_costs.rows import Estimate
from terminal import make_console, say
from thresholds import new_table

ROUNDS, QUICK_ROUNDS, MIN_ROUNDS = 200, 3, 20


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; the exit status does not depend on the results."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    console = make_console()
    results: dict[str, Any] = {"machine": peers.machine_info(options.device), "settings": {"rounds": options.rounds}}
    note = " This is a smoke test: the verdicts are not reliable." if options.rounds < MIN_ROUNDS else ""
    say(console, f"{peers.format_machine(results['machine'])}\n{options.rounds} rounds; medians [95 %].{note}")
    for name in PARTS if "all" in options.part else options.part:
        title, digits, measure_part = PARTS[name]
        rows = {label: row.numbers() for label, row in measure_part(options, console).items()}
        results[name] = {"title": title, "rows": rows}
        console.print(table(title, digits, rows))
        # Write after each part, so that an interrupted run keeps its results.
        (options.out / "results.json").write_text(json.dumps(results, indent=1, allow_nan=False))
    say(console, f"Results: {options.out / 'results.json'}")
    return 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--part", nargs="+", choices=[*PARTS, "all"], default=["all"], help="what to measure")
    parser.add_argument("--rounds", type=int, help=f"rounds of each measurement (default: {ROUNDS})")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch threads (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the forward part")
    parser.add_argument("--quick", action="store_true", help=f"smoke test: {QUICK_ROUNDS} rounds, small images")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/overhead"), help="output folder (default: runs/overhead)"
    )
    options = parser.parse_args(argv)
    if options.rounds is None:
        options.rounds = QUICK_ROUNDS if options.quick else ROUNDS
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    return options


def table(title: str, digits: int, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Create the table of one part."""
    shown = new_table(f"\n{title}", "", "median [95 %]", "required", "verdict")
    for label, row in rows.items():
        estimate = Estimate(row["low"], row["median"], row["high"])
        bound = "-" if row["must"] is None else f"<= {row['must']:g}"
        shown.add_row(label, estimate.text(digits), bound, row["verdict"])
    return shown


if __name__ == "__main__":
    sys.exit(main())
