"""Time and memory of a training step with each arm, relative to the baseline without a regularizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

import timing
from comparison.analysis.schema import Spread
from comparison.analysis.summary import Costs
from comparison.run.run_setup import RunSetup, at_final_rate
from comparison.run.training import batch_of, step
from comparison.spec.run_spec import Run
from comparison.spec.study import Entry
from timing import MIN_SECONDS, Quartiles, ratios, saved_storages, time_call

FEWEST_ROUNDS = 15


def measure(entries: Sequence[Entry], seconds: float) -> Costs:
    """Time and memory relative to none, by cell and arm. Call this in a process in which nothing else runs."""
    found: dict[tuple[str, str], tuple[Spread, Spread]] = {}
    for cell in dict.fromkeys(entry.cell for entry in entries):
        runs = {entry.arm.name: next(iter(entry.runs.values())) for entry in entries if entry.cell == cell}
        for name, (times, memory) in measure_cell(runs, seconds).items():
            found[cell, name] = Spread(**times._asdict()), Spread(**memory._asdict())
    return found


def measure_cell(runs: Mapping[str, Run], seconds: float) -> dict[str, tuple[Quartiles, Quartiles]]:
    """Measure training steps at the final rate: ratios to `none` in the same round, of time and of memory, by arm.

    The rounds take about `seconds`.
    """
    torch.set_num_threads(1)
    setups = {name: at_final_rate(run) for name, run in runs.items()}
    jobs = {name: partial(step, setup, *batch_of(setup)) for name, setup in setups.items()}
    memory = {name: _memory(setups[name], job) for name, job in jobs.items()}
    device = setups["none"].device.type
    once = sum(max(MIN_SECONDS, time_call(job, 1, device)[0]) for job in jobs.values())
    samples = timing.measure(jobs, max(FEWEST_ROUNDS, int(seconds / once)), device)
    return {name: (ratios(samples, name, "none"), Quartiles.of([memory[name] / memory["none"]])) for name in runs}


def _memory(setup: RunSetup, job: Callable[[], object]) -> float:
    """Peak memory of a step on CUDA; on the CPU, the memory saved for backward. In bytes."""
    job()
    if setup.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(setup.device)
        job()
        return float(torch.cuda.max_memory_allocated(setup.device))
    return float(sum(saved_storages(lambda: setup.forward(batch_of(setup)[0])).values()))
