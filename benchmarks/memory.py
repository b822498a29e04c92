"""Bytes that each regularizer keeps for the backward pass, per element: `python benchmarks/memory.py`.

What autograd saves between forward and backward lives as long as the activations do, for every layer at once, so it
counts against the batch that fits. Each storage counts once; the input itself doesn't count, which the layer before
has anyway.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import peers
from terminal import make_console, say
from thresholds import BYTES_AIM, BYTES_MUST, new_table, word

RATES = (0.01, 0.1, 0.3, 0.5)
Numbers = dict[str, dict[str, float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print, and write the numbers if asked to; 0 whatever they are."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    console = make_console()
    say(console, peers.in_words(peers.facts()) + "\n")
    results = report(console, options.shapes)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": peers.facts(), **results}, indent=1, allow_nan=False))
        say(console, f"All numbers: {options.json}")
    return 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--shapes", type=peers.shape, nargs="+", default=peers.SHAPES, help="NxCxHxW, one or more")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch's threads")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser.parse_args(argv)


def report(console: Console, shapes: Sequence[peers.Shape]) -> dict[str, Any]:
    """Print both tables; their numbers."""
    at_p = {name: _of_shapes(name, peers.P, shapes) for name in peers.contestants()}
    ours = [name for name, one in peers.contestants().items() if one.ours and not one.no_kernel]
    by_rate = {name: {str(p): _of_shapes(name, p, shapes) for p in RATES} for name in ours}
    title = f"Bytes kept for backward per element, float32, p = {peers.P}, blocks of {peers.BLOCK}"
    console.print(_table(title, at_p))
    say(console, _verdicts(at_p) + "\n")
    for shape in map(peers.named, shapes):
        rates = {name: {f"p = {p}": of_shapes[shape] for p, of_shapes in by_rate[name].items()} for name in ours}
        console.print(_table(f"The same for other rates at {shape}", rates))
    return {"bytes_per_element": at_p, "by_rate": by_rate, "must": BYTES_MUST, "aim": BYTES_AIM}


def kept(contestant: peers.Contestant, x: Tensor) -> int:
    """Bytes that a forward saves for its backward, beside `x`."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        # Held until all are counted: an address must not be used again meanwhile.
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with contestant.around(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        contestant.call(x)
    storages.pop(x.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def _of_shapes(name: str, p: float, shapes: Sequence[peers.Shape]) -> dict[str, float]:
    found = {}
    for shape in shapes:
        x = torch.randn(shape, requires_grad=True)
        found[peers.named(shape)] = kept(peers.contestants(p)[name], x) / x.numel()
    return found


def _table(title: str, numbers: Numbers) -> Table:
    shown = new_table(title, "regularizer", *next(iter(numbers.values())))
    for name, of_columns in numbers.items():
        shown.add_row(name, *(f"{value:.4f}" for value in of_columns.values()))
    return shown


def _verdicts(numbers: Numbers) -> str:
    ours = [name for name, one in peers.contestants().items() if one.drops_blocks]
    worst = max(ours, key=lambda name: max(numbers[name].values()))
    most = max(numbers[worst].values())
    return (
        f"At p = 0.1 hookdrop's DropBlock keeps at most {most:.4f} bytes per element ({worst}): "
        f"the demand of <= {BYTES_MUST} {word(most <= BYTES_MUST)}, the aim of {BYTES_AIM} {word(most <= BYTES_AIM)}."
    )


if __name__ == "__main__":
    sys.exit(main())
