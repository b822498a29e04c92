"""Drawing only the successes, or eight trials per random number, is equivalent to drawing every trial.

A test fails if the p-value of its statistic is below `MIN_P_VALUE`. The seed in conftest.py fixes the outcome; another
seed would fail one test in ten thousand. Every statistic is also validated against wrong samplers, which it rejects.
"""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch
from torch import Tensor

from hookdrop.kernels import random_numbers
from hookdrop.kernels.random_numbers import successes, trials
from tests.support.bernoulli import CPU, MIN_P_VALUE, RATES, Sampler, by_successes, by_trials, gaps, numbers, positions


def test_rare_successes_among_many_trials() -> None:
    """10^11 trials at p = 1e-6: chi-square of the gaps, Kolmogorov-Smirnov of the positions."""
    assert gaps(by_successes, 1e-6) > MIN_P_VALUE
    at = successes(10**11, 1e-6, CPU)
    assert at.dtype == torch.int64
    assert 2**35 < at.max() < 10**11
    at = at.double() / 1e11
    assert scipy.stats.kstest(at.numpy(), "uniform").pvalue > MIN_P_VALUE


@pytest.mark.parametrize("p", [1e-12, 0.003, 0.3, 0.5, 0.97])
@pytest.mark.parametrize("sampler", [by_successes, by_trials])
def test_a_single_trial(sampler: Sampler, p: float) -> None:
    """It succeeds with probability p, within 4 standard errors over 4,000 repetitions."""
    found = [sampler(1, p).tolist() for _ in range(4000)]
    assert all(at in ([], [0]) for at in found)
    assert abs(sum(map(len, found)) / 4000 - p) < 4 * math.sqrt(p * (1 - p) / 4000) + 1e-9


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 1000])
def test_certain_and_impossible_trials(count: int) -> None:
    for static in (False, True):
        assert trials(count, 1.0, CPU, static=static).tolist() == [1] * count
        assert trials(count, 0.0, CPU, static=static).tolist() == [0] * count
        assert successes(count, 0.0, CPU).tolist() == []


@pytest.mark.parametrize("p", [*RATES, math.nextafter(1.0, 0.0), 1e-300])
@pytest.mark.parametrize("count", [1, 7, 100, 12_345])
def test_successes_are_sorted_unique_indices(count: int, p: float) -> None:
    at = successes(count, p, CPU)
    assert at.dtype == torch.int64
    assert at.tolist() == sorted(set(range(count)) & set(at.tolist()))


@pytest.mark.parametrize("p", [0.003, 0.1, 0.6])
@pytest.mark.parametrize("steps", [5, 17])
def test_a_batch_of_gaps_that_ends_early_is_continued(monkeypatch: pytest.MonkeyPatch, steps: int, p: float) -> None:
    """Normally the first batch is almost always sufficient. Here it never is, with the same distribution."""
    original, calls = random_numbers._logs, []

    def shorter(_: int, device: torch.device) -> Tensor:
        calls.append(steps)
        return original(steps, device)

    monkeypatch.setattr(random_numbers, "_logs", shorter)
    assert numbers(by_successes, p, 300) > MIN_P_VALUE
    assert len(calls) > 3 * 300
    assert gaps(by_successes, p, 400 * steps) > MIN_P_VALUE
    assert positions(by_successes, p, 400 * steps) > MIN_P_VALUE
