"""Drawing only the successes, or eight trials per random number, is equivalent to drawing every trial.

A test fails if the p-value of its statistic is below `MIN_P_VALUE`. The seed in conftest.py fixes the outcome; another
seed would fail one test in ten thousand. Every statistic is also validated against wrong samplers, which it rejects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from hookdrop.kernels.random_numbers import successes, trials

CPU = torch.device("cpu")
MIN_P_VALUE = 1e-4
Sampler = Callable[[int, float], Tensor]
"""A function of (count, p) that returns the sorted indices of the successes."""


def by_successes(count: int, p: float) -> Tensor:
    return successes(count, p, CPU)


def by_trials(count: int, p: float) -> Tensor:
    return trials(count, p, CPU, static=False).nonzero().flatten()


def by_static_trials(count: int, p: float) -> Tensor:
    return trials(count, p, CPU, static=True).nonzero().flatten()


def by_brute_force(count: int, p: float) -> Tensor:
    return (torch.rand(count, dtype=torch.float64) < p).nonzero().flatten()


SAMPLERS = [by_successes, by_trials, by_static_trials, by_brute_force]
RATES = [0.003, 1 / 256, 0.1, 0.25, 0.5, 0.97, 255 / 256 + 0.002]
"""0.25 is 64 / 256, which random bytes represent exactly; the last rate is beyond their range."""


def fit(seen: np.ndarray, probabilities: np.ndarray) -> float:
    """The p-value of chi-square. Adjacent bins are merged up to 10 expected counts each."""
    bins, low, expected = [], 0, seen.sum() * probabilities
    for high in range(1, len(seen) + 1):
        if expected[low:high].sum() >= 10 and (expected[high:].sum() >= 10 or high == len(seen)):
            bins.append((seen[low:high].sum(), expected[low:high].sum()))
            low = high
    observed, wanted = np.array(bins, dtype=float).T
    assert len(bins) > 1
    return float(scipy.stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def binomial(found: np.ndarray, count: int, p: float) -> float:
    """The p-value of `found` as numbers of successes in `count` trials."""
    least, most = scipy.stats.binom.ppf([1e-9, 1 - 1e-9], count, p)
    support = np.arange(least, most + 2)
    below = np.concatenate([[0], scipy.stats.binom.cdf(support[:-1], count, p), [1]])
    return fit(np.bincount(np.searchsorted(support[:-1], found), minlength=len(support)), np.diff(below))


def numbers(sampler: Sampler, p: float, repetitions: int = 1500) -> float:
    """Test that the number of successes is binomial, by chi-square."""
    count = max(400, round(60 / p))
    return binomial(np.array([len(sampler(count, p)) for _ in range(repetitions)]), count, p)


def gaps(sampler: Sampler, p: float, wanted: int = 40_000) -> float:
    """Test that the gaps between successes are geometric, by chi-square."""
    at = sampler(int((wanted + 8 * math.sqrt(wanted)) / p) + 1, p)[:wanted]
    if len(at) < wanted:  # by more than 7 standard errors
        return 0.0
    between = np.diff(at.numpy(), prepend=-1)
    edges = np.unique(scipy.stats.geom.ppf(np.linspace(0, 1, 101)[1:-1], p))
    seen = np.bincount(np.searchsorted(edges, between), minlength=len(edges) + 1)
    below = np.concatenate([[0], scipy.stats.geom.cdf(edges, p), [1]])
    return fit(seen, np.diff(below))


def positions(sampler: Sampler, p: float, wanted: int = 40_000) -> float:
    """Test that the counts in 64 equal parts are independent binomials, by their squared deviations."""
    of_each = int(wanted / p / 64)
    seen = np.bincount(sampler(64 * of_each, p).numpy() // of_each, minlength=64)
    return float(scipy.stats.chi2.sf(((seen - of_each * p) ** 2).sum() / (of_each * p * (1 - p)), 64))


def at_too_high_a_rate(count: int, p: float) -> Tensor:
    """By 5% of min(p, 1 - p)."""
    return by_brute_force(count, p + 0.05 * min(p, 1 - p))


def with_gaps_one_too_long(count: int, p: float) -> Tensor:
    at = by_brute_force(count, p)
    at = at + torch.arange(len(at))
    return at[at < count]


def with_more_in_the_first_half(count: int, p: float) -> Tensor:
    """The rate is 5% higher in the first half and lower in the second."""
    off = 0.05 * min(p, 1 - p)
    front, back = by_brute_force(count // 2, p + off), by_brute_force(count - count // 2, p - off)
    return torch.cat([front, back + count // 2])


def in_pairs(count: int, p: float) -> Tensor:
    return (torch.rand(-(-count // 2), dtype=torch.float64) < p).repeat_interleave(2)[:count].nonzero().flatten()


def pairs(sampler: Sampler, p: float, lag: int = 1, count: int = 2**18) -> float:
    """Independence of trials at distance `lag`, by chi-square over disjoint pairs."""
    row = torch.zeros(count, dtype=torch.int64)
    row[sampler(count, p)] = 1
    first, second = row[: count // (2 * lag) * 2 * lag].view(-1, 2, lag).unbind(1)
    seen = torch.bincount((2 * first + second).flatten(), minlength=4).numpy()
    return fit(seen, np.array([(1 - p) ** 2, p * (1 - p), p * (1 - p), p * p]))


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("statistic", [numbers, gaps, positions])
def test_numbers_are_binomial_gaps_geometric_and_positions_uniform(
    statistic: Callable[[Sampler, float], float], sampler: Sampler, p: float
) -> None:
    assert statistic(sampler, p) > MIN_P_VALUE


@pytest.mark.parametrize("lag", [1, 2, 7, 8, 64])
@pytest.mark.parametrize("p", [0.02, 0.1, 0.25, 0.5, 0.97])
@pytest.mark.parametrize("sampler", SAMPLERS[:4])
def test_trials_are_independent(sampler: Sampler, p: float, lag: int) -> None:
    """Of neighbors, and at the distances of a byte and of a 64-bit word."""
    assert pairs(sampler, p, lag) > MIN_P_VALUE


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(
    ("statistic", "sampler"),
    [
        *product((numbers, gaps), (at_too_high_a_rate, with_gaps_one_too_long, in_pairs)),
        *product((positions,), (at_too_high_a_rate, with_more_in_the_first_half)),
        *product((pairs,), (at_too_high_a_rate, in_pairs)),
    ],
)
def test_wrong_samplers_are_rejected(statistic: Callable[[Sampler, float], float], sampler: Sampler, p: float) -> None:
    """A rate off by 5%, gaps off by one, a slope of 5%, trials in pairs."""
    assert statistic(sampler, p) < MIN_P_VALUE / 100
