"""Time and memory of a training step with each arm, relative to the baseline without a regularizer."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

import timing
from comparison.analysis.schema import Spread
from comparison.analysis.summary import Costs
from comparison.run.run_setup import RunSetup, at_final_rate
from comparison.run.training import batch_of, step
from comparison.spec.study import Entry
from timing import MIN_SECONDS, Quartiles, ratios, saved_storages, time_call

FEWEST_ROUNDS = 15


def measure(entries: Sequence[Entry], seconds: float) -> Costs:
    """Measure training steps at the final rate: ratios to `none` in the same round, of time and of memory.

    The rounds of a cell take about `seconds`. Call this in a process in which nothing else runs.
    """
    torch.set_num_threads(1)
    found: dict[tuple[str, str], tuple[Spread, Spread]] = {}
    for cell in dict.fromkeys(entry.cell for entry in entries):
        of_cell = [entry for entry in entries if entry.cell == cell]
        setups = {entry.arm.name: at_final_rate(next(iter(entry.runs.values()))) for entry in of_cell}
        jobs = {name: partial(step, setup, *batch_of(setup)) for name, setup in setups.items()}
        memory, device = {name: _memory(setups[name], job) for name, job in jobs.items()}, setups["none"].device.type
        once = sum(max(MIN_SECONDS, time_call(job, 1, device)[0]) for job in jobs.values())
        samples = timing.measure(jobs, max(FEWEST_ROUNDS, int(seconds / once)), device)
        for name in jobs:
            times, sizes = Quartiles.of(ratios(samples, name, "none")), Quartiles.of([memory[name] / memory["none"]])
            found[cell, name] = Spread(**times._asdict()), Spread(**sizes._asdict())
    return found


def _memory(setup: RunSetup, job: Callable[[], object]) -> float:
    """Peak memory of a step on CUDA; on the CPU, the memory saved for backward. In bytes."""
    job()
    if setup.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(setup.device)
        job()
        return float(torch.cuda.max_memory_allocated(setup.device))
    return float(sum(saved_storages(lambda: setup.forward(batch_of(setup)[0])).values()))
