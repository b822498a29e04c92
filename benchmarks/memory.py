"""The bytes per element that each regularizer saves for backward: the last part of `python benchmarks/speed.py`.

Tensors that autograd saves stay alive from forward to backward, in all layers at the same time, and so limit the batch
size. Each storage counts once. The input does not count, since the previous layer keeps it in any case.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import peers
from terminal import say
from thresholds import BYTES, new_table, verdict

RATES = (0.01, 0.1, 0.3, 0.5)
Numbers = dict[str, dict[str, float]]


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print the bytes by shape and by rate, and return them."""
    shapes, device = options.shapes, options.device
    implementations = peers.implementations(device=device)
    at_p = {name: _bytes_by_shape(name, peers.P, shapes, device) for name in implementations}
    ours = [name for name, one in implementations.items() if one.from_hookdrop and not one.no_kernel]
    by_rate = {name: {str(p): _bytes_by_shape(name, p, shapes, device) for p in RATES} for name in ours}
    title = f"Bytes saved for backward per element, float32, p = {peers.P}, block_size = {peers.BLOCK}"
    console.print(_table(title, at_p))
    say(console, _verdicts(at_p, device) + "\n")
    for shape in map(peers.format_shape, shapes):
        rates = {name: {f"p = {p}": by_shape[shape] for p, by_shape in by_rate[name].items()} for name in ours}
        console.print(_table(f"Bytes by rate at {shape}", rates))
    return {"bytes_per_element": at_p, "by_rate": by_rate, "must": BYTES[device][0], "aim": BYTES[device][1]}


def saved_bytes(implementation: peers.Implementation, x: Tensor) -> int:
    """Return the bytes that a forward saves for backward, excluding `x`."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        # Keep each storage alive until all are counted, so that no address is reused.
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with implementation.context(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        implementation.call(x)
    storages.pop(x.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def _bytes_by_shape(name: str, p: float, shapes: Sequence[peers.Shape], device: str) -> dict[str, float]:
    found = {}
    for shape in shapes:
        x = torch.randn(shape, device=device, requires_grad=True)
        found[peers.format_shape(shape)] = saved_bytes(peers.implementations(p, device=device)[name], x) / x.numel()
    return found


def _table(title: str, numbers: Numbers) -> Table:
    shown = new_table(title, "regularizer", *next(iter(numbers.values())))
    for name, columns in numbers.items():
        shown.add_row(name, *(f"{value:.4f}" for value in columns.values()))
    return shown


def _verdicts(numbers: Numbers, device: str) -> str:
    ours = [name for name, one in peers.implementations().items() if one.drops_blocks]
    worst = max(ours, key=lambda name: max(numbers[name].values()))
    most, (must, aim) = max(numbers[worst].values()), BYTES[device]
    return (
        f"At p = 0.1, hookdrop's DropBlock saves at most {most:.4f} bytes per element ({worst}). Required: "
        f"<= {must}, {verdict(most <= must)}. Target: <= {aim}, {verdict(most <= aim)}."
    )
