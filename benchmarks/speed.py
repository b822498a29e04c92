"""Compare the speed of hookdrop with other libraries, forward and backward: `python benchmarks/speed.py`.

All implementations run in one process, at the same p and block size, on the same tensors. The results are ratios of
times within a round (see timing.py); absolute times are not compared. The last part measures memory (see memory.py).

The limit is `x * c`, forward and backward, which reads and writes each element once. Allocating memory takes most of
its time: glibc returns large freed buffers to the system, and reusing them causes a page fault per 4 KB. Whether a call
pays for these faults depends on the call before it. The random order distributes them evenly, and the results file
contains the page faults of each call.

Run nothing else at the same time. PyTorch's threads synchronize, so one preempted thread delays the others by a time
slice of several milliseconds. The script warns if more than 20 % of the turns were preempted.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

import figures
import memory
import peers
import program
from terminal import say
from thresholds import BLOCKS_MAX, THRESHOLDS, Threshold, new_table, threshold_table, verdict, warn_if_busy
from timing import Quartiles, Samples, measure, preempted_fraction, ratios, three_digits

SIZES = (7, 13, 21)
GROWTH_NAMES = (peers.LIMIT, peers.BATCH, peers.TORCHVISION, peers.TIMM, peers.TORCH_DROPOUT)
MAP, SMALL_MAP = (28, 28), (14, 14)
"""The maps of the growth part, from 1e4 elements and below."""
MAX_SECONDS = 2.0
"""Implementations with a slower call are not run on larger tensors."""
BYTES_PER_ELEMENT = 64
"""Peak memory of the largest consumer: float32 input, gradients, output and masks, and int64 pooling indices."""
SMALL_SHAPES, SMALL_BLOCK = ((4, 16, 7, 7), (16, 8, 7, 7), (8, 64, 7, 7), (8, 64, 14, 14)), 3
"""From 3,000 elements; 1,000 to 100 million are in the growth part."""
SMALL = (
    Threshold(peers.BATCH, peers.TORCHVISION, must=1.0, aim=0.8),
    Threshold(peers.DROPOUT, peers.TORCH_DROPOUT, must=1.1, aim=1.0),
    Threshold(peers.DROPOUT2D, peers.TORCH_DROPOUT2D, must=1.1, aim=1.0),
    Threshold(peers.DROP_PATH, peers.TIMM_DROP_PATH, must=1.1, aim=1.0),
)
GROWTH_ROUNDS = 3
"""Minimum number of rounds per size."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    options = parse_options(argv)
    shapes = [peers.format_shape(shape) for shape in options.shapes]
    return program.main(options, PARTS, p=peers.P, block_size=peers.BLOCK, dtype="float32", shapes=shapes)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = program.parser(__doc__, PARTS, rounds=25, out="runs/speed/results.json")
    parser.add_argument(
        "--shapes", type=peers.shape, nargs="+", help="one or more shapes NxCxHxW (default: 3, or 5 on a GPU)"
    )
    parser.add_argument("--elements", type=float, help="size of the largest tensor in the growth part (default: 1e8)")
    options = parser.parse_args(argv)
    options.shapes = options.shapes or (peers.SHAPES if options.device == "cpu" else peers.GPU_SHAPES)
    options.elements = options.elements or (1e6 if options.quick else 1e8)
    return options


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare all implementations at each shape, and evaluate the thresholds."""
    say(
        console,
        f"float32, forward + backward, p = {peers.P}, block_size = {peers.BLOCK}, a mask per channel unless 'shared'. "
        "Ratios of times within a round: median [quartiles]. The verdicts are based on the median.\n",
    )
    found = {}
    for shape in options.shapes:
        say(console, f"timing at {peers.format_shape(shape)} ...")
        found[peers.format_shape(shape)] = _compare_at(shape, options, console)
    _print_implementations(console, found)
    console.print(threshold_table("Thresholds", {shape: numbers["demands"] for shape, numbers in found.items()}))
    no_kernel = {shape: numbers["demands_without_kernel"] for shape, numbers in found.items()}
    if any(no_kernel.values()):
        console.print(threshold_table("Thresholds without the compiled kernel, for comparison", no_kernel))
    figures.draw_ratios(options.json.with_name("bars.png"), found)
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

    return {
        "contestants": numbers,
        "demands": evaluate(THRESHOLDS),
        "demands_without_kernel": evaluate([threshold.without_kernel() for threshold in THRESHOLDS]),
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


def small(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare the regularizers with their peers on small tensors, where the calls of operations are the cost."""
    heads = [f"{one.over}\n/ {one.under}\n{one.text(one.must)}" for one in SMALL]
    shown = new_table("\nSmall tensors: ratios of times, and the required ratio", "shape", *heads)
    found = {}
    for shape in SMALL_SHAPES:
        x, grad = peers.make_inputs(shape, options.device)
        implementations = peers.implementations(block=SMALL_BLOCK, device=options.device) | peers.drop_paths()
        jobs = {name: implementations[name].job(x, grad) for threshold in SMALL for name in threshold.pair}
        samples = measure(jobs, options.rounds, options.device)
        warn_if_busy(console, samples, peers.format_shape(shape))
        evaluated = [threshold.evaluate(samples) for threshold in SMALL]
        numbers = {name: times.numbers() for name, times in samples.items()}
        found[peers.format_shape(shape)] = {"contestants": numbers, "demands": evaluated}
        shown.add_row(peers.format_shape(shape), *(str(Quartiles(**one["ratio"])) for one in evaluated))
    console.print(shown)
    return found


def blocks(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the cost of larger blocks relative to blocks of 7, at the last shape."""
    shape = options.shapes[-1]
    x, grad = peers.make_inputs(shape, options.device)
    of_sizes = {size: peers.implementations(block=size, device=options.device) for size in SIZES}
    names = [name for name in of_sizes[SIZES[0]] if name.removesuffix(peers.NO_KERNEL) == peers.BATCH]
    jobs = {f"{name}, {size}": of_sizes[size][name].job(x, grad) for name in names for size in SIZES}
    samples = measure(jobs, options.rounds, options.device)
    warn_if_busy(console, samples, "block sizes")
    title = f"Block sizes at {peers.format_shape(shape)}: time / time with block_size = {SIZES[0]}"
    shown = new_table(title, "regularizer", *map(str, SIZES), "slowest / fastest", "required", "verdict")
    found = {}
    for name in names:
        by_size = {size: ratios(samples, f"{name}, {size}", f"{name}, {SIZES[0]}") for size in SIZES}
        medians = [ratio.median for ratio in by_size.values()]
        spread, quartiles = max(medians) / min(medians), {size: ratio._asdict() for size, ratio in by_size.items()}
        found[name] = {"ratios": quartiles, "apart": spread, "holds": spread <= BLOCKS_MAX}
        cells = *map(str, by_size.values()), three_digits(spread), f"<= {BLOCKS_MAX}", verdict(spread <= BLOCKS_MAX)
        shown.add_row(name, *cells)
    console.print(shown)
    return found


def growth(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the cost by tensor size."""
    names: list[str] = list(GROWTH_NAMES)
    found: dict[int, dict[str, Any]] = {}
    title = f"\nTensor sizes, maps of 28x28 (14x14 below 1e4): time / ({peers.LIMIT})"
    shown = new_table(title, "elements", *names[1:])
    for shape in _growth_shapes(options.elements, options.device):
        x, grad = peers.make_inputs(shape, options.device)
        implementations = peers.implementations(device=options.device)
        jobs = {name: implementations[name].job(x, grad) for name in names}
        samples = measure(jobs, max(GROWTH_ROUNDS, options.rounds // 3), options.device)
        warn_if_busy(console, samples, f"growth, {x.numel():.1e} elements")
        found[x.numel()] = {name: times.numbers() for name, times in samples.items()}
        cells = (str(ratios(samples, name, peers.LIMIT)) if name in samples else "-" for name in GROWTH_NAMES[1:])
        shown.add_row(f"{x.numel():.1e}", *cells)
        names = [name for name in names if _slowest(samples[name]) <= MAX_SECONDS]
        if peers.LIMIT not in names:
            break
    console.print(shown)
    figures.draw_growth(options.json.with_name("growth.png"), found)
    return {str(elements): numbers for elements, numbers in found.items()}


def _growth_shapes(limit: float, device: str) -> list[peers.Shape]:
    """Return shapes from 1e3 elements, about tripling, up to `limit` or the available memory."""
    on_host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = on_host if device == "cpu" else torch.cuda.mem_get_info()[0]
    most = min(limit, free / BYTES_PER_ELEMENT)
    powers = [10 ** (half / 2) for half in range(6, 1 + math.floor(2 * math.log10(max(most, 1e4)) + 1e-9))]
    maps = [SMALL_MAP if elements < 1e4 else MAP for elements in powers]
    return [
        (4, max(1, round(elements / 4 / math.prod(sizes))), *sizes)
        for elements, sizes in zip(powers, maps, strict=True)
    ]


def _slowest(samples: Samples) -> float:
    return max(samples.seconds.values())


PARTS: dict[str, program.Part] = {
    "main": compare,
    "small": small,
    "blocks": blocks,
    "growth": growth,
    "memory": memory.measure,
}


if __name__ == "__main__":
    sys.exit(main())
