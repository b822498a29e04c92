"""Compare the speed of hookdrop with other libraries, forward and backward: `python benchmarks/speed.py`.

All implementations run in one process, at the same p and block size, on the same tensors. The results are ratios of
times within a round (see timing.py); absolute times are not compared. The last part measures memory.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import figures
import peers
import program
from program import new_table, say
from timing import Quartiles, Samples, measure, preempted_fraction, ratios, saved_storages, three_digits, warn_if_busy

Pair = tuple[str, str]
PAIRS: tuple[Pair, ...] = (
    (peers.TORCHVISION, peers.BATCH),
    (peers.TIMM, peers.BATCH),
    (peers.BATCH, peers.LIMIT),
    (peers.EXPECTED, peers.LIMIT),
    (peers.TORCH_DROPOUT, peers.BATCH),
    (peers.SHARED, peers.TIMM_SHARED),
    (peers.DROPOUT, peers.TORCH_DROPOUT),
)
"""The ratios of times to report; those of hookdrop are also reported without its compiled kernel."""
SMALL: tuple[Pair, ...] = (
    (peers.BATCH, peers.TORCHVISION),
    (peers.DROPOUT, peers.TORCH_DROPOUT),
    (peers.DROPOUT2D, peers.TORCH_DROPOUT2D),
    (peers.DROP_PATH, peers.TIMM_DROP_PATH),
)
SMALL_SHAPES, SMALL_BLOCK = ((4, 16, 7, 7), (16, 8, 7, 7), (8, 64, 7, 7), (8, 64, 14, 14)), 3
"""From 3,000 elements; 1,000 to 100 million are in the growth part."""
SIZES, RATES = (7, 13, 21), (0.01, 0.1, 0.3, 0.5)
GROWTH_NAMES = (peers.LIMIT, peers.BATCH, peers.TORCHVISION, peers.TIMM, peers.TORCH_DROPOUT)
MAP, SMALL_MAP, GROWTH_ROUNDS = (28, 28), (14, 14), 3
"""The maps of the growth part, from 1e4 elements and below; the minimum number of rounds per size."""
MAX_SECONDS = 2.0
"""Implementations with a slower call are not run on larger tensors."""
BYTES_PER_ELEMENT = 64
"""Peak memory of the largest consumer: float32 input, gradients, output and masks, and int64 pooling indices."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    options = parse_options(argv)
    shapes = [peers.format_shape(shape) for shape in options.shapes]
    return program.main(options, PARTS, p=peers.P, block_size=peers.BLOCK, dtype="float32", shapes=shapes)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = program.parser(__doc__, PARTS, rounds=25, out="runs/speed/results.json")
    parser.add_argument("--shapes", type=peers.shape, nargs="+", help="shapes NxCxHxW (default: 3, or 5 on a GPU)")
    parser.add_argument("--elements", type=float, help="size of the largest tensor in the growth part (default: 1e8)")
    options = parser.parse_args(argv)
    options.shapes = options.shapes or (peers.SHAPES if options.device == "cpu" else peers.GPU_SHAPES)
    options.elements = options.elements or (1e6 if options.quick else 1e8)
    return options


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare all implementations at each shape."""
    say(
        console,
        f"float32, forward + backward, p = {peers.P}, block_size = {peers.BLOCK}, a mask per channel unless 'shared'. "
        "Ratios of times within a round: median [quartiles].\n",
    )
    found: dict[str, dict[str, Any]] = {}
    for shape in options.shapes:
        name = peers.format_shape(shape)
        say(console, f"timing at {name} ...")
        implementations = peers.implementations(device=options.device)
        samples = _measure(shape, implementations, options, console)
        numbers = {
            name: {
                "over_limit": ratios(samples, name, peers.LIMIT)._asdict(),
                "dropped": peers.dropped_fraction(implementation, shape, device=options.device),
                **samples[name].numbers(),
            }
            for name, implementation in implementations.items()
        }
        pairs = [*PAIRS, *(_without_kernel(*pair) for pair in PAIRS)]
        of_pairs = {" / ".join(pair): ratios(samples, *pair)._asdict() for pair in pairs if {*pair} <= {*samples}}
        found[name] = {"contestants": numbers, "ratios": of_pairs, "disturbed_turns": preempted_fraction(samples)}
    heads = [column for shape in found for column in (f"{shape}\ntime / ({peers.LIMIT})", "dropped\nfraction")]
    shown = new_table("\nTimes relative to the limit, and measured dropped fractions", "\nregularizer", *heads)
    for name in numbers:
        results = [of_shape["contestants"][name] for of_shape in found.values()]
        cells = [(str(Quartiles(**one["over_limit"])), f"{one['dropped']:.3f}") for one in results]
        shown.add_row(name, *(text for both in cells for text in both))
    console.print(shown)
    shown = new_table("\nRatios of times", "", *found)
    for pair in of_pairs:
        shown.add_row(pair, *(str(Quartiles(**of_shape["ratios"][pair])) for of_shape in found.values()))
    console.print(shown)
    figures.draw_ratios(options.json.with_name("bars.png"), found)
    return found


def _without_kernel(over: str, under: str) -> Pair:
    over, under = (name + peers.NO_KERNEL if name.startswith("hookdrop") else name for name in (over, under))
    return over, under


def _measure(
    shape: peers.Shape,
    implementations: Mapping[str, peers.Implementation],
    options: argparse.Namespace,
    console: Console,
    rounds: int | None = None,
) -> dict[str, Samples]:
    """Time forward and backward of each implementation on the same tensors."""
    x, grad = peers.make_inputs(shape, options.device)
    jobs = {name: implementation.job(x, grad) for name, implementation in implementations.items()}
    samples = measure(jobs, rounds or options.rounds, options.device)
    warn_if_busy(console, samples, peers.format_shape(shape))
    return samples


def small(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare the regularizers with their peers on small tensors, where the calls of operations are the cost."""
    shown = new_table("\nSmall tensors: ratios of times", "shape", *(f"{over}\n/ {under}" for over, under in SMALL))
    found = {}
    implementations = peers.implementations(block=SMALL_BLOCK, device=options.device) | peers.drop_paths()
    for shape in SMALL_SHAPES:
        name, chosen = peers.format_shape(shape), {name: implementations[name] for pair in SMALL for name in pair}
        samples = _measure(shape, chosen, options, console)
        of_pairs = {" / ".join(pair): ratios(samples, *pair) for pair in SMALL}
        numbers = {name: times.numbers() for name, times in samples.items()}
        found[name] = {"contestants": numbers, "ratios": {pair: one._asdict() for pair, one in of_pairs.items()}}
        shown.add_row(name, *map(str, of_pairs.values()))
    console.print(shown)
    return found


def blocks(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the cost of larger blocks relative to blocks of 7, at the last shape."""
    shape = options.shapes[-1]
    of_sizes = {size: peers.implementations(block=size, device=options.device) for size in SIZES}
    names = [name for name in of_sizes[SIZES[0]] if name.removesuffix(peers.NO_KERNEL) == peers.BATCH]
    samples = _measure(
        shape, {f"{name}, {size}": of_sizes[size][name] for name in names for size in SIZES}, options, console
    )
    title = f"Block sizes at {peers.format_shape(shape)}: time / time with block_size = {SIZES[0]}"
    shown = new_table(title, "regularizer", *map(str, SIZES), "slowest / fastest")
    found = {}
    for name in names:
        by_size = {size: ratios(samples, f"{name}, {size}", f"{name}, {SIZES[0]}") for size in SIZES}
        medians = [ratio.median for ratio in by_size.values()]
        spread = max(medians) / min(medians)
        found[name] = {"ratios": {size: ratio._asdict() for size, ratio in by_size.items()}, "apart": spread}
        shown.add_row(name, *map(str, by_size.values()), three_digits(spread))
    console.print(shown)
    return found


def growth(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the cost by tensor size."""
    names: list[str] = list(GROWTH_NAMES)
    found: dict[int, dict[str, Any]] = {}
    title = f"\nTensor sizes, maps of 28x28 (14x14 below 1e4): time / ({peers.LIMIT})"
    shown = new_table(title, "elements", *names[1:])
    implementations = peers.implementations(device=options.device)
    for shape in _growth_shapes(options.elements, options.device):
        rounds, elements = max(GROWTH_ROUNDS, options.rounds // 3), math.prod(shape)
        samples = _measure(shape, {name: implementations[name] for name in names}, options, console, rounds)
        found[elements] = {name: times.numbers() for name, times in samples.items()}
        cells = (str(ratios(samples, name, peers.LIMIT)) if name in samples else "-" for name in GROWTH_NAMES[1:])
        shown.add_row(f"{elements:.1e}", *cells)
        names = [name for name in names if max(samples[name].seconds.values()) <= MAX_SECONDS]
        if peers.LIMIT not in names:
            break
    console.print(shown)
    figures.draw_growth(options.json.with_name("growth.png"), found)
    return {str(elements): numbers for elements, numbers in found.items()}


def _growth_shapes(limit: float, device: str) -> list[peers.Shape]:
    """Return shapes from 1e3 elements, about tripling, up to `limit` or the available memory."""
    on_host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = min(limit, (on_host if device == "cpu" else torch.cuda.mem_get_info()[0]) / BYTES_PER_ELEMENT)
    powers = [10 ** (half / 2) for half in range(6, 1 + math.floor(2 * math.log10(max(most, 1e4)) + 1e-9))]
    maps = [SMALL_MAP if elements < 1e4 else MAP for elements in powers]
    return [(4, max(1, round(one / 4 / math.prod(sizes))), *sizes) for one, sizes in zip(powers, maps, strict=True)]


def memory(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print and return the bytes per element that each regularizer saves for backward, by shape and by rate.

    Tensors that autograd saves stay alive from forward to backward, in all layers at the same time, and so limit the
    batch size. The input does not count, since the previous layer keeps it in any case.
    """

    def by_shape(name: str, p: float) -> dict[str, float]:
        implementation = peers.implementations(p, device=options.device)[name]
        inputs = [torch.randn(shape, device=options.device, requires_grad=True) for shape in options.shapes]
        return {peers.format_shape(x.shape): saved_bytes(implementation, x) / x.numel() for x in inputs}

    every = peers.implementations(device=options.device)
    ours = [name for name, one in every.items() if name.startswith("hookdrop") and not one.no_kernel]
    at_p = {name: by_shape(name, peers.P) for name in every}
    by_rate = {name: {str(p): by_shape(name, p) for p in RATES} for name in ours}
    title = f"Bytes saved for backward per element, float32, p = {peers.P}, block_size = {peers.BLOCK}"
    _print_bytes(console, title, at_p)
    for shape in map(peers.format_shape, options.shapes):
        rates = {name: {f"p = {p}": of[shape] for p, of in by_rate[name].items()} for name in ours}
        _print_bytes(console, f"Bytes by rate at {shape}", rates)
    return {"bytes_per_element": at_p, "by_rate": by_rate}


def saved_bytes(implementation: peers.Implementation, x: Tensor) -> int:
    """Return the bytes that a forward saves for backward, excluding `x`."""
    with implementation.context():
        storages = saved_storages(lambda: implementation.call(x))
    storages.pop(x.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def _print_bytes(console: Console, title: str, numbers: Mapping[str, Mapping[str, float]]) -> None:
    shown = new_table(title, "regularizer", *next(iter(numbers.values())))
    for name, columns in numbers.items():
        shown.add_row(name, *(f"{value:.4f}" for value in columns.values()))
    console.print(shown)


PARTS: dict[str, Callable[[argparse.Namespace, Console], dict[str, Any]]] = {
    "main": compare,
    "small": small,
    "blocks": blocks,
    "growth": growth,
    "memory": memory,
}


if __name__ == "__main__":
    sys.exit(main())
