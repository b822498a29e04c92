"""Drawing only the successes, or eight trials per random number, is equivalent to drawing every trial.

A test fails if the p-value of its statistic is below `MIN_P_VALUE`. The seed in conftest.py fixes the outcome; another
seed would fail one test in ten thousand. Every statistic is also validated against wrong samplers, which it rejects.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.bernoulli import MIN_P_VALUE, RATES, SAMPLERS, Sampler, by_brute_force, fit, gaps, numbers, positions


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
    """Each trial determines two positions."""
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
def test_the_statistics_reject_wrong_samplers(
    statistic: Callable[[Sampler, float], float], sampler: Sampler, p: float
) -> None:
    """A rate off by 5%, gaps off by one, a slope of 5%, trials in pairs."""
    assert statistic(sampler, p) < MIN_P_VALUE / 100
