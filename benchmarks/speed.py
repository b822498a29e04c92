"""Compare the speed of hookdrop with other libraries, forward and backward: `python benchmarks/speed.py`.

All implementations run in one process, at the same p and block size, on the same tensors. The results are ratios of
times within a round (see timing.py). The last part measures memory and the dropped fractions.

The limit is `x * c`, forward and backward, which reads and writes each element once. Allocating memory takes most of
its time: glibc returns large freed buffers to the system, and reusing them causes a page fault per 4 KB, depending on
the call before. The random order distributes these faults evenly, and the results file counts them.

Run nothing else at the same time: PyTorch's threads synchronize, so one preempted thread delays the others by several
milliseconds. The script warns if more than 20 % of the turns were preempted.
"""

import argparse
import math
import packages  # noqa: F401
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

import peers
import program
from timing import Case, race, saved_storages

PAIRS = (
    (peers.TORCHVISION, peers.BATCH),
    (peers.TIMM, peers.BATCH),
    (peers.TORCH_DROPOUT, peers.BATCH),
    (peers.SHARED, peers.TIMM_SHARED),
    (peers.DROPOUT, peers.TORCH_DROPOUT),
)
"""The ratios of times to report, besides those to the limit; those of hookdrop also without its compiled kernel."""
SMALL = (
    (peers.BATCH, peers.TORCHVISION),
    (peers.DROPOUT, peers.TORCH_DROPOUT),
    (peers.DROPOUT2D, peers.TORCH_DROPOUT2D),
    (peers.DROP_PATH, peers.TIMM_DROP_PATH),
)
SMALL_SHAPES, SMALL_BLOCK = ("4x16x7x7", "16x8x7x7", "8x64x7x7", "8x64x14x14"), 3
"""From 3,000 elements; 1,000 to 100 million are in the growth part."""
SIZES = (7, 13, 21)
GROWTH_NAMES = (peers.LIMIT, peers.BATCH, peers.TORCHVISION, peers.TIMM, peers.TORCH_DROPOUT)
EDGE, SMALL_EDGE, GROWTH_ROUNDS = 28, 14, 3
"""The edges of the maps in the growth part, from 1e4 elements and below; the minimum number of rounds per size."""
MAX_SECONDS = 2.0
"""Implementations with a slower call are not run on larger tensors."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = program.parser(__doc__, PARTS, rounds=25, out="runs/speed/results.json")
    parser.add_argument("--shapes", nargs="+", help="shapes NxCxHxW (default: 3, or 5 on a GPU)")
    parser.add_argument("--elements", type=float, help="size of the largest tensor in the growth part (default: 1e8)")
    options = parser.parse_args(argv)
    options.shapes = options.shapes or (peers.SHAPES if options.device == "cpu" else peers.GPU_SHAPES)
    options.elements = options.elements or (1e6 if options.quick else 1e8)
    return program.main(options, PARTS, p=peers.P, block_size=peers.BLOCK, dtype="float32")


def cases(shapes: Iterable[str], functions: Mapping[str, peers.Function], device: str) -> Iterator[Case]:
    """Yield the jobs at each shape, forward and backward on the same tensors."""
    for shape in shapes:
        x, grad = peers.make_inputs(shape, device)
        yield shape, {name: peers.job(name, one, x, grad) for name, one in functions.items()}


def every(options: argparse.Namespace) -> dict[str, Any]:
    """Compare all implementations at each shape."""
    functions = peers.implementations(device=options.device)
    without = [[name + peers.NO_KERNEL if name.startswith("hookdrop") else name for name in pair] for pair in PAIRS]
    pairs = [*PAIRS, *((over, under) for over, under in without)]
    pairs += [(name, peers.LIMIT) for name in functions if name != peers.LIMIT]
    title = f"Forward + backward, p = {peers.P}, block_size = {peers.BLOCK}, a mask per channel unless shared"
    return race(title, cases(options.shapes, functions, options.device), pairs, options)


def small(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the regularizers with their peers on small tensors, where the calls of operations are the cost."""
    functions = peers.calls(block=SMALL_BLOCK)
    chosen = {name: functions[name] for pair in SMALL for name in pair}
    return race("Small tensors", cases(SMALL_SHAPES, chosen, options.device), SMALL, options)


def blocks(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the cost of larger blocks relative to blocks of 7, at the last shape."""
    chosen = {f"{peers.BATCH}, blocks of {size}": peers.calls(block=size)[peers.BATCH] for size in SIZES}
    first, *others = chosen
    pairs = [(name, first) for name in others]
    return race("Block sizes", cases(options.shapes[-1:], chosen, options.device), pairs, options)


def growth(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the cost by tensor size: from 1e3 elements, about tripling; with 1e8, a job takes up to 6 GiB."""
    chosen = {name: peers.calls()[name] for name in GROWTH_NAMES}
    pairs = [(name, peers.LIMIT) for name in GROWTH_NAMES[1:]]
    powers = [10 ** (half / 2) for half in range(6, 1 + math.floor(2 * math.log10(options.elements) + 1e-9))]
    edges = {elements: SMALL_EDGE if elements < 1e4 else EDGE for elements in powers}
    shapes = [f"4x{max(1, round(elements / 4 / edge**2))}x{edge}x{edge}" for elements, edge in edges.items()]
    settings = {"rounds": max(GROWTH_ROUNDS, options.rounds // 3), "most": MAX_SECONDS}
    return race("Tensor sizes", cases(shapes, chosen, options.device), pairs, options, **settings)


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Print and return the bytes per element that each regularizer saves for backward, and the fraction it drops.

    Tensors that autograd saves stay alive from forward to backward, in all layers at the same time, and so limit the
    batch size. The input does not count, since the previous layer keeps it in any case.
    """
    found: dict[str, dict[str, Any]] = {}
    shown: dict[str, dict[str, object]] = {}
    for name, one in peers.implementations(device=options.device).items():
        for shape in options.shapes:
            x, _ = peers.make_inputs(shape, options.device)
            dropped = peers.dropped_fraction(name, one, x.shape, device=options.device)
            numbers = {"bytes_per_element": saved_bytes(name, one, x) / x.numel(), "dropped": dropped}
            found.setdefault(name, {})[shape] = numbers
            shown.setdefault(name, {})[shape] = "{:.4f} {:.3f}".format(*numbers.values())
    program.show("Bytes saved per element, and dropped fraction", shown)
    return found


def saved_bytes(name: str, function: peers.Function, x: Tensor) -> int:
    """Return the bytes that a forward saves for backward, excluding `x`."""
    with peers.kernel_of(name):
        storages = saved_storages(lambda: function(x))
    storages.pop(x.untyped_storage().data_ptr(), None)
    return sum(storages.values())


PARTS: dict[str, program.Part] = {"main": every, "small": small, "blocks": blocks, "growth": growth, "memory": memory}


if __name__ == "__main__":
    sys.exit(main())
