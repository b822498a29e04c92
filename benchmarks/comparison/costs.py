"""Time and memory of a training step with each arm, relative to the baseline without a regularizer."""

from __future__ import annotations

import contextlib
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
from comparison.analysis.summary import Costs
from comparison.engines.store import replace_file
from comparison.run.run_setup import RunSetup, at_final_rate
from comparison.run.training import batch_of, step
from comparison.spec.run_spec import Run
from comparison.spec.study import Entry
from timing import saved_storages

STEPS_IN_TURN, FEWEST_ROUNDS = 4, 5


def measure(entries: Sequence[Entry], seconds: float, path: Path) -> Costs:
    """Time and memory relative to none, by cell and arm. Earlier measurements of the same runs are read from `path`.

    Call this in a separate process, when nothing else is running.
    """
    cache: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        cache = json.loads(path.read_text())
    found: dict[tuple[str, str], tuple[Spread, Spread]] = {}
    for cell in dict.fromkeys(entry.cell for entry in entries):
        runs = {entry.arm.name: next(iter(entry.runs.values())) for entry in entries if entry.cell == cell}
        key = hashlib.sha256("".join(run.key for run in runs.values()).encode()).hexdigest()[:16]
        if key not in cache:
            cache[key] = measure_cell(runs, seconds)
            replace_file(path, json.dumps(cache).encode())
        for name, (times, memory) in cache[key].items():
            found[cell, name] = _spread(times), _spread(memory)
    return found


def measure_cell(runs: Mapping[str, Run], seconds: float) -> dict[str, tuple[list[float], list[float]]]:
    """Measure training steps at the final rate: ratios to `none` in the same round, of time and of memory, by arm.

    The arms take turns, so that changes in machine speed affect all of them equally. No round starts after `seconds`.
    """
    torch.set_num_threads(1)
    setups = {name: at_final_rate(run) for name, run in runs.items()}
    batches = {name: batch_of(setup) for name, setup in setups.items()}
    memory = {name: _memory(setup, *batches[name]) for name, setup in setups.items()}
    rounds: list[dict[str, float]] = []
    started = time.perf_counter()
    while len(rounds) < FEWEST_ROUNDS or time.perf_counter() - started < seconds:
        rounds.append({name: _time(setup, *batches[name]) for name, setup in setups.items()})
    return {
        name: ([times[name] / times["none"] for times in rounds], [memory[name] / memory["none"]] * 2) for name in runs
    }


def _time(setup: RunSetup, x_BCHW: Tensor, y_B: Tensor) -> float:
    synchronize: Any = torch.cuda.synchronize if setup.device.type == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    for _ in range(STEPS_IN_TURN):
        step(setup, x_BCHW, y_B)
    synchronize()
    return time.perf_counter() - started


def _memory(setup: RunSetup, x_BCHW: Tensor, y_B: Tensor) -> float:
    """Peak memory of a step on CUDA; on the CPU, the memory saved for backward. In bytes."""
    step(setup, x_BCHW, y_B)
    if setup.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(setup.device)
        step(setup, x_BCHW, y_B)
        return float(torch.cuda.max_memory_allocated(setup.device))
    return float(sum(saved_storages(lambda: setup.forward(x_BCHW)).values()))


def _spread(values: Sequence[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low=low, median=median, high=high)
