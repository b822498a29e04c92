"""Time jobs in interleaved rounds, and compute ratios of their times.

Absolute times on a busy machine are unreliable; the ratio of two calls within the same second is more robust. So jobs
run in rounds, each in a new random order, and ratios are those within a round. Results are their median and quartiles.
"""

import gc
import math
import random
import resource
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from program import show

WARM_UPS = 3
SLOW, SLOW_EVERY = 0.15, 3
"""Jobs that take longer than `SLOW` seconds run in every third round only."""
MIN_SECONDS, MAX_REPEATS = 2e-3, 50
"""Shorter jobs are repeated within their turn, at most `MAX_REPEATS` times."""
MAX_SWITCHES, MAX_PREEMPTED = 50.0, 0.2
"""Involuntary context switches per second (a busy machine has hundreds, an idle one almost none), and the fraction of
turns with more that gives a warning."""
Pairs = Sequence[tuple[str, str]]
COUNTS = ["seconds", "page_faults", "involuntary_switches"]
"""What is measured, per call."""
Jobs = Mapping[str, Callable[[], object]]
Case = tuple[str, Jobs]
"""The title of a column, and its jobs."""


class Quartiles(NamedTuple):
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float] | pd.Series) -> Self:
        return cls(*(float(value) for value in np.quantile(values, (0.25, 0.5, 0.75))))

    def __str__(self) -> str:
        low, median, high = map(three_digits, self)
        return f"{median} [{low}, {high}]"


def measure(jobs: Jobs, rounds: int, device: str = "cpu", where: str = "") -> pd.DataFrame:
    """Run all jobs in random order in every round (slow jobs in every third), after `WARM_UPS` warm-up calls.

    Returns `COUNTS` of each turn by job and round. With `where`, prints a warning if the machine is busy.
    """
    turns, shuffler = dict[tuple[str, int], tuple[float, float, float]](), random.Random(0)
    estimates = {name: min(time_call(job, 1, device)[0] for _ in range(WARM_UPS)) for name, job in jobs.items()}
    for turn in range(rounds):
        names = [name for name in jobs if turn % (SLOW_EVERY if estimates[name] > SLOW else 1) == 0]
        shuffler.shuffle(names)
        for name in names:
            repeats = min(MAX_REPEATS, max(1, round(MIN_SECONDS / estimates[name])))
            turns[name, turn] = time_call(jobs[name], repeats, device)
        gc.collect()
    samples = pd.DataFrame.from_dict(turns, orient="index", columns=COUNTS)
    if where:
        warn_if_busy(samples, where)
    return samples.set_index(pd.MultiIndex.from_tuples(turns))


def time_call(job: Callable[[], object], repeats: int, device: str) -> tuple[float, float, float]:
    """Return `COUNTS` of a call, without garbage collection. On a GPU, its events measure the time."""
    events: list[Any] = [] if device == "cpu" else [torch.cuda.Event(enable_timing=True) for _ in "ab"]  # type: ignore
    before = resource.getrusage(resource.RUSAGE_SELF)
    if events:
        torch.cuda.synchronize()
        events[0].record()
    seconds = timeit.timeit(job, number=repeats)
    if events:  # including the time in which the GPU waits for launches
        events[1].record()
        torch.cuda.synchronize()
        seconds = events[0].elapsed_time(events[1]) / 1e3
    after = resource.getrusage(resource.RUSAGE_SELF)
    faults, switches = after.ru_minflt - before.ru_minflt, after.ru_nivcsw - before.ru_nivcsw
    return seconds / repeats, faults / repeats, switches / repeats


def race(title: str, cases: Iterable[Case], pairs: Pairs, options: Any, **settings: Any) -> dict[str, Any]:
    """Time the jobs of each case. Print the ratios of pairs of jobs, and return all numbers.

    Settings: `rounds`, and `most`, the seconds after which a job is left out of the next cases.
    """
    found: dict[str, dict[str, Any]] = {}
    slow: set[str] = set()
    for case, jobs in cases:
        chosen = {name: job for name, job in jobs.items() if name not in slow}
        samples = measure(chosen, settings.get("rounds", options.rounds), options.device, case)
        slow |= {name for name in chosen if samples.loc[name].seconds.max() > settings.get("most", math.inf)}
        of_pairs = {" / ".join(pair): ratios(samples, *pair) for pair in pairs if {*pair} <= {*chosen}}
        quartiles = {pair: Quartiles.of(values)._asdict() for pair, values in of_pairs.items()}
        found[case] = {"times": {name: _numbers(samples.loc[name]) for name in chosen}, "ratios": quartiles}
    texts = {case: {pair: str(Quartiles(**one)) for pair, one in of["ratios"].items()} for case, of in found.items()}
    table = pd.DataFrame(texts)
    table = table.T if len(table.columns) > len(table) else table
    show(f"{title}: ratios of times, median and quartiles", table.to_dict("index"))
    return found


def _numbers(samples: pd.DataFrame) -> dict[str, Any]:
    of = {f"{name}_per_call": Quartiles.of(samples[name])._asdict() for name in COUNTS}
    return {**of, "rounds": samples.index.tolist(), "seconds_of_rounds": samples.seconds.tolist()}


def warn_if_busy(samples: pd.DataFrame, where: str) -> None:
    """Print a warning if other processes often preempted the jobs."""
    often = float((samples.involuntary_switches / samples.seconds > MAX_SWITCHES).mean())
    if often > MAX_PREEMPTED:
        print(f"  warning: {where}: other processes preempted {often:.0%} of the turns; see speed.py.")


def saved_storages(forward: Callable[[], object]) -> dict[int, int]:
    """The bytes of each storage that a forward saves for backward, by address: each counts once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        # Keep each storage alive until all are counted, so that no address is reused.
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return {address: storage.nbytes() for address, storage in storages.items()}


def ratios(samples: pd.DataFrame, over: str, under: str) -> list[float]:
    """Divide the times of `over` by those of `under`, in the rounds that have both."""
    return [*(samples.seconds[over] / samples.seconds[under]).dropna()]


def three_digits(value: float) -> str:
    """Format with three digits and without an exponent."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.{1 if value >= 9.995 else 2}f}"
