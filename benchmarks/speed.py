"""Compare the speed of hookdrop with other libraries, forward and backward: `python benchmarks/speed.py`.

All implementations run in one process, at the same p and block size, on the same tensors. The results are ratios of
times within a round (see timing.py); absolute times are not compared.

The limit is `x * c`, forward and backward, which reads and writes each element once. Allocating memory takes most of
its time: glibc returns large freed buffers to the system, and reusing them causes a page fault per 4 KB. Whether a call
pays for these faults depends on the call before it. The random order distributes them evenly, and the results file
contains the page faults of each call.

Run nothing else at the same time. PyTorch's threads synchronize, so one preempted thread delays the others by a time
slice of several milliseconds. The script warns if more than 20 % of the turns were preempted.
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

import figures
import peers
import speed_parts
from terminal import make_console, say
from thresholds import THRESHOLDS, Threshold, new_table, threshold_table, warn_if_busy
from timing import Quartiles, measure, preempted_fraction, ratios

ROUNDS, MIN_ROUNDS, QUICK_ROUNDS = 25, 12, 3
Part = Callable[[argparse.Namespace, Console], dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; the exit status does not depend on the results."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    console = make_console()
    results: dict[str, Any] = {"machine": peers.machine_info(options.device), "settings": settings(options)}
    say(console, f"{peers.format_machine(results['machine'])}\n{legend(options)}\n")
    path = options.json or options.out / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in PARTS if "all" in options.part else options.part:
        results[name] = PARTS[name](options, console)
        # Write after each part, so that an interrupted run keeps its results.
        path.write_text(json.dumps(results, indent=1, allow_nan=False))
    say(console, f"Results: {path}")
    return 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--part", nargs="+", choices=[*PARTS, "all"], default=["all"], help="what to measure")
    parser.add_argument(
        "--shapes", type=peers.shape, nargs="+", help="one or more shapes NxCxHxW (default: 3, or 5 on a GPU)"
    )
    parser.add_argument("--rounds", type=int, help=f"rounds of each measurement (default: {ROUNDS})")
    parser.add_argument("--elements", type=float, help="size of the largest tensor in the growth part (default: 1e8)")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch threads (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile (default: inductor)")
    parser.add_argument(
        "--quick", action="store_true", help=f"smoke test: {QUICK_ROUNDS} rounds, growth up to 1e6 elements"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/speed"), help="output folder (default: runs/speed)")
    parser.add_argument("--json", type=Path, help="write the results to this file instead of results.json in --out")
    options = parser.parse_args(argv)
    options.shapes = options.shapes or (peers.SHAPES if options.device == "cpu" else peers.GPU_SHAPES)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    options.elements = options.elements or (1e6 if options.quick else 1e8)
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return all settings that the results depend on."""
    return {
        "p": peers.P,
        "block_size": peers.BLOCK,
        "dtype": "float32",
        "shapes": [peers.format_shape(shape) for shape in options.shapes],
        "rounds": options.rounds,
        "elements": options.elements,
        "backend": options.backend,
    }


def legend(options: argparse.Namespace) -> str:
    """Explain the numbers in the tables."""
    return (
        f"float32, forward + backward, p = {peers.P}, block_size = {peers.BLOCK}, a mask per channel unless 'shared'."
        f"\n{options.rounds} rounds in random order, slow calls in every third. Ratios of times within a round: "
        "median [quartiles].\nThe verdicts are based on the median."
        f"{' This is a smoke test: the verdicts are not reliable.' if options.rounds < MIN_ROUNDS else ''}"
    )


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare all implementations at each shape, and evaluate the thresholds."""
    found = {}
    for shape in options.shapes:
        say(console, f"timing at {peers.format_shape(shape)} ...")
        found[peers.format_shape(shape)] = _compare_at(shape, options, console)
    _print_implementations(console, found)
    console.print(threshold_table("Thresholds", {shape: numbers["demands"] for shape, numbers in found.items()}))
    no_kernel = {shape: numbers["demands_without_kernel"] for shape, numbers in found.items()}
    if any(no_kernel.values()):
        console.print(threshold_table("Thresholds without the compiled kernel, for comparison", no_kernel))
    figures.draw_ratios(options.out / "bars.png", found)
    say(console, f"Figure: {options.out / 'bars.png'}\n")
    return found


def _compare_at(shape: peers.Shape, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    x, grad = peers.make_inputs(shape, options.device)
    implementations = peers.implementations(device=options.device)
    jobs = {name: implementation.job(x, grad) for name, implementation in implementations.items()}
    samples = measure(jobs, options.rounds, options.device)
    warn_if_busy(console, samples, peers.format_shape(shape))
    numbers = {
        name: {
            "over_limit": ratios(samples, name, peers.LIMIT)._asdict(),
            "dropped": peers.dropped_fraction(implementation, shape, device=options.device),
            **samples[name].numbers(),
        }
        for name, implementation in implementations.items()
    }

    def evaluate(thresholds: Sequence[Threshold]) -> list[dict[str, Any]]:
        return [threshold.evaluate(samples) for threshold in thresholds if set(threshold.pair) <= set(samples)]

    without_kernel = [threshold.without_kernel() for threshold in THRESHOLDS]
    return {
        "contestants": numbers,
        "demands": evaluate(THRESHOLDS),
        "demands_without_kernel": evaluate(without_kernel),
        "disturbed_turns": preempted_fraction(samples),
    }


def _print_implementations(console: Console, found: dict[str, Any]) -> None:
    heads = [column for shape in found for column in (f"{shape}\ntime / ({peers.LIMIT})", "dropped\nfraction")]
    shown = new_table("\nTimes relative to the limit, and measured dropped fractions", "\nregularizer", *heads)
    for name in next(iter(found.values()))["contestants"]:
        cells = []
        for numbers in found.values():
            result = numbers["contestants"][name]
            cells += [str(Quartiles(**result["over_limit"])), f"{result['dropped']:.3f}"]
        shown.add_row(name, *cells)
    console.print(shown)


PARTS: dict[str, Part] = {
    "main": compare,
    "small": speed_parts.small,
    "blocks": speed_parts.blocks,
    "growth": speed_parts.growth,
    "compiled": speed_parts.compiled,
    "steps": speed_parts.steps,
}


if __name__ == "__main__":
    sys.exit(main())
