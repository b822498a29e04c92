"""What hookdrop costs beside other libraries, forward and backward: `python benchmarks/speed.py`.

All run side by side in one process, at the same rate p and block size, on the same tensors. What is claimed are ratios
of times within a round (see cost.py), never a time.

The limit is `x * c`, forward and backward: to read and write each element once. Its time is mostly that of fresh
memory. glibc gives big freed buffers back to the system, and their next use is a page fault for each 4 KB of them: a
call may find its memory at hand or have to fault it in, depending on which call was before it. The shuffled order
spreads that over all, and the results file has the page faults of each call.

Nothing else should run meanwhile. PyTorch's threads wait for one another, so that one that has to wait for a core holds
up the other for a time slice, some milliseconds. How many turns that happened in is said.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import bars
import parts
import peers
from cost import Spread, disturbed, measure, ratios
from terminal import make_console, say
from thresholds import THRESHOLDS, Threshold, beware, new_table, table

ROUNDS, FEW, QUICK_ROUNDS = 25, 12, 3
Part = Callable[[argparse.Namespace, Console], dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; 0 whatever the clock says."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    console = make_console()
    results: dict[str, Any] = {"machine": peers.facts(options.device), "settings": settings(options)}
    say(console, f"{peers.in_words(results['machine'])}\n{legend(options)}\n")
    path = options.json or options.out / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in PARTS if "all" in options.part else options.part:
        results[name] = PARTS[name](options, console)
        # After each part, so that an interrupted run leaves what it has.
        path.write_text(json.dumps(results, indent=1, allow_nan=False))
    say(console, f"All numbers: {path}")
    return 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--part", nargs="+", choices=[*PARTS, "all"], default=["all"], help="what to measure")
    parser.add_argument("--shapes", type=peers.shape, nargs="+", default=peers.SHAPES, help="NxCxHxW, one or more")
    parser.add_argument("--rounds", type=int, help=f"of each measurement; {ROUNDS} unless told")
    parser.add_argument("--elements", type=float, help="growth stops there; 1e8 unless told")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch's threads")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, growth to 1e6: to see that it runs"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/speed"), help="folder of results.json and the pictures")
    parser.add_argument("--json", type=Path, help="file for all numbers, elsewhere than in --out")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    options.elements = options.elements or (1e6 if options.quick else 1e8)
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """All that the numbers depend on, beside the machine."""
    return {
        "p": peers.P,
        "block_size": peers.BLOCK,
        "dtype": "float32",
        "shapes": [peers.named(shape) for shape in options.shapes],
        "rounds": options.rounds,
        "elements": options.elements,
        "backend": options.backend,
    }


def legend(options: argparse.Namespace) -> str:
    """What the tables' numbers are."""
    return (
        f"float32, forward + backward, p = {peers.P}, blocks of {peers.BLOCK}, a mask for each channel unless 'shared'."
        f"\n{options.rounds} rounds in shuffled order, slow calls in every third. Ratios of times within a round: "
        "median [quartiles].\nThe median decides what holds."
        f"{' So few rounds show that it runs, and decide nothing.' if options.rounds < FEW else ''}"
    )


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Everything at each shape, and what that says of the thresholds."""
    found = {}
    for shape in options.shapes:
        say(console, f"timing at {peers.named(shape)} ...")
        found[peers.named(shape)] = _at(shape, options, console)
    _print_contestants(console, found)
    console.print(table("What hookdrop has to be", {shape: numbers["demands"] for shape, numbers in found.items()}))
    bare = {shape: numbers["demands_without_kernel"] for shape, numbers in found.items()}
    if any(bare.values()):
        console.print(table("The same without the compiled kernel, for comparison", bare))
    bars.draw(options.out / "bars.png", found)
    say(console, f"Picture: {options.out / 'bars.png'}\n")
    return found


def _at(shape: peers.Shape, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    x, grad = peers.make(shape, options.device)
    contestants = peers.contestants(device=options.device)
    samples = measure({name: one.job(x, grad) for name, one in contestants.items()}, options.rounds, options.device)
    beware(console, samples, peers.named(shape))
    numbers = {
        name: {
            "over_limit": ratios(samples, name, peers.LIMIT)._asdict(),
            "dropped": peers.dropped(one, shape, device=options.device),
            **samples[name].numbers(),
        }
        for name, one in contestants.items()
    }

    def judged(thresholds: Sequence[Threshold]) -> list[dict[str, Any]]:
        return [threshold.judged(samples) for threshold in thresholds if set(threshold.pair) <= set(samples)]

    bare = [threshold.without_kernel() for threshold in THRESHOLDS]
    return {
        "contestants": numbers,
        "demands": judged(THRESHOLDS),
        "demands_without_kernel": judged(bare),
        "disturbed_turns": disturbed(samples),
    }


def _print_contestants(console: Console, found: dict[str, Any]) -> None:
    heads = [column for shape in found for column in (f"{shape}\ntime / ({peers.LIMIT})", "really\ndropped")]
    shown = new_table("\nTimes against the limit, and the fraction that is really dropped", "\nregularizer", *heads)
    for name in next(iter(found.values()))["contestants"]:
        cells = []
        for numbers in found.values():
            of_name = numbers["contestants"][name]
            cells += [str(Spread(**of_name["over_limit"])), f"{of_name['dropped']:.3f}"]
        shown.add_row(name, *cells)
    console.print(shown)


PARTS: dict[str, Part] = {
    "main": compare,
    "blocks": parts.blocks,
    "growth": parts.growth,
    "compiled": parts.compiled,
    "steps": parts.steps,
}


if __name__ == "__main__":
    sys.exit(main())
