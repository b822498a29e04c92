"""What hooks cost where nothing is dropped, and placing, driving and removing them: `python benchmarks/overhead.py`.

All that is compared takes turns within one process, in another order each round (see cost.py), and is compared within
a round. The hooked model and the control, a copy without hooks, share the weights of the clean one, so that they differ
in nothing but their modules; the control shows what this way of measuring makes of no difference at all.

A must is on a median, given with its 95 % bootstrap interval. It holds if the whole interval is within it and misses if
none of it is; otherwise they cannot be distinguished. Ratios are claims about this code, times belong to the machine
that is named. Nothing else should run meanwhile: it is said if something else was often given a core.
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

ROUNDS, QUICK_ROUNDS, FEW = 200, 3, 20


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; 0 whatever the clock says."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    console = make_console()
    results: dict[str, Any] = {"machine": peers.facts(options.device), "settings": {"rounds": options.rounds}}
    few = " So few rounds show that it runs, and decide nothing." if options.rounds < FEW else ""
    say(console, f"{peers.in_words(results['machine'])}\n{options.rounds} rounds; medians [95 %].{few}")
    for name in PARTS if "all" in options.part else options.part:
        title, digits, part = PARTS[name]
        rows = {what: row.numbers() for what, row in part(options, console).items()}
        results[name] = {"title": title, "rows": rows}
        console.print(table(title, digits, rows))
        # After each part, so that an interrupted run leaves what it has.
        (options.out / "results.json").write_text(json.dumps(results, indent=1, allow_nan=False))
    say(console, f"All numbers: {options.out / 'results.json'}")
    return 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--part", nargs="+", choices=[*PARTS, "all"], default=["all"], help="what to measure")
    parser.add_argument("--rounds", type=int, help=f"of each measurement; {ROUNDS} unless told")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch's threads")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the forwards")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, small images: to see that it runs"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/overhead"), help="folder of results.json; runs/overhead")
    options = parser.parse_args(argv)
    if options.rounds is None:
        options.rounds = QUICK_ROUNDS if options.quick else ROUNDS
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    return options


def table(title: str, digits: int, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """A line for each row."""
    shown = new_table(f"\n{title}", "", "median [95 %]", "must", "verdict")
    for what, row in rows.items():
        estimate = Estimate(row["low"], row["median"], row["high"])
        must = "-" if row["must"] is None else f"<= {row['must']:g}"
        shown.add_row(what, estimate.text(digits), must, row["verdict"])
    return shown


if __name__ == "__main__":
    sys.exit(main())
