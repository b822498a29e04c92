"""Times of calls that take turns, and ratios of them.

An absolute time on a busy machine says little; the ratio of two calls that ran within the same second says more. So
jobs run in rounds, in another order each round, and ratios are formed within a round. Median and quartiles over the
rounds are reported.
"""

from __future__ import annotations

import gc
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

WARM_UPS = 3
SLOW, SLOW_EVERY = 0.15, 3
"""A job that takes longer than so many seconds runs in every third round."""
SHORTEST, MOST_REPEATS = 2e-3, 50
"""A job that takes fewer seconds is repeated within its turn, but not more often than that."""
OFTEN = 50.0
"""Forced waits for a core a second; a busy machine has hundreds, an idle one next to none."""


class Spread(NamedTuple):
    """Lower quartile, median, upper quartile."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The quartiles of one value or more."""
        return cls(*(float(value) for value in np.quantile(values, (0.25, 0.5, 0.75))))

    def __str__(self) -> str:
        """As in `1.25 [1.20, 1.31]`."""
        return f"{digits(self.median)} [{digits(self.low)}, {digits(self.high)}]"


@dataclass
class Samples:
    """One job's seconds, page faults and forced waits for a core per call, by the number of the round."""

    seconds: dict[int, float] = field(default_factory=dict)
    faults: dict[int, float] = field(default_factory=dict)
    waits: dict[int, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "milliseconds": Spread.of([1e3 * value for value in self.seconds.values()])._asdict(),
            "page_faults_per_call": Spread.of(list(self.faults.values()))._asdict(),
            "involuntary_switches_per_call": Spread.of(list(self.waits.values()))._asdict(),
            "rounds": list(self.seconds),
            "seconds_of_rounds": list(self.seconds.values()),
        }


def measure(jobs: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu") -> dict[str, Samples]:
    """Run all jobs in every round (slow ones in every third), freshly shuffled, after some rounds that don't count."""
    samples = {name: Samples() for name in jobs}
    shuffler = random.Random(0)
    with _no_garbage_collection():
        first = {name: _fastest(job, device) for name, job in jobs.items()}
        for turn in range(rounds):
            names = [name for name in jobs if turn % (SLOW_EVERY if first[name] > SLOW else 1) == 0]
            shuffler.shuffle(names)
            for name in names:
                repeats = min(MOST_REPEATS, max(1, round(SHORTEST / first[name])))
                of_name = samples[name]
                of_name.seconds[turn], of_name.faults[turn], of_name.waits[turn] = once(jobs[name], repeats, device)
            gc.collect()
    return samples


def once(job: Callable[[], object], repeats: int, device: str) -> tuple[float, float, float]:
    """Seconds, page faults and forced waits for a core of a call."""
    synchronize(device)
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(repeats):
        job()
    synchronize(device)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    faults, waits = after.ru_minflt - before.ru_minflt, after.ru_nivcsw - before.ru_nivcsw
    return seconds / repeats, faults / repeats, waits / repeats


def disturbed(samples: Mapping[str, Samples]) -> float:
    """The fraction of turns in which something else was often given a core that a job was using."""
    a_second = [waits / of_name.seconds[turn] for of_name in samples.values() for turn, waits in of_name.waits.items()]
    return sum(waits > OFTEN for waits in a_second) / len(a_second)


def ratios(samples: Mapping[str, Samples], over: str, under: str) -> Spread:
    """Times of `over` / times of `under`, in the rounds that had both."""
    above, below = samples[over].seconds, samples[under].seconds
    return Spread.of([above[turn] / below[turn] for turn in above if turn in below])


def synchronize(device: str) -> None:
    """Wait for the device; the CPU needs no waiting for."""
    if device != "cpu":
        torch.cuda.synchronize()


def digits(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.{1 if value >= 9.995 else 2}f}"


def _fastest(job: Callable[[], object], device: str) -> float:
    return min(once(job, 1, device)[0] for _ in range(WARM_UPS))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
