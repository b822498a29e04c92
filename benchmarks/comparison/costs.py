"""What a training step with each arm costs, against one without: measured apart, in turn, with no run beside it."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comparison.analysis.schema import Spread
from comparison.engines.folder import replace_text
from comparison.run.run_setup import RunSetup, at_final_rate
from comparison.run.training import batch_of, step
from comparison.spec.run_spec import Run
from comparison.spec.study import Entry

STEPS_IN_TURN = 4
FEWEST_ROUNDS = 5

Costs = Mapping[str, tuple[Spread, Spread]]
"""By arm: ratios of time and of memory to none's."""


def measured(entries: Sequence[Entry], seconds: float, path: Path) -> dict[tuple[str, str], tuple[Spread, Spread]]:
    """The costs of all cells; what was measured for the same runs before is read from `path`.

    Call it when nothing else runs; a process of its own is best.
    """
    kept = _kept(path)
    found: dict[tuple[str, str], tuple[Spread, Spread]] = {}
    for cell in dict.fromkeys(entry.cell for entry in entries):
        runs = {entry.arm.name: next(iter(entry.runs.values())) for entry in entries if entry.cell == cell}
        key = hashlib.sha256("".join(run.key for run in runs.values()).encode()).hexdigest()[:16]
        if key not in kept:
            kept[key] = {name: [part.model_dump() for part in parts] for name, parts in of_cell(runs, seconds).items()}
            replace_text(path, json.dumps(kept))
        for name, (spent, held) in kept[key].items():
            found[cell, name] = Spread(**spent), Spread(**held)
    return found


def _kept(path: Path) -> dict[str, Any]:
    """What was measured before; nothing if that can't be read: it can be measured again."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def of_cell(runs: Mapping[str, Run], seconds: float) -> Costs:
    """Time and memory of training steps at the final rate over those of `none` in the same round.

    The arms take turns, so that a machine that slows down or speeds up does so for all of them.

    Args:
        runs: of each arm, `none` among them.
        seconds: start no further round after this.
    """
    torch.set_num_threads(1)
    setups = {name: at_final_rate(run) for name, run in runs.items()}
    batches = {name: batch_of(setup) for name, setup in setups.items()}
    held = {name: _memory(setup, *batches[name]) for name, setup in setups.items()}
    rounds: list[dict[str, float]] = []
    started = time.perf_counter()
    while len(rounds) < FEWEST_ROUNDS or time.perf_counter() - started < seconds:
        rounds.append({name: _time(setup, *batches[name]) for name, setup in setups.items()})
    return {
        name: (
            _spread([times[name] / times["none"] for times in rounds]),
            _spread([held[name] / held["none"]] * 2),
        )
        for name in runs
    }


def _time(setup: RunSetup, x_BCHW: Tensor, y_B: Tensor) -> float:
    _wait(setup)
    started = time.perf_counter()
    for _ in range(STEPS_IN_TURN):
        step(setup, x_BCHW, y_B)
    _wait(setup)
    return time.perf_counter() - started


def _memory(setup: RunSetup, x_BCHW: Tensor, y_B: Tensor) -> float:
    """Bytes: on CUDA the most that is allocated during a step, on a CPU what a forward keeps for its backward."""
    step(setup, x_BCHW, y_B)
    if setup.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(setup.device)
        step(setup, x_BCHW, y_B)
        return float(torch.cuda.max_memory_allocated(setup.device))
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        # Held until all are counted: an address must not be used again meanwhile.
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        setup.forward(x_BCHW)
    return float(sum(storage.nbytes() for storage in storages.values()))


def _wait(setup: RunSetup) -> None:
    if setup.device.type == "cuda":
        torch.cuda.synchronize(setup.device)


def _spread(values: Sequence[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low=low, median=median, high=high)
